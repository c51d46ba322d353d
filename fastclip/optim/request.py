"""What make_private is asked for, read and checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from fastclip.accounting.segments import Entry
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.checks import not_negative
from fastclip.clipping import Clipping, resolve
from fastclip.clipping.resolve import named
from fastclip.data.plan import SAMPLING, Request
from fastclip.errors import ArgumentError
from fastclip.model import validation

FAST_MODES = ("fast", "ghost")
MATERIALISED_MODES = ("hooks", "functorch", "ew")
SPREAD_MODES = ("ghost_fsdp", "ghost_tp")
"""Opacus' own, whose losses are taken apart sample by sample."""
MODES = (*FAST_MODES, *MATERIALISED_MODES, *SPREAD_MODES, "no_op")


class Afforded(float):
    """A noise multiplier that a privacy budget affords.

    Args:
        epochs: of the run that spends it. delta: of the budget. reserved: counts that it covers, too.
    """

    def __new__(cls, value: float, *_: Any) -> Afforded:
        return super().__new__(cls, value)

    def __init__(
        self, value: float, epochs: float = 0.0, delta: float = 0.0, reserved: Sequence[Entry] = ()
    ) -> None:
        self.epochs, self.delta, self.reserved = epochs, delta, reserved


@dataclass(frozen=True, eq=False)
class PrivacyRequest:
    """The arguments of one make_private. It holds model and data: it lasts as long as that call."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Any
    data_loader: DataLoader
    noise_multiplier: float
    max_grad_norm: float | Sequence[float]
    batch_first: bool
    loss_reduction: str
    clipping: str | Clipping
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    model_loss: str
    sampling: Request
    options: Mapping[str, Any]
    """Further keywords, which are the strategy's, or those of an optimizer of Opacus."""
    secure: bool
    planned: Afforded | None
    """The noise multiplier, where it was found for a budget."""
    strategy: Clipping | None
    """None in Opacus' own modes."""

    @classmethod
    def checked(
        cls, secure: bool, mechanism: str, *, criterion: Any, clipping: Any, noise_multiplier: Any,
        kwargs: Mapping[str, Any], **given: Any,
    ) -> PrivacyRequest:  # fmt: skip
        """Arguments of `FastPrivacyEngine.make_private`, all of them.

        Args:
            secure: the engine's noise is secure. mechanism: of its accountant.

        Raises:
            fastclip.errors.*: naming the keyword and the way out.
        """
        clipping, options = named(clipping, kwargs)
        mode, reduction = given["grad_sample_mode"], given["loss_reduction"]
        fast = mode in FAST_MODES
        validation.choice("grad_sample_mode", mode, MODES)
        validation.choice("loss_reduction", reduction, ("mean", "sum"))
        if criterion is None:
            criterion = nn.CrossEntropyLoss(reduction=reduction)
        check_criterion(criterion, reduction, given["module"])
        validation.check_model_loss(given["model_loss"], reduction, fast)
        if mode not in SPREAD_MODES and given["model_loss"] == "own":
            check_coupling(criterion)
        validation.check_inner_step(given["optimizer"])
        validation.check_arguments(given)
        drawn = Request(**{name: given.pop(name) for name in SAMPLING})
        if not fast:
            _check_for_opacus(mode, drawn, clipping, given["rand_on_empty"])
        if given["noise_generator"] is not None and secure:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit noise_generator")
        planned = noise_multiplier if isinstance(noise_multiplier, Afforded) else None
        sigma = not_negative("noise_multiplier", noise_multiplier)
        validation.check_optimizer(given["module"], given["optimizer"])
        strategy = resolve(clipping, options, sigma) if fast else None
        if strategy is not None:
            validation.check_schedule(strategy.noise, mechanism)
        return cls(
            criterion=criterion, clipping=clipping, noise_multiplier=sigma, sampling=drawn,
            options=options, secure=secure, planned=planned, strategy=strategy, **given,
        )  # fmt: skip

    @property
    def fast(self) -> bool:
        """Not one of Opacus' own modes."""
        return self.grad_sample_mode in FAST_MODES

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the noisy gradients."""
        given = self.optimizer
        return given.original_optimizer if isinstance(given, DPOptimizer) else given

    def of(self, *names: str) -> dict[str, Any]:
        """Some of the arguments, by name."""
        return {name: getattr(self, name) for name in names}


def _check_for_opacus(mode: str, sampling: Request, clipping: Any, rand_on_empty: bool) -> None:
    """Refuse what Opacus' own modes do not do."""
    if asked := sampling.beyond_opacus:
        raise ArgumentError(
            f"grad_sample_mode={mode!r} draws rows as Opacus does, without {', '.join(asked)}; omit "
            "grad_sample_mode, or these"
        )
    if rand_on_empty and mode not in MATERIALISED_MODES:
        raise ArgumentError(
            f"rand_on_empty=True in grad_sample_mode={mode!r} would train on placeholder rows; omit "
            "it, or use the fast mode, where they contribute nothing"
        )
    if isinstance(clipping, Clipping):
        raise ArgumentError(
            f"grad_sample_mode={mode!r} clips as Opacus does, which takes 'flat', 'per_layer' or "
            "'adaptive'; strategies of fastclip.clipping run in the fast mode: omit grad_sample_mode"
        )

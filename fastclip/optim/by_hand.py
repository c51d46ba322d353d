"""An optimizer that is made by hand, as with Opacus, over a model that was wrapped by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer as OpacusOptimizer

from fastclip.checks import not_negative
from fastclip.clipping import Clipping, resolve
from fastclip.clipping.resolve import named
from fastclip.errors import ArgumentError
from fastclip.model import validation
from fastclip.model.by_hand import module_of, pickled_by_opacus
from fastclip.noise.keystream import require_cipher
from fastclip.optim.optimizer import FastDPOptimizer


class _Kind(type):
    """What make_private returns is a DPOptimizer, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        asked = cls.__dict__.get("stands_for")
        return type.__instancecheck__(cls, instance) or (
            asked is not None and isinstance(instance, asked)
        )


class DPOptimizer(FastDPOptimizer, metaclass=_Kind):
    """opacus.optimizers.DPOptimizer over the parameters of a `GradSampleModule` that was made before.

    Args:
        optimizer: the inner optimizer.
        noise_multiplier: sigma, standard deviation of the noise over the sensitivity.
        max_grad_norm: C; a list, one a parameter tensor, with clipping="per_layer".
        expected_batch_size: B, the public denominator where loss_reduction is "mean".
        loss_reduction: "mean" divides the noisy sum by B; "sum" does not.
        generator: of the noise (torch's global one if None).
        secure_mode: cryptographic noise; no generator then.
        clipping: a strategy of fastclip.clipping, or the name of a preset.
        **options: of the preset.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument. StepError: no such model.

    Formal guarantee: that of `FastDPOptimizer` for each real step. Nobody accounts for it unless a hook
    does (`attach_step_hook`), and nobody knows how samples are drawn, as with Opacus.
    """

    stands_for = FastDPOptimizer
    _together = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], expected_batch_size: float | None,
        loss_reduction: str = "mean", generator: torch.Generator | None = None,
        secure_mode: bool = False, clipping: str | Clipping = "flat", **options: Any,
    ) -> None:  # fmt: skip
        validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if generator is not None and secure_mode:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit generator")
        if secure_mode:
            require_cipher()
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        inner = (
            optimizer.original_optimizer if isinstance(optimizer, OpacusOptimizer) else optimizer
        )
        validation.check_inner_step(inner)
        clipping, options = named(clipping, options)
        strategy = resolve(clipping, options, noise_multiplier)
        keeper = module_of(inner).clip_with(inner, strategy, max_grad_norm, together=self._together)
        super().__init__(
            inner, keeper=keeper, noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction,
            generator=generator, secure_mode=secure_mode,
        )  # fmt: skip

    def __setstate__(self, state: Any) -> None:
        if "keeper" not in vars(self):
            raise pickled_by_opacus(type(self).__name__)
        super().__setstate__(state)


class DistributedDPOptimizer(DPOptimizer):
    """opacus.optimizers.DistributedDPOptimizer over `DPDDP(GradSampleModule(model))`: it adds up the
    sums of all ranks, and noise once.

    Args, raises and guarantee: as of `DPOptimizer`; B is that of all ranks together.
    """

    _together = True

    def reduce_gradients(self) -> None:
        """Nothing to do: the ranks exchange their sums before noise is added."""

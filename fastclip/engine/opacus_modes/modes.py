"""make_private of Opacus' own modes: Opacus' code, inside fastclip's checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader

from fastclip.accounting.ledger import Ledger
from fastclip.backward.guards import say_untrained
from fastclip.core.opacus_names import HANDLES, check_mode
from fastclip.core.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.data.design import Releases
from fastclip.data.plan import Drawing, call_for_loader
from fastclip.data.samplers import length_of
from fastclip.distributed.processes import ranks_of_opacus, report
from fastclip.distributed.ranks import Ranks
from fastclip.engine.model import go_on_with
from fastclip.engine.opacus_modes.optimizers import optimizer_class
from fastclip.engine.release import account_with, agree_to_train, parameters_of
from fastclip.engine.run import PrivacyRequest
from fastclip.errors import ArgumentError

_ASKED = (
    "module", "optimizer", "criterion", "data_loader", "noise_multiplier", "max_grad_norm",
    "batch_first", "loss_reduction", "clipping", "noise_generator", "grad_sample_mode",
    *(("wrap_model", "rand_on_empty") if HANDLES else ()),
)  # fmt: skip
"""Arguments of Opacus' make_private."""


def make_by_opacus(
    request: PrivacyRequest, making: Preparation, *, ledger: Callable[[], Ledger],
    validate: Callable[..., None],
) -> tuple:  # fmt: skip
    """The result of Opacus' make_private, with fastclip's optimizers.

    Args:
        ledger: returns the engine's ledger when a step is taken. validate: the engine's.
    """
    module = request.module
    check_mode(request.grad_sample_mode, module, wrap_model=request.wrap_model)
    ranks = ranks_of_opacus(module)
    making.undo.push(partial(report, ranks))
    trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
    go_on_with(ledger(), module if request.wrap_model else None, module, trained)
    engine = _OpacusEngine(ledger(), request.secure, request, making, ranks, validate)
    made = engine.make_private(
        poisson_sampling=not request.sampling.own_order, **request.of(*_ASKED), **request.options
    )
    wrapper, optimizer, drawing = made[0], made[1], engine.drawing
    assert drawing is not None
    held = set(parameters_of(optimizer))
    if ranks is not None:
        asked = ("noise_multiplier", "max_grad_norm", "clipping", "loss_reduction")
        agree_to_train(
            ranks, optimizer.original_optimizer, {p: n for p, n in trained.items() if p in held},
            secure_mode=request.secure, **request.of(*asked, "grad_sample_mode"),
        )  # fmt: skip
    optimizer.bind(wrapper, ranks)
    say_untrained({p: n for n, p in wrapper._module.named_parameters() if p not in held})
    optimizer.batch.draws = drawing.draws
    releases = Releases(drawing.design, drawing.draws, ledger, ranks)
    account_with(optimizer, releases, ranks)
    return made


@dataclass(eq=False)
class _OpacusEngine(PrivacyEngine):
    """Opacus' engine for one make_private. Its methods call fastclip's, which may be overridden."""

    accountant: Ledger
    secure_mode: bool
    request: PrivacyRequest
    making: Preparation
    ranks: Ranks | None
    validated: Callable[..., None]
    drawing: Drawing | None = None
    secure_rng = dataset = None

    def validate(self, *, module: nn.Module, **_: Any) -> None:
        self.validated(module=module)

    def _prepare_model(self, module: nn.Module, **asked: Any) -> Any:
        make = super()._prepare_model

        def own() -> Any:
            ModuleValidator.validate(module, strict=True)  # these modes have no other rules
            wrapper = make(module, **asked)
            if wrapper is not module:
                self.making.undo.callback(wrapper.cleanup)
            return wrapper

        return self.making.call_for_own(MODEL, own, module, **asked)

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool, **_: bool
    ) -> DataLoader:
        if not poisson_sampling and length_of(data_loader) is None:
            raise ArgumentError(
                "Opacus' modes need the length of the data loader, and its IterableDataset has none. "
                "Give the data set a __len__, or omit grad_sample_mode.",
                doc="sampling",
            )
        self.drawing = call_for_loader(
            self.making, data_loader, self.request.sampling, self.accountant, self.ranks,
            secure=self.secure_mode, required=False, distributed=distributed,
            **self.request.of("batch_first", "rand_on_empty"),
        )  # fmt: skip
        return self.drawing.loader

    def _prepare_optimizer(self, **asked: Any) -> Any:
        own = partial(self._own_optimizer, **asked)
        return self.making.call_for_own(OPTIMIZER, own, **asked)

    def _own_optimizer(
        self, *, clipping: str, distributed: bool, grad_sample_mode: str,
        noise_generator: torch.Generator | None = None, **options: Any,
    ) -> DPOptimizer:  # fmt: skip
        """fastclip's optimizer. B is that of the fast mode, divided by the number of processes."""
        kind = optimizer_class(clipping, distributed, grad_sample_mode)
        assert self.drawing is not None
        size = self.drawing.design.expected_batch_size
        if distributed:
            size /= torch.distributed.get_world_size()
        options |= {"optimizer": self.request.inner, "expected_batch_size": size}
        return kind(generator=noise_generator, secure_mode=self.secure_mode, **options)

    def _prepare_criterion(self, **asked: Any) -> Any:
        make = partial(super()._prepare_criterion, **asked)
        return self.making.call_for_own(CRITERION, make, **asked)

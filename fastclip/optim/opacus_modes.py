"""make_private of Opacus' own modes: Opacus' code, with what fastclip guards around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader

from fastclip._opacus import HANDLES, check_mode
from fastclip.accounting.ledger import Ledger
from fastclip.backward.guards import say_untrained
from fastclip.data.plan import Drawing, call_for_loader, prepare
from fastclip.data.recorded import Releases
from fastclip.data.samplers import length_of
from fastclip.errors import ArgumentError
from fastclip.model.ownership import go_on_with
from fastclip.optim.inner_step import parameters_of
from fastclip.optim.materialised import optimizer_class
from fastclip.optim.release import agree_to_train
from fastclip.optim.request import PrivacyRequest
from fastclip.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.parallel.processes import ranks_of_opacus, refuse
from fastclip.parallel.ranks import Ranks

_ASKED = (
    "module", "optimizer", "criterion", "data_loader", "noise_multiplier", "max_grad_norm",
    "batch_first", "loss_reduction", "clipping", "noise_generator", "grad_sample_mode",
    *(("wrap_model", "rand_on_empty") if HANDLES else ()),
)  # fmt: skip
"""Arguments of Opacus' make_private."""


def make_by_opacus(
    request: PrivacyRequest, making: Preparation, undo: ExitStack, *,
    ledger: Callable[[], Ledger], validate: Callable[..., None],
) -> tuple:  # fmt: skip
    """What Opacus' make_private returns, with optimizers of our own.

    Args:
        undo: leaves the model as it was. ledger: of the engine, whenever a step is taken.
        validate: the engine's.
    """
    module, mode = request.module, request.grad_sample_mode
    check_mode(mode, module, wrap_model=request.wrap_model)
    ranks = ranks_of_opacus(module)
    undo.push(partial(_refuse, ranks))
    trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
    go_on_with(ledger(), module if request.wrap_model else None, module, trained)
    engine = _OpacusEngine(request, making, undo, ledger(), ranks, validate)
    made = engine.make_private(
        poisson_sampling=request.sampling.poisson_sampling, **request.of(*_ASKED), **request.options
    )
    wrapper, optimizer, drawing = made[0], made[1], engine.drawing
    assert drawing is not None
    if ranks is not None:
        _agree_to_train(ranks, optimizer, trained, request)
    optimizer.bind(wrapper, ranks)
    held = set(parameters_of(optimizer))
    say_untrained({p: n for n, p in wrapper._module.named_parameters() if p not in held})
    optimizer.batch.draws = drawing.draws
    optimizer.account_with(Releases(drawing.design, drawing.draws, ledger, ranks))
    return made


def _refuse(ranks: Ranks | None, kind: Any, error: BaseException | None, trace: Any) -> None:
    if isinstance(error, Exception):
        refuse(ranks, error)


def _agree_to_train(
    ranks: Ranks, private: DPOptimizer, trained: Mapping[nn.Parameter, str],
    request: PrivacyRequest,
) -> None:  # fmt: skip
    """All ranks have been given the same.

    Raises:
        ArgumentError: naming what differs.
    """
    held = set(parameters_of(private))
    agree_to_train(
        ranks, private.original_optimizer, {p: n for p, n in trained.items() if p in held},
        **request.of("noise_multiplier", "max_grad_norm", "clipping", "loss_reduction"),
        grad_sample_mode=request.grad_sample_mode, secure_mode=request.secure,
    )  # fmt: skip


class _OpacusEngine(PrivacyEngine):
    """Opacus' engine, for one make_private: its methods call those of ours, which may be overridden."""

    secure_rng = dataset = None
    drawing: Drawing | None = None

    def __init__(
        self, request: PrivacyRequest, making: Preparation, undo: ExitStack, ledger: Ledger,
        ranks: Ranks | None, validate: Callable[..., None],
    ) -> None:  # fmt: skip
        self.accountant, self.secure_mode = ledger, request.secure
        self._request, self._making, self._undo = request, making, undo
        self._ranks, self._validate = ranks, validate

    def validate(self, *, module: nn.Module, **_: Any) -> None:
        self._validate(module=module)

    def _prepare_model(self, module: nn.Module, **asked: Any) -> Any:
        make = super()._prepare_model

        def own() -> Any:
            ModuleValidator.validate(module, strict=True)  # these modes have no rule for more
            wrapper = make(module, **asked)
            if wrapper is not module:
                self._undo.callback(wrapper.cleanup)
            return wrapper

        return self._making.call_for_own(MODEL, own, module, **asked)

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool, **asked: bool
    ) -> DataLoader:
        """A loader that draws as the fast mode's.

        Raises:
            ArgumentError: a stream without a length, of which Opacus' modes make q = 1 / length.
        """
        if not poisson_sampling and length_of(data_loader) is None:
            raise ArgumentError(
                "Opacus' modes need the length of the data loader, and its IterableDataset has none. "
                "Give the data set a __len__, or omit grad_sample_mode"
            )
        asked.update(self._request.of("batch_first", "rand_on_empty"))
        make = partial(
            prepare, data_loader, self._request.sampling, self.accountant, self._ranks,
            secure=self.secure_mode, distributed=distributed, required=False, **asked,
        )  # fmt: skip
        self.drawing = call_for_loader(
            self._making, make, data_loader, poisson_sampling=poisson_sampling,
            distributed=distributed, **asked,
        )  # fmt: skip
        return self.drawing.loader

    def _prepare_optimizer(  # type: ignore[override]
        self, *, optimizer: torch.optim.Optimizer, clipping: str, distributed: bool,
        grad_sample_mode: str, expected_batch_size: float,
        noise_generator: torch.Generator | None = None, **options: Any,
    ) -> DPOptimizer:  # fmt: skip
        """The optimizer of one of Opacus' own modes; B is the fast mode's, on each process its share."""

        def own() -> DPOptimizer:
            kind = optimizer_class(clipping, distributed, grad_sample_mode)
            assert self.drawing is not None
            size = self.drawing.design.expected_batch_size
            if distributed:
                size /= torch.distributed.get_world_size()
            return kind(
                self._request.inner, expected_batch_size=size, generator=noise_generator,
                secure_mode=self.secure_mode, **options,
            )  # fmt: skip

        private: DPOptimizer = self._making.call_for_own(
            OPTIMIZER, own, optimizer=optimizer, clipping=clipping, distributed=distributed,
            grad_sample_mode=grad_sample_mode, expected_batch_size=expected_batch_size,
            noise_generator=noise_generator, **options,
        )  # fmt: skip
        return private

    def _prepare_criterion(self, **asked: Any) -> Any:
        make = partial(super()._prepare_criterion, **asked)
        return self._making.call_for_own(CRITERION, make, **asked)

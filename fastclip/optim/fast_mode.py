"""The steps of make_private in the fast mode: model, data loader, optimizer, criterion.

Each is a call of the engine's method of Opacus' name, which a subclass may override.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from fastclip.accounting.ledger import Ledger
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.data.plan import Drawing, call_for_loader, prepare
from fastclip.data.recorded import Releases
from fastclip.model.by_hand import unwrapped
from fastclip.model.model_loss import replace_losses
from fastclip.model.module import FastGradSampleHooks, FastGradSampleModule
from fastclip.model.ownership import go_on_with, held_by
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.optim.request import PrivacyRequest
from fastclip.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.parallel.processes import bare, ranks_of, refuse, uncompiled
from fastclip.parallel.ranks import whole
from fastclip.planner import Planner

PrivateModel = FastGradSampleModule | FastGradSampleHooks


def make_fast(
    request: PrivacyRequest, making: Preparation, undo: ExitStack, *, planner: Planner,
    ledger: Callable[[], Ledger], validate: Callable[..., None],
) -> tuple[tuple, Releases]:  # fmt: skip
    """What make_private returns, and what records the steps.

    Args:
        undo: gives the model back. planner, validate: the engine's.
        ledger: of the engine, whenever a step is taken.
    """
    model = _make_model(request, making, undo, ledger(), planner, validate)
    drawing = _make_loader(request, making, model, ledger())
    ranks = model.keeper.clipping.ranks
    releases = Releases(drawing.design, drawing.draws, ledger, ranks)
    optimizer = _make_optimizer(request, making, model.keeper, releases)
    if request.grad_sample_mode == "ghost":
        criterion = _make_criterion(request, making, model, optimizer)
        return (model, optimizer, criterion, drawing.loader), releases
    return (model, optimizer, drawing.loader), releases


def _make_model(
    request: PrivacyRequest, making: Preparation, undo: ExitStack, ledger: Ledger,
    planner: Planner, validate: Callable[..., None],
) -> PrivateModel:  # fmt: skip
    """The model, every layer of which is intercepted; the ledger counts what it was trained with."""

    def own() -> PrivateModel:
        with unwrapped(request.module) as module:
            made = _intercepted(request, module, ledger, planner, validate)
        undo.push(partial(_give_back, made))
        return made

    asked = request.of("batch_first", "max_grad_norm", "loss_reduction", "grad_sample_mode")
    model: PrivateModel = making.call_for_own(
        MODEL, own, request.module, **asked, wrap_model=request.wrap_model
    )
    if request.model_loss == "per_sample":
        replace_losses(model, request.criterion)
    return model


def _intercepted(
    request: PrivacyRequest, module: nn.Module, ledger: Ledger, planner: Planner,
    validate: Callable[..., None],
) -> PrivateModel:  # fmt: skip
    wrapper = module if isinstance(module, FastGradSampleModule) else None
    module = module if wrapper is None else wrapper._module
    assert request.strategy is not None
    with whole(ranks := ranks_of(module)):
        validate(module=bare(module))
        trained, frozen = held_by(request.optimizer, uncompiled(bare(module)), ranks)
        keeper = BookKeeper(
            trained, request.strategy, request.max_grad_norm,
            mean_loss=request.loss_reduction == "mean", batch_axis=0 if request.batch_first else 1,
            frozen=frozen, planner=planner,
        )  # fmt: skip
        keeper.clipping.ranks = ranks
        go_on_with(ledger, wrapper, module, keeper.names)
        if wrapper is not None:
            wrapper.to_standard_module()  # all is checked: the earlier engine may let go
        kind = FastGradSampleModule if request.wrap_model else FastGradSampleHooks
        return kind(module, keeper=keeper, **request.of("batch_first", "loss_reduction"))


def _give_back(model: Any, kind: Any, error: BaseException | None, trace: Any) -> None:
    """make_private failed after this model was made."""
    model.cleanup()
    if isinstance(error, Exception):
        refuse(model.keeper.clipping.ranks, error)


def _make_loader(
    request: PrivacyRequest, making: Preparation, model: PrivateModel, ledger: Ledger
) -> Drawing:
    """The loader that trains; the model hears of its draws."""
    keeper, sampling = model.keeper, request.sampling
    ranks, asked = keeper.clipping.ranks, request.of("batch_first", "rand_on_empty")
    make = partial(
        prepare, request.data_loader, sampling, ledger, ranks, secure=request.secure,
        distributed=ranks is not None, **asked,
    )  # fmt: skip
    drawing = call_for_loader(
        making, make, request.data_loader, poisson_sampling=sampling.poisson_sampling,
        distributed=ranks is not None, **asked,
    )  # fmt: skip
    keeper.batch.accumulation_allowed = not sampling.poisson_sampling
    keeper.batch.draws, keeper.batch.views = drawing.draws, sampling.views
    keeper.trace.listen(bare(model._module), drawing.draws, sampling.views)
    return drawing


def _make_optimizer(
    request: PrivacyRequest, making: Preparation, keeper: BookKeeper, releases: Releases
) -> FastDPOptimizer:
    """The optimizer of a private model; `releases` records its steps."""
    size, inner = releases.design.expected_batch_size, request.inner

    def own() -> FastDPOptimizer:
        made = FastDPOptimizer(
            inner, keeper=keeper, expected_batch_size=size, generator=request.noise_generator,
            secure_mode=request.secure, **request.of("noise_multiplier", "loss_reduction"),
        )  # fmt: skip
        made.account_with(releases)  # first: what an override attaches to it stays
        return made

    names = ("max_grad_norm", "clipping", "noise_generator", "grad_sample_mode")
    private: FastDPOptimizer = making.call_for_own(
        OPTIMIZER, own, optimizer=inner, expected_batch_size=size,
        distributed=keeper.clipping.ranks is not None, **request.options,
        **request.of("noise_multiplier", "loss_reduction", *names),
    )  # fmt: skip
    return private


def _make_criterion(
    request: PrivacyRequest, making: Preparation, model: PrivateModel, optimizer: FastDPOptimizer
) -> Any:
    """The criterion, which the fast mode leaves as it is."""
    asked = request.of("criterion", "loss_reduction")
    criterion = making.call(
        CRITERION, lambda: request.criterion, module=model, optimizer=optimizer, **asked,
        **request.options,
    )  # fmt: skip
    check_criterion(criterion, request.loss_reduction, model)
    check_coupling(criterion)
    return criterion

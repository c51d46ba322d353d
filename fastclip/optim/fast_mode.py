"""The steps of make_private in the fast mode: model, data loader, optimizer, criterion.

Each is a call of the engine's method of Opacus' name, which a subclass may override.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fastclip.accounting.ledger import Ledger
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.data.plan import call_for_loader
from fastclip.data.recorded import Releases
from fastclip.model.by_hand import unwrapped
from fastclip.model.model_loss import replace_losses
from fastclip.model.module import FastGradSampleHooks, FastGradSampleModule
from fastclip.model.ownership import go_on_with, held_by
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.optim.request import PrivacyRequest
from fastclip.optim.step_hooks import account_with
from fastclip.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.parallel.processes import bare, ranks_of, refuse, uncompiled
from fastclip.parallel.ranks import whole
from fastclip.planner import Planner

PrivateModel = FastGradSampleModule | FastGradSampleHooks


def make_fast(
    request: PrivacyRequest, making: Preparation, *, planner: Planner,
    ledger: Callable[[], Ledger], validate: Callable[..., None],
) -> tuple[tuple, Releases]:  # fmt: skip
    """What make_private returns, and what records the steps.

    Args:
        ledger: of the engine, whenever a step is taken. planner, validate: the engine's.
    """

    def own() -> PrivateModel:
        with unwrapped(request.module) as module:
            made = _intercepted(request, module, ledger(), planner, validate)
        making.undo.push(partial(refuse, made.keeper.clipping.ranks))
        making.undo.callback(made.cleanup)
        return made

    model: PrivateModel = making.call_for_own(
        MODEL, own, request.module, wrap_model=request.wrap_model,
        **request.of("batch_first", "max_grad_norm", "loss_reduction", "grad_sample_mode"),
    )  # fmt: skip
    keeper, ranks = model.keeper, model.keeper.clipping.ranks
    if request.model_loss == "per_sample":
        replace_losses(model, request.criterion)
    drawing = call_for_loader(
        making, request.data_loader, request.sampling, ledger(), ranks, secure=request.secure,
        distributed=ranks is not None, **request.of("batch_first", "rand_on_empty"),
    )  # fmt: skip
    keeper.batch.accumulation_allowed = not request.sampling.poisson_sampling
    keeper.batch.draws, keeper.batch.views = drawing.draws, request.sampling.views
    keeper.trace.listen(drawing.draws, request.sampling.views)
    releases = Releases(drawing.design, drawing.draws, ledger, ranks)
    optimizer = _make_optimizer(request, making, keeper, releases)
    if request.grad_sample_mode != "ghost":
        return (model, optimizer, drawing.loader), releases
    criterion = making.call(
        CRITERION, lambda: request.criterion, module=model, optimizer=optimizer,
        **request.of("criterion", "loss_reduction"), **request.options,
    )  # fmt: skip
    check_criterion(criterion, request.loss_reduction, model)
    check_coupling(criterion)
    return (model, optimizer, criterion, drawing.loader), releases


def _intercepted(
    request: PrivacyRequest, module: nn.Module, ledger: Ledger, planner: Planner, validate: Any
) -> PrivateModel:
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


def _make_optimizer(
    request: PrivacyRequest, making: Preparation, keeper: BookKeeper, releases: Releases
) -> FastDPOptimizer:
    size, inner, ranks = releases.design.expected_batch_size, request.inner, keeper.clipping.ranks

    def own() -> FastDPOptimizer:
        made = FastDPOptimizer(
            inner, keeper=keeper, expected_batch_size=size, generator=request.noise_generator,
            secure_mode=request.secure, **request.of("noise_multiplier", "loss_reduction"),
        )  # fmt: skip
        account_with(made, releases, ranks)  # first: what an override attaches to it stays
        return made

    names = ("max_grad_norm", "clipping", "noise_generator", "grad_sample_mode")
    private: FastDPOptimizer = making.call_for_own(
        OPTIMIZER, own, optimizer=inner, expected_batch_size=size,
        distributed=ranks is not None, **request.options,
        **request.of("noise_multiplier", "loss_reduction", *names),
    )  # fmt: skip
    return private

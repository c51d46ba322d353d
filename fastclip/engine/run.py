"""One call of make_private: its request, its steps in the fast mode, and the run that it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastclip.accounting.calibration import find_noise_multiplier
from fastclip.accounting.epsilon import epsilon
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Entry
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.loss import check_coupling, check_criterion
from fastclip.backward.state import GradientState
from fastclip.clipping import Clipping, ConstantNoise, resolve
from fastclip.clipping.resolve import named
from fastclip.clipping.strategy import noise_in_words
from fastclip.core.checks import between, not_negative, positive
from fastclip.core.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.counts.lines import said_of_overlaps, worded
from fastclip.data.design import ALLOCATED, AsPlanned, Releases, SamplingDesign, planned_history
from fastclip.data.loader import draws_securely
from fastclip.data.plan import SAMPLING, Request, call_for_loader
from fastclip.distributed.processes import bare, ranks_of, report, uncompiled
from fastclip.distributed.ranks import whole
from fastclip.engine import validation
from fastclip.engine.by_hand import unwrapped
from fastclip.engine.mechanism import Mechanism, neighbors, trusted
from fastclip.engine.model import FastGradSampleHooks, FastGradSampleModule, go_on_with, held_by
from fastclip.engine.model_loss import replace_losses
from fastclip.engine.optimizer import FastDPOptimizer
from fastclip.engine.release import account_with
from fastclip.errors import ArgumentError, say
from fastclip.ops.planner import NormPlan, PlanLog, Planner
from fastclip.trace.findings import TraceLog

# -------------------------------------------------------------------------------------------------
# The arguments of make_private, read and checked once.


FAST_MODES = ("fast", "ghost")
MATERIALIZED_MODES = ("hooks", "functorch", "ew")
SPREAD_MODES = ("ghost_fsdp", "ghost_tp")
"""Opacus' modes for sharded models, which split losses per sample."""
MODES = (*FAST_MODES, *MATERIALIZED_MODES, *SPREAD_MODES, "no_op")


class Afforded(float):
    """A noise multiplier that fits a privacy budget.

    Args:
        epochs: length of the run. delta: of the budget. reserved: counts that the budget also covers.
    """

    def __new__(cls, value: float, *_: Any) -> Afforded:
        return super().__new__(cls, value)

    def __init__(
        self, value: float, epochs: float = 0.0, delta: float = 0.0, reserved: Sequence[Entry] = ()
    ) -> None:
        self.epochs, self.delta, self.reserved = epochs, delta, reserved


@dataclass(frozen=True, eq=False)
class PrivacyRequest:
    """The arguments of one make_private. It holds model and data, and lasts as long as that call."""

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
    """Further keywords, of the strategy or of an optimizer of Opacus."""
    secure: bool
    planned: Afforded | None
    """The noise multiplier, if it was found for a budget."""
    strategy: Clipping | None
    """None in Opacus' own modes."""

    @classmethod
    def checked(
        cls, secure: bool, mechanism: str, *, criterion: Any, clipping: Any, noise_multiplier: Any,
        kwargs: Mapping[str, Any], **given: Any,
    ) -> PrivacyRequest:  # fmt: skip
        """Checks all arguments of `FastPrivacyEngine.make_private`.

        Args:
            secure: the engine's noise is secure. mechanism: of its accountant.

        Raises:
            fastclip.errors.*: naming the keyword, with a suggested fix.
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
        sampling = Request(**{name: given.pop(name) for name in SAMPLING})
        if not fast:
            _check_for_opacus(mode, sampling, clipping, given["rand_on_empty"])
        if given["noise_generator"] is not None and secure:
            raise ArgumentError(
                "Passing seed is prohibited in secure mode. Omit noise_generator.",
                doc="secure-mode",
            )
        planned = noise_multiplier if isinstance(noise_multiplier, Afforded) else None
        sigma = not_negative("noise_multiplier", noise_multiplier)
        validation.check_optimizer(given["module"], given["optimizer"])
        strategy = resolve(clipping, options, sigma) if fast else None
        if strategy is not None:
            validation.check_schedule(strategy.noise, mechanism)
        return cls(
            criterion=criterion, clipping=clipping, noise_multiplier=sigma, sampling=sampling,
            options=options, secure=secure, planned=planned, strategy=strategy, **given,
        )  # fmt: skip

    @property
    def fast(self) -> bool:
        """It is not one of Opacus' own modes."""
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
    """Raise an error for options that Opacus' own modes do not support."""
    if asked := sampling.beyond_opacus:
        raise ArgumentError(
            f"grad_sample_mode={mode!r} samples as Opacus does and does not support "
            f"{', '.join(asked)}. Omit grad_sample_mode.",
            doc="unsupported-options",
        )
    if rand_on_empty and mode not in MATERIALIZED_MODES:
        raise ArgumentError(
            f"rand_on_empty=True with grad_sample_mode={mode!r} would train on placeholder samples. "
            "Omit grad_sample_mode.",
            doc="unsupported-options",
        )
    if isinstance(clipping, Clipping):
        raise ArgumentError(
            f"clipping expects 'flat', 'per_layer' or 'adaptive' with grad_sample_mode={mode!r}, got a "
            "strategy of fastclip.clipping. Omit grad_sample_mode.",
            doc="unsupported-options",
        )


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PrivateRun:
    """One private model's run. It outlives the model without keeping it alive."""

    design: SamplingDesign
    """The sampling design."""
    releases: Releases
    state: ClippingState
    batch: LogicalBatch
    plan_log: PlanLog
    looks: Sequence[object]
    """Dry runs of the calls of its gradient state."""
    trace_log: TraceLog
    planned: Afforded | None
    """Its noise multiplier, if it was found for a budget."""
    held: ref[GradientState]
    """The gradient state, which the model and its optimizer hold."""
    loader: ref[DataLoader]

    @classmethod
    def of(
        cls,
        grad_state: GradientState,
        releases: Releases,
        loader: DataLoader,
        planned: Afforded | None,
    ) -> PrivateRun:
        """The run of a model that has just been made private."""
        run = cls(
            releases.design, releases, grad_state.clipping, grad_state.batch, grad_state.plan_log,
            grad_state.calls.looks, grad_state.trace.log, planned, ref(grad_state), ref(loader),
        )  # fmt: skip
        if planned is not None:
            whole = [*releases.ledger.history, *run.whole_history(planned.epochs)]
            releases.planned = sum(steps for *_, steps in whole)
        return run

    @property
    def grad_state(self) -> GradientState | None:
        """The gradient state, while the model or its optimizer is alive and private; else None."""
        grad_state = self.held()
        return None if grad_state is None or self.batch.retired else grad_state

    @property
    def counts(self) -> bool:
        """It can still take steps, or has released some without a cleanup()."""
        return self.grad_state is not None or bool(self.releases.steps and not self.batch.retired)

    def plan(self) -> NormPlan:
        """How norms are computed."""
        return self.plan_log.plan(self.looks)

    def sensitivity(self) -> float:
        """The sensitivity for the next step's noise; that of the last step if the next is unpaid."""
        state = self.state
        ahead = state.next if self.batch.fresh else state.current
        same_step = state.strategy.threshold.same_step
        return float(state.strategy.sensitivity(state.paid if same_step else ahead))

    def secured(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What nobody can predict or repeat in the current run, and what somebody could."""
        source, loader = self.state.noise, self.loader()
        samples = self.design.secure if loader is None else draws_securely(loader)
        kept = {
            "noise of the gradients and of counts": source.secure,
            "which samples are drawn": samples,
            "the last bits of the noise, which could reveal sums": source.guarded,
            "the tails of the noise, which end before those of a normal distribution": source.secure,
        }
        return tuple(t for t in kept if kept[t]), tuple(t for t in kept if not kept[t])

    def whole_history(self, epochs: float) -> list[Any]:
        """The history of the ledger after `epochs` passes."""
        schedule, sigma = self.state.strategy.noise, self.state.first_multiplier
        reserved = () if self.planned is None else self.planned.reserved
        return [*planned_history(self.design, schedule, sigma, epochs), *reserved]


def mechanism_of(
    run: PrivateRun, ledger: Ledger, spent: Any, delta: float | None, epochs: float | None
) -> Mechanism:
    """`FastPrivacyEngine.mechanism` for one run; `spent` maps delta to the epsilon of its ledger."""
    design, state, accountant, planned = run.design, run.state, ledger.mechanism(), run.planned
    delta = getattr(planned, "delta", None) if delta is None else between("delta", delta, 0, 1)
    epochs = getattr(planned, "epochs", None) if epochs is None else positive("epochs", epochs)
    whole = () if epochs is None else tuple(run.whole_history(epochs))
    secure, insecure = run.secured()
    hidden = ledger.protected.beside(design.protected).size_is_secret
    return Mechanism(
        unit=design.unit, neighbors=neighbors(design, hidden), sampler=design.sampler,
        sample_rate=design.rate, sampled_independently=design.poisson,
        public_size=design.public, units=None if hidden else design.units or None,
        expected_batch_size=design.expected_batch_size, max_batch_size=design.max_batch_size,
        max_samples_per_unit=design.max_samples_per_unit, clipping=state.strategy.described,
        sensitivity=run.sensitivity(), noise=state.levels,
        schedule=noise_in_words(state.strategy.noise), taken=tuple(ledger.history), planned=whole,
        accountant=accountant, delta=delta, epsilon=None if delta is None else spent(delta),
        planned_epsilon=epsilon(whole, delta, accountant) if delta and whole else None,
        secure=secure, insecure=insecure,
        trusted=(*trusted(design, hidden), *said_of_overlaps(ledger)),
    )  # fmt: skip


def noise_for(
    ledger: Ledger, design: SamplingDesign, clipping: str | Clipping, target: tuple[float, float],
    epochs: float, reserved: tuple[Entry, ...], accounting: dict[str, Any],
) -> Afforded:  # fmt: skip
    """The noise multiplier of the first step of a run that may spend (epsilon, delta).

    Args:
        epochs: length of the run. reserved: counts to cover. accounting: options of the accountant.
    """
    if len(ledger) > 0:
        say(
            "make_private_with_epsilon plans as if nothing was spent, but this engine has recorded "
            "steps, so the overall epsilon will be higher than target_epsilon. Lower target_epsilon.",
            doc="privacy-budget",
        )
    steps = design.steps_in(epochs)
    if design.sampler == ALLOCATED and steps % design.steps:
        say(
            f"A budget of {epochs:g} epochs with sampling='allocation' covers "
            f"{-(-steps // design.steps)} whole passes, because a pass that ends early costs as much as "
            "a whole one. Plan whole epochs.",
            doc="privacy-budget",
        )
    schedule = clipping.noise if isinstance(clipping, Clipping) else ConstantNoise()
    records = planned_history(design, schedule, 1.0, epochs)
    if design.sampler != ALLOCATED:  # whose real steps find_noise_multiplier puts into epochs
        steps = sum(count for *_, count in records)
        schedule = AsPlanned(design, schedule, epochs)
    sigma = find_noise_multiplier(
        target_epsilon=target[0], target_delta=target[1], sample_rate=records[0][1], steps=steps,
        schedule=schedule, accountant=ledger.mechanism(), reserved=reserved, **accounting,
    )  # fmt: skip
    # B clipped gradients have a mean of norm S at most, and the noise is sigma S / B
    least, size = sigma * min(factor for factor, *_ in records), design.expected_batch_size
    if least > size:
        say(
            f"target_epsilon={target[0]:g} needs sigma = {least:.4g} for B = {size:g}, so the noise of "
            f"each parameter is {least / size:.3g} (sigma / B) times the largest norm of the clipped "
            "mean gradient. Raise target_epsilon or the batch size.",
            doc="privacy-budget",
        )
    return Afforded(sigma, epochs, target[1], reserved)


def says_too_much(call: str, delta: float, design: SamplingDesign) -> bool:
    """Warn if delta lets a run publish one whole sample of N, and return whether it does.

    If q and B are public, N is B / q, which reveals nothing about the data.
    """
    size = design.expected_batch_size / design.rate if design.public else design.units
    if delta * size < 1:
        return False
    unit = worded(design.unit)
    say(
        f"delta={delta:g} in {call} is at least 1/N (N = {size:.0f} {unit}s), which allows a run to "
        f"publish one whole {unit}. Choose a smaller delta, or silence this with "
        'warnings.filterwarnings("ignore", "delta=").',
        doc="privacy-budget",
    )
    return True


def set_groups(grad_states: Sequence[GradientState], ids: Tensor, module: Any) -> None:
    """`FastPrivacyEngine.set_groups` for one of the models with these gradient states."""
    if module is not None:
        grad_states = [
            grad_state
            for grad_state in grad_states
            if grad_state is getattr(module, "grad_state", None)
        ]
    if len(grad_states) != 1:
        raise ArgumentError(
            f"module expects the private model that the groups are for, and {len(grad_states)} models "
            "of this engine match. Pass the model that make_private returned.",
            doc="groups",
        )
    grad_states[0].clipping.set_groups(ids, 0 in grad_states[0].batch.in_hand())


# -------------------------------------------------------------------------------------------------
# The steps of make_private in the fast mode: model, data loader, optimizer, criterion.
#
# Each step calls the engine's method with Opacus' name, which a subclass may override.


PrivateModel = FastGradSampleModule | FastGradSampleHooks


def make_fast(
    request: PrivacyRequest, making: Preparation, *, planner: Planner,
    ledger: Callable[[], Ledger], validate: Callable[..., None],
) -> tuple[tuple, Releases]:  # fmt: skip
    """The result of make_private, and the object that records the steps.

    Args:
        ledger: returns the engine's ledger when a step is taken. planner, validate: the engine's.
    """

    def own() -> PrivateModel:
        with unwrapped(request.module) as module:
            made = _intercepted(request, module, ledger(), planner, validate)
        making.undo.push(partial(report, made.grad_state.clipping.ranks))
        making.undo.callback(made.cleanup)
        return made

    model: PrivateModel = making.call_for_own(
        MODEL, own, request.module, wrap_model=request.wrap_model,
        **request.of("batch_first", "max_grad_norm", "loss_reduction", "grad_sample_mode"),
    )  # fmt: skip
    grad_state, ranks = model.grad_state, model.grad_state.clipping.ranks
    if request.model_loss == "per_sample":
        replace_losses(model, request.criterion)
    drawing = call_for_loader(
        making, request.data_loader, request.sampling, ledger(), ranks, secure=request.secure,
        distributed=ranks is not None, **request.of("batch_first", "rand_on_empty"),
    )  # fmt: skip
    grad_state.batch.accumulation_allowed = request.sampling.own_order
    grad_state.batch.draws, grad_state.batch.views = drawing.draws, request.sampling.views
    grad_state.trace.listen(drawing.draws, request.sampling.views)
    releases = Releases(drawing.design, drawing.draws, ledger, ranks)
    optimizer = _make_optimizer(request, making, grad_state, releases)
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
        grad_state = GradientState(
            trained, request.strategy, request.max_grad_norm,
            mean_loss=request.loss_reduction == "mean", batch_axis=0 if request.batch_first else 1,
            frozen=frozen, planner=planner,
        )  # fmt: skip
        grad_state.clipping.ranks = ranks
        go_on_with(ledger, wrapper, module, grad_state.names)
        if wrapper is not None:
            wrapper.to_standard_module()  # all checks have passed: the earlier engine lets go
        kind = FastGradSampleModule if request.wrap_model else FastGradSampleHooks
        return kind(module, grad_state=grad_state, **request.of("batch_first", "loss_reduction"))


def _make_optimizer(
    request: PrivacyRequest, making: Preparation, grad_state: GradientState, releases: Releases
) -> FastDPOptimizer:
    size, inner, ranks = (
        releases.design.expected_batch_size,
        request.inner,
        grad_state.clipping.ranks,
    )

    def own() -> FastDPOptimizer:
        made = FastDPOptimizer(
            inner, grad_state=grad_state, expected_batch_size=size, generator=request.noise_generator,
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

"""The one release of a logical batch, from clipped sums to noisy gradients; and a step's hooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from fastclip import ops
from fastclip.accounting.steps import saved_entries
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.logical_batch import LogicalBatch, State
from fastclip.backward.state import GradientState, ShardedSums
from fastclip.core.opacus_names import OPACUS_MARK
from fastclip.distributed import ranks as release
from fastclip.distributed.ranks import Ranks, whole_of
from fastclip.distributed.shards import digest, number_of
from fastclip.errors import ArgumentError, StepError, say
from fastclip.ops.noise import NoiseSource


def released(
    parameters: Sequence[nn.Parameter], take: Callable[[], list[Tensor | None]],
    record: Callable[[], None], std: float | Tensor, divisor: float, noise: NoiseSource,
) -> list[Tensor]:  # fmt: skip
    """(sum + N(0, std^2)) / divisor for every parameter, in one process: the mechanism of every mode.

    Args:
        take: returns the clipped sums, once.
        record: records the release. It is called after all checks and before noise is drawn.
    """
    sums = take()
    record()
    return ops.noise_finalize(sums, list(parameters), std, divisor, noise)


def noisy_gradients(
    grad_state: GradientState, parameters: Sequence[nn.Parameter], batches: int, divisor: float,
    record: Callable[[], None],
) -> list[Tensor]:  # fmt: skip
    """(sum + N(0, (sigma_grad S)^2)) / divisor for every parameter, over all ranks that train.

    Args:
        batches: number of batches in the logical batch.
        record: as for `released`. Several ranks record after they have exchanged sums and counts.

    Raises:
        ArgumentError: the noise multiplier is negative or not finite.
        StepError: the sums are not the clipped ones, or the ranks are not in the same step.
    """
    state = grad_state.clipping
    std, given = _noise_std(state), grad_state.sums
    if state.ranks is None:
        take = partial(given.take_all, parameters)
        return released(parameters, take, record, std, divisor, state.noise)
    compared: dict[str, float] = {"step": state.step, "batches": batches, "divisor": divisor}
    compared["noise_multiplier"] = state.noise_multiplier
    if isinstance(given, ShardedSums):
        compared["backward passes in the sums"] = given.passes
    if isinstance(std, Tensor):
        std = state.ranks.largest(std)  # needed if ranks clip at other thresholds
    else:
        compared["noise_std"] = std
    whole = [whole_of(state.ranks, p) for p in parameters]
    compared |= digest_of_names(grad_state.names.get(p, "") for p in whole)
    state.ranks.in_step(**compared)
    rest: Any = parameters, std, divisor, state.noise
    if isinstance(given, ShardedSums):
        return release.noisy_shards(state.ranks, given.buckets, given.parts(), *rest)
    return release.noisy_gradients(state.ranks, [given.take(p) for p in parameters], *rest)


def divisor_of(optimizer: Any, batches: int) -> float:
    """The public number that divides a sum of `batches` batches."""
    mean = optimizer.loss_reduction != "sum"
    return float(optimizer.expected_batch_size) * batches if mean else 1.0


def check_alike(grad_state: GradientState, optimizer: Any, **settings: Any) -> None:
    """Check that all ranks train the same model in the same way.

    The settings of the inner `optimizer` are compared in every step.

    Raises:
        ArgumentError: naming what differs.
    """
    state = grad_state.clipping
    if state.ranks is None:
        return
    agree_to_train(
        state.ranks, optimizer, grad_state.names, noise_multiplier=state.first_multiplier,
        max_grad_norm=[value.tolist() for value in state.next.tensors().values()],
        clipping=re.sub(r" at 0x[0-9a-f]+", "", repr(state.strategy)), **settings,
    )  # fmt: skip


def agree_to_train(
    ranks: Ranks, optimizer: Any, names: Mapping[nn.Parameter, str], **settings: Any
) -> None:
    """`check_alike` for any mode.

    Args:
        optimizer: the inner one. names: of the trained parameters.
    """
    wrapper, settings_of = ranks.wrapper, partial(_settings, ref(optimizer))
    assert wrapper is not None
    ranks.followed["digest of the optimizer's settings (lr, ...)"] = settings_of
    replicated = () if isinstance(wrapper, FSDPModule) else wrapper.parameters()
    ranks.agree(
        {
            "trained parameters": [(n, tuple(p.shape), str(p.dtype)) for p, n in names.items()],
            "weights": digest([*replicated, *wrapper.buffers()]),
            **settings,
        }
    )
    ranks.check_replicas()


def digest_of_names(names: Iterable[str]) -> dict[str, float]:
    """The digest of trained parameters that ranks compare in a step."""
    return {"digest of the trained parameters' names (requires_grad)": number_of(list(names))}


def _noise_std(state: ClippingState) -> float | Tensor:
    """sigma_grad * S; a tensor if S lies on an accelerator, so that the step does not wait for it."""
    sigma = state.noise_multiplier
    if not 0 <= sigma < float("inf"):
        raise ArgumentError(
            f"noise_multiplier expects a finite number >= 0, got {sigma}.", doc="noise"
        )
    noise, sensitivity = state.gradient_noise(), state.sensitivity()
    if not noise or sensitivity.device.type == "cpu":
        return noise * float(sensitivity) if noise else 0.0
    return noise * sensitivity


def _settings(held: ref[Any]) -> float:
    """A digest of an optimizer's settings, without tensors."""
    optimizer = held()
    assert optimizer is not None, "its step runs"
    settings = [
        (name, value)
        for group in optimizer.param_groups
        for name, value in sorted(group.items())
        if not isinstance(value, (Tensor, list))
    ]
    return number_of((type(optimizer).__name__, settings))


# -------------------------------------------------------------------------------------------------
# Only released gradients may reach the step of the inner optimizer.
#
# In Opacus' modes autograd writes `p.grad` next to the per-sample gradients, unclipped and without
# noise. In the fast mode there is no `p.grad` before the release, and the sums would never be released.


class Gate:
    """A hook before the inner optimizer's step, which lets one step pass after each release.

    It stays on the inner optimizer when the private one is dropped. Otherwise a script that continues
    with the optimizer that it passed to make_private would train on raw gradients.
    """

    def __init__(self) -> None:
        self.open = False
        self.passing = False
        """The step that it has let pass is running."""
        self.grad_state: Callable[[], GradientState | None] = lambda: None
        """In the fast mode the state whose sums must be released first, while it is alive."""

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.open, self.passing = False, self.open
        if self.passing:
            return
        grad_state = self.grad_state()
        if grad_state is not None and grad_state.batch.state in _UNRELEASED:
            raise StepError(
                f"step() of {type(optimizer).__name__} was called on a private model, whose gradients "
                "it would not find. Call step() of the optimizer that make_private returned, or "
                "model.cleanup() to train without privacy.",
                doc="optimizers",
            )
        if not any(OPACUS_MARK in p.__dict__ for p in parameters_of(optimizer)):
            return
        raise StepError(
            f"step() of {type(optimizer).__name__} was called on a private model, whose gradients are "
            "not clipped and have no noise. Call step() of the optimizer that make_private returned, or "
            "model.cleanup() to train without privacy.",
            doc="optimizers",
        )

    def shut(self, *_: Any) -> None:
        """Let no step pass until the next release; also a hook after the inner optimizer's step."""
        self.open = self.passing = False


_UNRELEASED = (State.GATHERED, State.HELD, State.JOINED, State.STALE)

_GATES: WeakKeyDictionary[Optimizer, Gate] = WeakKeyDictionary()


def gate_of(optimizer: Optimizer) -> Gate:
    """The gate of an inner optimizer, closed."""
    gate = _GATES.get(optimizer)
    if gate is None:
        gate = _GATES[optimizer] = Gate()
        optimizer.register_step_pre_hook(gate)
        optimizer.register_step_post_hook(gate.shut)
    gate.shut()
    return gate


def is_open(optimizer: Optimizer) -> bool:
    """Whether this is the inner optimizer of a private one that has just released its gradients."""
    gate = _GATES.get(optimizer)
    return gate is not None and gate.open


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, frozen ones included."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def release_to(parameters: Sequence[nn.Parameter], gradients: Iterable[Tensor]) -> None:
    """Set `p.grad` to these released gradients, in the memory layout of each parameter."""
    given = [*gradients]
    if [*map(Tensor.stride, given)] != [*map(Tensor.stride, parameters)]:
        given = [ops.laid_out_as(x, p) for x, p in zip(given, parameters, strict=True)]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient


def keep_only(optimizer: Optimizer, released: Iterable[nn.Parameter]) -> None:
    """Drop the gradient of every parameter that this step does not release."""
    parameters, kept = parameters_of(optimizer), {*map(id, released)}
    for own, p in zip(map(id, parameters), parameters, strict=True):
        if own not in kept:
            p.grad = None


# -------------------------------------------------------------------------------------------------
# Hooks of a real step. The accountant's runs first, before noise is drawn, and cannot be replaced.


Hook = Callable[[DPOptimizer], None]

_LEDGER = "digest of the ledger (one checkpoint, and passes over the loader begun on every rank)"


class StepHooks:
    """The hooks of one optimizer. Every real step is recorded.

    Opacus keeps one hook, the accountant's, which `attach_step_hook` and `step_hook = fn` replace.

    Args:
        batch: the logical batch that is released; its `account` records it.
    """

    def __init__(self, batch: LogicalBatch) -> None:
        self._batch = batch
        self.listed: list[Hook] = []
        """Hooks after the accountant's."""
        self.releasing = self._running = False
        self.resumes = False
        """State of earlier steps was loaded since the last release."""

    @property
    def ledger(self) -> Any:
        """The ledger of the accountant's hook."""
        return getattr(self._batch.account, "ledger", None)

    @property
    def in_one(self) -> Hook | None:
        """All current hooks as one callable."""
        hooks = tuple(self.listed)
        return partial(self._call, hooks) if hooks or self._batch.account else None

    def record(self, optimizer: DPOptimizer) -> None:
        """Record one release before its noise is drawn. If this fails, nothing was released.

        The first one warns if state of earlier steps was loaded, but no earlier step is recorded.
        """
        if self.resumes and self.ledger is not None and not self.ledger.history:
            say(
                "optimizer.load_state_dict loaded the state of earlier steps, but the engine has "
                "recorded none, so epsilon starts at 0 again. Resume with engine.load_checkpoint, which "
                "also loads the privacy spent.",
                doc="checkpoints",
            )
        self.resumes = False
        try:
            if self._batch.account is not None:
                self._batch.account(optimizer)
        finally:
            self.releasing = False

    def run(self, optimizer: DPOptimizer) -> None:
        """Run the hooks of one real step. Several ranks record it here, after their exchange."""
        if self.releasing:
            self.record(optimizer)
        self._running = True
        try:
            for hook in tuple(self.listed):
                hook(optimizer)
        finally:
            self._running = False

    def _call(self, hooks: tuple[Hook, ...], optimizer: DPOptimizer) -> None:
        outermost, self._running = not self._running, True
        try:
            if outermost and self._batch.account is not None:
                self._batch.account(optimizer)
            for hook in hooks:
                hook(optimizer)
        finally:
            self._running = not outermost


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the state of an inner optimizer shows steps. SGD without momentum has none."""
    for kept in optimizer.state.values():
        counted = kept.get("step")
        if any(x is not None for x in kept.values()) if counted is None else bool(counted > 0):
            return True
    return False


def account_with(optimizer: Any, record: Any, ranks: Ranks | None) -> None:
    """Record every real step, instead of earlier hooks; `ranks` take each step together."""
    optimizer.step_hook = None
    optimizer.noise_source.account = optimizer.batch.account = record
    if ranks is not None:
        ranks.followed[_LEDGER] = partial(_digest_of_ledger, record)


def _digest_of_ledger(account: Any) -> float:
    """A digest of the recorded steps, which ranks compare."""
    ledger = getattr(account, "ledger", None)
    return 0.0 if ledger is None else number_of(saved_entries(ledger.history))

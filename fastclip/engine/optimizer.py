"""The private optimizer, which turns clipped sums into noisy gradients and steps; and GradScaler."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, SupportsIndex, TypeVar

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fastclip.accounting import NoiseLevels
from fastclip.backward.guards import check_alone
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.loss import ScaledLoss, is_scaled
from fastclip.backward.state import GradientState
from fastclip.clipping.policy import split_error
from fastclip.core.compiler import disable_dynamo
from fastclip.distributed.ranks import whole_of
from fastclip.engine.release import (
    Hook,
    StepHooks,
    check_alike,
    divisor_of,
    gate_of,
    has_stepped,
    keep_only,
    noisy_gradients,
    release_to,
)
from fastclip.errors import ArgumentError, ArgumentTypeError, GraphError, StepError
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise

# -------------------------------------------------------------------------------------------------
# Attributes of private optimizers, most of which the gradient state or the hooks keep.


# mypy: disable-error-code="empty-body"


K = TypeVar("K")


def read(path: str) -> Callable[[Callable[..., Any]], property]:
    """A read-only attribute kept under this path; the decorated function gives type and docstring."""
    return lambda described: property(attrgetter(path), doc=described.__doc__)


def held(path: str) -> Callable[[Callable[..., Any]], property]:
    """The same, but writable."""
    get, (owner, _, name) = attrgetter(path), path.rpartition(".")
    owner_of = attrgetter(owner)
    return lambda described: property(
        get, lambda self, value: setattr(owner_of(self), name, value), doc=described.__doc__
    )


def shown(path: str) -> Callable[[Callable[..., Any]], property]:
    """A copy of a tensor, or None. Changing the copy does not change the noise."""
    get = attrgetter(path)

    def copied(self: Any) -> Tensor | None:
        value: Tensor | None = get(self)
        return None if value is None else value.clone()

    return lambda described: property(copied, doc=described.__doc__)


def private(kind: type[K]) -> type[K]:
    """Decorator of private optimizers: adds the attributes of `_Shared` that the class lacks."""
    for name, value in vars(_Shared).items():
        if isinstance(value, (property, FunctionType)) and name not in vars(kind):
            setattr(kind, name, value)
    return kind


class _Shared:
    """Attributes of every private optimizer, in the fast mode and in Opacus' own modes.

    Each has its own `hooks` (StepHooks), `batch` (LogicalBatch) and noise source (`_source`).
    """

    _source: NoiseSource

    @held("hooks.releasing")
    def releasing(self) -> bool:
        """step() is about to record its release; False if you call `add_noise` yourself."""

    @read("batch.last_was_real")
    def last_step_was_real(self) -> bool:
        """The last `step()` released a noisy step.

        False before the first call, if the call only accumulated (physical batches,
        `signal_skip_step`), and if it raised an error before its release.
        """

    @read("batch.real_steps")
    def real_steps(self) -> int:
        """Number of noisy steps released since make_private, without accumulations."""

    @read("batch.account")
    def account(self) -> Any:
        """The object that records the steps and their sampling; None before make_private."""

    @read("hooks.ledger")
    def ledger(self) -> Any:
        """The accountant that records the steps; None before make_private."""

    @property
    def step_hook(self: Any) -> Hook | None:
        """All current hooks as one callable, like Opacus' only hook; None if there is none.

        Setting it replaces all hooks except the accountant's. The accountant's hook runs first, and
        records a step once, even if the new hook calls the old value of this attribute.
        """
        hooks: StepHooks = self.hooks
        return hooks.in_one

    @step_hook.setter
    def step_hook(self: Any, fn: Hook | None) -> None:
        self.hooks.listed = [] if fn is None else [fn]

    def attach_step_hook(self: Any, fn: Hook) -> None:
        """Calls `fn(self)` in every real step, before the inner step and after earlier hooks.

        Unlike in Opacus, this never replaces the accountant's hook.
        """
        self.hooks.listed.append(fn)

    @held("batch.flags")
    def _step_skip_queue(self) -> list[bool]:
        """Opacus' queue of skip signals, which the logical batch holds."""

    def _check_skip_next_step(self: Any, pop_next: bool = True) -> bool:
        """Whether the next step only accumulates."""
        return bool(self.batch.next_skip(pop=pop_next))

    @property
    def noise_source(self) -> NoiseSource:
        """Source of the noise of gradients and counts.

        Setting it takes effect at the next draw of noise.

        Raises:
            ArgumentError: the current source is secure, and the new one is not.
        """
        return self._source

    @noise_source.setter
    def noise_source(self, value: NoiseSource) -> None:
        if self._source.secure and not (value.secure and value.guarded):
            raise ArgumentError(
                "Passing a seed is prohibited in secure mode, where the noise stays cryptographic and "
                "guarded. For reproducible noise, use an engine without secure_mode.",
                doc="secure-mode",
            )
        value.account = self.account
        self._source = value

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that you passed; None for fastclip's own stream, and in secure mode."""
        return self._source.generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        if value is not None or not self._source.secure:
            self.noise_source = SeededNoise(value)

    @property
    def secure_mode(self) -> bool:
        """Noise is cryptographic and guarded against floating-point attacks. It cannot be turned off."""
        return self._source.secure

    @secure_mode.setter
    def secure_mode(self, value: bool) -> None:
        if value == self._source.secure:
            return
        if value and self.generator is not None:
            raise ArgumentError(
                "Passing seed is prohibited in secure mode. Omit the generator.", doc="secure-mode"
            )
        self.noise_source = SecureNoise() if value else SeededNoise()

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """As in Opacus. The next step warns if the ledger lacks the steps of this state."""
        DPOptimizer.load_state_dict(self, state_dict)
        self.hooks.resumes = has_stepped(self.original_optimizer)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raise an error for `copy.copy`, `copy.deepcopy` and `pickle`.

        A copy would hold the same sums, release them again and write to the same ledger. A copy by
        torch's own rules would also change `step` of the whole class.
        """
        raise StepError(
            f"{type(self).__name__} cannot be copied or pickled, because a copy would release the same "
            "sums again without accounting for it. Save optimizer.state_dict(), or call "
            "engine.save_checkpoint(...).",
            doc="optimizers",
        )


# -------------------------------------------------------------------------------------------------


# mypy: disable-error-code="empty-body"


STATE = "fastclip_clipping"
"""Key of the strategy's state in `FastDPOptimizer.state_dict()`."""


@private
class FastDPOptimizer(DPOptimizer):
    """An Opacus DPOptimizer for sums that the backward pass has clipped already.

    Formal guarantee: each real step releases (sum + N(0, (sigma_grad * S)^2 I)) / B once. The sum has
    L2 sensitivity S, recorded when it was clipped, and B is public. Strategies that count also release
    the counts, with noise sigma_count times their sensitivity. The total cost is that of one Gaussian
    mechanism of noise multiplier sigma: 1 / sigma^2 = 1 / sigma_grad^2 + 1 / sigma_count^2 (Zhao et al.
    2025, Lemma 3.1). Neighbors differ in one sample that was added or removed. Amplification by
    sampling holds for Poisson sampling alone (see `make_private`).

    Args:
        optimizer: the inner optimizer.
        grad_state: gradient state of the private model.
        noise_multiplier: the total sigma; with a schedule that of the first step.
        expected_batch_size: B.
        loss_reduction: "mean" divides by B.
        generator: source of the noise (torch's global one if None).
        secure_mode: cryptographic noise instead of a generator's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, grad_state: GradientState, noise_multiplier: float,
        expected_batch_size: float | None, loss_reduction: str = "mean",
        generator: torch.Generator | None = None, secure_mode: bool = False,
    ) -> None:  # fmt: skip
        self.grad_state, self.hooks = grad_state, StepHooks(grad_state.batch)
        if grad_state.clipping.strategy.threshold.count_noise_ratio and not expected_batch_size:
            raise ArgumentError(
                "expected_batch_size expects a number > 0 with a strategy that counts, got "
                f"{expected_batch_size!r}. Pass the public denominator of its fractions.",
                doc="noisy-counts",
            )
        super().__init__(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=None,  # type: ignore[arg-type]
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction,  # type: ignore[arg-type]
            generator=generator, secure_mode=secure_mode,
        )  # fmt: skip
        self._gate = gate_of(self.original_optimizer)
        self._gate.grad_state = weakref.ref(grad_state)
        # sigma_1, whatever the schedule's first factor is
        grad_state.clipping.first_multiplier = noise_multiplier
        check_alike(grad_state, optimizer, loss_reduction=loss_reduction, secure_mode=secure_mode)

    # Attributes that the model's gradient state keeps

    @held("grad_state.clipping.noise_multiplier")
    def noise_multiplier(self) -> float:
        """Total sigma of the next real step, which the accountant records.

        Setting it takes effect at the next real step. A schedule continues from the new value.
        """

    @read("grad_state.clipping.levels")
    def noise_levels(self) -> NoiseLevels:
        """Noise multipliers of the next real step: total, gradients and counts."""

    @held("grad_state.clipping.expected_batch_size")
    def expected_batch_size(self) -> float | None:
        """B, the public denominator of the gradients and of the counts."""

    @property
    def max_grad_norm(self) -> float:
        """C of the next logical batch. Per layer it is the norm of the thresholds, for groups C_0.

        Setting it takes effect at the next logical batch. The noise of the current one uses the
        sensitivity at which it was clipped. A per-layer strategy takes a list of thresholds, or their
        new norm. Thresholds of groups keep their ratios.
        """
        return self.grad_state.clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float] | None) -> None:
        if value is not None:  # None: the base class's constructor; the gradient state has it
            self.grad_state.clipping.max_grad_norm = value  # type: ignore[assignment]

    @read("grad_state.clipping.max_grad_norms")
    def max_grad_norms(self) -> list[float]:
        """The thresholds of a per-layer strategy, in the order of the parameters."""

    @shown("grad_state.clipping.current.threshold")
    def threshold(self) -> Tensor:
        """The threshold that norms of the current (or last) logical batch are compared with, a copy.

        C, a scalar or one value per group or layer; Z for a global scale function. It is public after
        the step. Before the step it is not accounted for yet if it comes from the same step's counts.
        """

    @shown("grad_state.clipping.current.weights")
    def group_weights(self) -> Tensor | None:
        """theta_k of the current (or last) logical batch, [k], if the strategy reweights groups."""

    @property
    def sensitivity(self) -> Tensor:
        """L2 sensitivity S of the sum, to which its noise is scaled, a scalar."""
        return self.grad_state.clipping.sensitivity().clone()

    @read("grad_state.per_sample_norms")
    def per_sample_norms(self) -> Tensor | None:
        """Raw norms of the last backward pass, [samples] or [units]. For debugging; NOT private."""

    @held("grad_state.monitor.enabled")
    def warn_of_non_finite(self) -> bool:
        """Warn once, in a backward pass, if a sample's gradient is not finite. Default False.

        For debugging; NOT private: the warning reveals something about one sample.
        """

    @shown("grad_state.clipping.noisy_counts")
    def noisy_counts(self) -> Tensor | None:
        """Noisy counts of the last real step; None before it, or if nothing is counted.

        A scalar for a quantile. [2, k] for groups: beyond and within the threshold, or for a quantile
        per group, counted and not counted. [k] for reweighting: the group sizes.
        """

    @read("batch.consumed")
    def accumulated_iterations(self) -> int:
        """Number of batches that the current (or last) step consumes; scales the sampling rate."""

    @read("grad_state.batch")
    def batch(self) -> LogicalBatch:
        """The state of the logical batch that the next real step releases."""

    @held("grad_state.clipping.noise")
    def _source(self) -> NoiseSource: ...

    @property
    def grad_samples(self) -> list[Tensor]:
        """Not available in the fast mode: see `p.summed_grad` and `per_sample_norms`."""
        raise AttributeError(
            "The fast mode keeps no per-sample gradients. Use p.summed_grad and "
            "optimizer.per_sample_norms, or grad_sample_mode='hooks'."
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler.step(), which would skip steps on overflow."""
        raise StepError(
            "torch.amp.GradScaler does not scale the clipping threshold, and skips steps on overflow, "
            "which reveals something about raw gradients. Use fastclip.GradScaler instead.",
            doc="mixed-precision",
        )

    # A step

    def clip_and_accumulate(self) -> None:
        """Does nothing: the backward pass has clipped and summed."""

    def add_noise(self) -> None:
        """Records the release, then replaces `p.grad` by the noisy sum over the public denominator."""
        if not self.releasing:  # called by the user: the one release of these sums
            self.batch.step(skip=False)
        parameters, batches = self.params, self.accumulated_iterations
        divisor, record = divisor_of(self, batches), partial(self.hooks.record, self)
        gradients = noisy_gradients(self.grad_state, parameters, batches, divisor, record)
        self.grad_state.penalties.add_to(parameters, gradients)
        keep_only(self, ())
        release_to(parameters, gradients)

    def scale_grad(self) -> None:
        """Does nothing: `add_noise` divides in the same pass over the gradients."""

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `p.grad` and the sums. The sums of a split batch stay until its real step.

        Raises:
            StepError: between backward() and step() of a split batch.
        """
        self.grad_state.zero_grad()
        self.original_optimizer.zero_grad(set_to_none)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Runs everything before the inner step; returns False if this step only accumulates."""
        self.batch.last_was_real = False
        self.grad_state.trace.over()
        if not (parameters := self.params):
            keep_only(self, ())
            return True
        ranks, known = self.grad_state.clipping.ranks, set(map(id, self.grad_state.names))
        whole = parameters if ranks is None else [whole_of(ranks, p) for p in parameters]
        unknown = {*map(id, whole)} - known
        if unknown:
            raise StepError(
                f"{len(unknown)} trainable parameters were added to the optimizer or unfrozen after "
                "make_private, so their gradients are not clipped. Call make_private again.",
                doc="optimizers",
            )
        if not self.batch.retired:
            _take_no_samples(self.grad_state, parameters)
            check_alone(self.grad_state.names)
        self._is_last_step_skipped = skip = self.batch.next_skip()
        self.batch.step(skip=skip)
        if skip:
            self.grad_state.penalties.part_is_over()
            return False
        state, before = self.grad_state.clipping, self.grad_state.clipping.snapshot()
        self.releasing = True
        try:
            self.add_noise()
            state.release(self.accumulated_iterations)
            self.hooks.run(self)
        except BaseException:  # not recorded, a failed hook, Ctrl-C: nothing is released
            keep_only(self, ())
            state.restore(before)
            raise
        finally:
            self.releasing = False
        state.advance()
        self.batch.count_release()
        return True

    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one private step, or only accumulates if the batch memory manager says so."""
        self.batch.last_was_real = False
        if closure is not None:
            with torch.enable_grad():
                closure()
        with self.grad_state.trace.aside():
            if not self.pre_step():
                return None
            self._gate.open = True
            return self.original_optimizer.step()

    def discard_logical_batch(self) -> None:
        """Drops the current logical batch: its sums, counts and gradients.

        Call this if you leave a loop over a BatchMemoryManager early, or skip one of its physical
        batches. Nothing is released, so the privacy cost is zero.
        """
        self.grad_state.discard()
        keep_only(self, ())

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: the next step() only accumulates (BatchMemoryManager calls this).

        Raises:
            StepError: the strategy needs the whole logical batch before it clips.
        """
        policy = self.grad_state.clipping.strategy.threshold
        if do_skip and policy.same_step:
            raise StepError(split_error(type(policy).__name__))
        self.batch.signal(do_skip)

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, and that of the clipping strategy, if any.

        It never holds the generator, the noise multiplier or raw data.
        """
        saved = super().state_dict()
        state = self.grad_state.clipping.state_dict()
        return saved if state is None else {**saved, STATE: state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a `state_dict()` of this class or of Opacus.

        It holds no privacy spent. The next step warns if the ledger lacks the steps of this state.

        Raises:
            ArgumentError: it holds the thresholds of another strategy. Nothing is loaded.
        """
        inner, clipping = dict(state_dict), self.grad_state.clipping
        clipping.load_state_dict(inner.pop(STATE, None), self.batch.fresh)
        super().load_state_dict(inner)
        self.hooks.resumes = bool(clipping.step) or has_stepped(self.original_optimizer)


def _take_no_samples(grad_state: GradientState, parameters: list[nn.Parameter]) -> None:
    """Count an empty batch if the loop gave every parameter a `grad_sample` of no samples.

    Opacus' users do so, without a backward pass, if the model does not accept an empty batch.
    """
    given = (p.__dict__.get("grad_sample") for p in parameters)
    none = all(isinstance(x, Tensor) and x.dim() and not len(x) for x in given)
    if none and grad_state.clipping.ranks is None:
        for p in parameters:
            p.grad_sample = None  # type: ignore[attr-defined]
        grad_state.contribute_none()


# -------------------------------------------------------------------------------------------------
# Loss scaling for float16 that never skips a step.


_DYNAMIC = ("growth_factor", "backoff_factor", "growth_interval")


class GradScaler:
    """Replaces `torch.amp.GradScaler` in a private training script.

    float16 loses gradients below 6e-8. Scaling the loss by a power of two keeps them in the backward
    pass. The engine divides norms and sums by the scale again, exactly, in float32. Thresholds,
    `optimizer.per_sample_norms`, `p.summed_grad` and `p.grad` are then those of the unscaled loss, for
    any scale, and whether or not you call `step` through the scaler.

    torch's scaler skips a step in which any gradient overflows, and adapts its scale to overflows. Both
    reveal something about raw gradients without noise. This scaler never skips, and its scale is fixed.
    A sample whose gradient overflows contributes exactly zero to its step.

    Formal guarantee: the scale changes only the rounding of the release, and which samples overflow,
    each by its own gradient alone. The sensitivity of the sum and its noise are unchanged. This holds
    as long as the scale does not depend on private data.

    Args:
        device: accepted for compatibility with torch, and not used.
        init_scale: the scale, a power of two; default 4096. Choose it on public data
            (docs/mixed_precision.md).
        enabled: False makes every method do what a script without a scaler would do.

    Examples:
        >>> scaler = fastclip.GradScaler()
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     with torch.autocast("cuda", torch.float16):
        ...         loss = criterion(model(x), y)
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()

    Raises:
        ArgumentError: the scale is no power of two from 2^-24 to 2^32.
        ArgumentTypeError: other types, and torch's arguments of a scale that adapts.
    """

    def __init__(
        self, device: str | torch.device | None = None, init_scale: float = 2.0**12,
        enabled: bool = True, **dynamic: Any,
    ) -> None:  # fmt: skip
        if dynamic.keys() & set(_DYNAMIC):
            raise ArgumentTypeError(
                f"fastclip.GradScaler got {sorted(dynamic)}, but a scale that follows overflows reveals "
                "something about raw gradients. Set init_scale instead.",
                doc="mixed-precision",
            )
        if dynamic:
            raise ArgumentTypeError(
                f"fastclip.GradScaler expects device, init_scale and enabled, got {sorted(dynamic)}."
            )
        if isinstance(device, (int, float)):  # torch.cuda.amp.GradScaler takes the scale first
            raise ArgumentTypeError(
                f"device expects a name, got {device!r}. Pass the scale as init_scale={device!r}."
            )
        if not isinstance(enabled, bool):
            raise ArgumentTypeError(f"enabled expects True or False, got {enabled!r}.")
        self._enabled = enabled
        self._scale = power_of_two("init_scale", init_scale)

    @disable_dynamo
    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """The loss times the scale, for `.backward()`; likewise each loss of a list or tuple.

        Scale the whole loss, last. You may add scaled losses and divide them by a number. If you add an
        unscaled loss of the same model, or differentiate one in the same call, the backward pass raises
        an error.

        Raises:
            GraphError: the loss is scaled already.
            ArgumentTypeError: `outputs` is neither a tensor nor a list or tuple of tensors.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if is_scaled(outputs.grad_fn):
                raise GraphError(
                    "The loss is scaled already. Call scaler.scale once, on the sum of the losses.",
                    doc="mixed-precision",
                )
            return ScaledLoss.apply(outputs, self._scale)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        raise ArgumentTypeError(
            f"outputs expects a tensor or a list or tuple of tensors, got {type(outputs).__name__}."
        )

    def unscale_(self, optimizer: FastDPOptimizer) -> None:
        """Does nothing, because `p.summed_grad` holds no scale. Exists for scripts written for torch.

        Raises:
            ArgumentTypeError: the engine did not return this optimizer.
        """
        self._check(optimizer)

    def step(self, optimizer: FastDPOptimizer, *args: Any, **kwargs: Any) -> Any:
        """Always calls `optimizer.step(...)`.

        Raises:
            ArgumentTypeError: the engine did not return this optimizer, so its gradients would keep the
                scale.
        """
        self._check(optimizer)
        return optimizer.step(*args, **kwargs)

    def _check(self, optimizer: Any) -> None:
        if self._enabled and not isinstance(optimizer, FastDPOptimizer):
            raise ArgumentTypeError(
                "optimizer expects the one that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}, whose gradients would keep the scale. Train it without "
                "fastclip.GradScaler.",
                doc="mixed-precision",
            )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Sets the scale of later losses; without an argument nothing happens.

        Args:
            new_scale: a power of two. It must not depend on private data, such as overflows or norms of
                gradients.
        """
        if self._enabled and new_scale is not None:
            self._scale = power_of_two("new_scale", new_scale)

    def get_scale(self) -> float:
        """The scale; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale; empty if not enabled."""
        return {"scale": self._scale} if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues with the scale of a `state_dict()`.

        Raises:
            ArgumentError: any other state. That of torch's scaler depends on raw gradients.
        """
        if not self._enabled:
            return
        if set(state_dict) != {"scale"}:
            raise ArgumentError(
                f"state_dict expects the key 'scale' alone, got {sorted(state_dict)}, and the scale of "
                "torch's scaler follows raw gradients. Set init_scale instead.",
                doc="mixed-precision",
            )
        self._scale = power_of_two("scale", state_dict["scale"])


def power_of_two(name: str, value: Any) -> float:
    """`value` as a float that multiplies and divides float32 numbers exactly."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} expects a power of two, got {value!r}.") from error
    exact = math.isfinite(number) and number > 0 and math.frexp(number)[0] == 0.5
    if not exact or not 2.0**-24 <= number <= 2.0**32:
        raise ArgumentError(
            f"{name} expects a power of two from 2^-24 to 2^32, got {value!r}.",
            doc="mixed-precision",
        )
    return number

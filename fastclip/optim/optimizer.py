# mypy: disable-error-code="empty-body"
"""The private optimizer: clipped sums in, noisy gradients out, then the inner optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fastclip._dynamo import disable_dynamo
from fastclip.accounting import NoiseLevels
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.guards import check_alone
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.clipping.policy import split_refused
from fastclip.errors import ArgumentError, StepError
from fastclip.noise import NoiseSource
from fastclip.optim.attributes import held, private, read, shown
from fastclip.optim.inner_step import gate_of, keep_only, release_to
from fastclip.optim.release import check_alike, divisor_of, noisy_gradients
from fastclip.optim.step_hooks import StepHooks
from fastclip.parallel.ranks import whole_of

STATE = "fastclip_clipping"
"""Key of the strategy's state in `FastDPOptimizer.state_dict()`."""


@private
class FastDPOptimizer(DPOptimizer):
    """An opacus DPOptimizer whose clipping has already happened in the backward pass.

    Formal guarantee: each real step releases (sum + N(0, (sigma_grad * S)^2 I)) / B once, where the
    sum has L2 sensitivity S, recorded when it was clipped, and B is public; and, for strategies that
    count, the counts with noise sigma_count times their sensitivity. Together they cost what one
    Gaussian mechanism of noise multiplier sigma costs: 1 / sigma^2 = 1 / sigma_grad^2 +
    1 / sigma_count^2 (Zhao et al. 2025, Lemma 3.1). Neighbours differ in one row that was added or
    removed; what sampling adds holds for Poisson sampling alone (see `make_private`).

    Args:
        optimizer: the inner optimizer.
        keeper: book-keeper of the private model.
        noise_multiplier: the total sigma, that of the first step where a schedule changes it.
        expected_batch_size: B.
        loss_reduction: "mean" divides by B.
        generator: source of the noise (torch's global one if None).
        secure_mode: cryptographic noise, in the place of a generator's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, keeper: BookKeeper, noise_multiplier: float,
        expected_batch_size: float | None, loss_reduction: str = "mean",
        generator: torch.Generator | None = None, secure_mode: bool = False,
    ) -> None:  # fmt: skip
        self.keeper, self.hooks = keeper, StepHooks(keeper.batch)
        if keeper.clipping.strategy.threshold.count_noise_ratio and not expected_batch_size:
            raise ArgumentError(
                "a strategy that counts expects expected_batch_size > 0, the public denominator of "
                f"its fractions, got {expected_batch_size!r}"
            )
        super().__init__(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=None,  # type: ignore[arg-type]
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction,  # type: ignore[arg-type]
            generator=generator, secure_mode=secure_mode,
        )  # fmt: skip
        self._gate = gate_of(self.original_optimizer)
        self._gate.keeper = weakref.ref(keeper)
        # sigma_1, whatever the schedule's first factor is
        keeper.clipping.first_multiplier = noise_multiplier
        check_alike(keeper, optimizer, loss_reduction=loss_reduction, secure_mode=secure_mode)

    # Kept by the model's book-keeper

    @held("keeper.clipping.noise_multiplier")
    def noise_multiplier(self) -> float:
        """Total sigma of the next real step; what the accountant records.

        Setting it takes effect at the next real step; a schedule goes on from the value set.
        """

    @read("keeper.clipping.levels")
    def noise_levels(self) -> NoiseLevels:
        """Noise multipliers of the next real step: total, of the gradients, of the counts."""

    @held("keeper.clipping.expected_batch_size")
    def expected_batch_size(self) -> float | None:
        """B, the public denominator of the gradients and of the counts."""

    @property
    def max_grad_norm(self) -> float:
        """C of the next logical batch: of layers the norm of the thresholds, of groups C_0.

        Setting it takes effect at the next logical batch: the noise of this one uses the
        sensitivity at which it was clipped. A per-layer strategy takes a list, or a number to which
        all thresholds are rescaled together; those of groups keep their ratios.
        """
        return self.keeper.clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float] | None) -> None:
        if value is not None:  # the base class's constructor: the book-keeper has it already
            self.keeper.clipping.max_grad_norm = value  # type: ignore[assignment]

    @read("keeper.clipping.max_grad_norms")
    def max_grad_norms(self) -> list[float]:
        """The thresholds of a per-layer strategy, in the order of the parameters."""

    @shown("keeper.clipping.current.threshold")
    def threshold(self) -> Tensor:
        """What the norms of the current (or last) logical batch are compared with.

        C, a scalar, or one a group or layer; Z of a global function. Public after the step; before
        it, where thresholds come from the same step's counts, it is not accounted yet. A copy: the
        noise follows from the one that rows were clipped at.
        """

    @shown("keeper.clipping.current.weights")
    def group_weights(self) -> Tensor | None:
        """theta_k of the current (or last) logical batch, [k], where a strategy reweights groups."""

    @property
    def sensitivity(self) -> Tensor:
        """L2 sensitivity S of the sum at which its noise is scaled, a scalar."""
        return self.keeper.clipping.sensitivity().clone()

    @read("keeper.per_sample_norms")
    def per_sample_norms(self) -> Tensor | None:
        """Raw norms [rows, or units] of the last backward. For debugging; NOT private."""

    @held("keeper.monitor.enabled")
    def warn_of_non_finite(self) -> bool:
        """Warn once, in a backward pass, if a sample's gradient is not finite; False.

        For debugging; NOT private: the warning tells something about one row.
        """

    @shown("keeper.clipping.noisy_counts")
    def noisy_counts(self) -> Tensor | None:
        """Noisy counts of the last real step; None before it, or where nothing is counted.

        A scalar for a quantile; [2, k] for groups (beyond and within the threshold; for a quantile
        of groups counted and not); [k], the sizes of the groups, for reweighting.
        """

    @read("batch.consumed")
    def accumulated_iterations(self) -> int:
        """Batches that the current (or last) step consumes: scales the sampling rate."""

    @read("keeper.batch")
    def batch(self) -> LogicalBatch:
        """The state of what the next real step releases."""

    @held("keeper.clipping.noise")
    def _source(self) -> NoiseSource: ...

    @property
    def grad_samples(self) -> list[Tensor]:
        """Never materialised here: see `p.summed_grad` and `per_sample_norms`."""
        raise AttributeError(
            "the fast mode keeps no per-sample gradients; use p.summed_grad and "
            "optimizer.per_sample_norms, or grad_sample_mode='hooks'"
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for this in its step(), which would skip steps on overflow."""
        raise StepError(
            "torch.amp.GradScaler scaled the loss, but not the threshold at which it was clipped, and "
            "would skip steps on overflow, which tells something about raw gradients; use "
            "fastclip.GradScaler in its place, or bfloat16 without a scaler"
        )

    # A step

    def clip_and_accumulate(self) -> None:
        """Nothing to do: the backward pass has clipped and summed."""

    def add_noise(self) -> None:
        """Replace `p.grad` by the noisy sum over the public denominator, once it is recorded."""
        if not self.releasing:  # by hand: the one release of these sums
            self.batch.step(skip=False)
        parameters, batches = self.params, self.accumulated_iterations
        divisor, record = divisor_of(self, batches), partial(self.hooks.record, self)
        gradients = noisy_gradients(self.keeper, parameters, batches, divisor, record)
        self.keeper.penalties.add_to(parameters, gradients)
        keep_only(self, ())
        release_to(parameters, gradients)

    def scale_grad(self) -> None:
        """Nothing to do: `add_noise` divides, in the same pass over the gradients."""

    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and the sums; the sums of a split batch stay until its real step.

        Raises:
            StepError: between backward() and step() of a split batch.
        """
        self.keeper.zero_grad()
        self.original_optimizer.zero_grad(set_to_none)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the inner step; False if this step only accumulates."""
        self.batch.last_was_real = False
        self.keeper.trace.over()
        if not (parameters := self.params):
            keep_only(self, ())
            return True
        ranks, known = self.keeper.clipping.ranks, set(map(id, self.keeper.names))
        whole = parameters if ranks is None else [whole_of(ranks, p) for p in parameters]
        unknown = {*map(id, whole)} - known
        if unknown:
            raise StepError(
                f"{len(unknown)} of the optimizer's trainable parameters were not in it at "
                "make_private, so their gradients are not clipped; call make_private again"
            )
        if not self.batch.retired:
            _take_no_samples(self.keeper, parameters)
            check_alone(self.keeper.names)
        self._is_last_step_skipped = skip = self.batch.next_skip()
        self.batch.step(skip=skip)
        if skip:
            self.keeper.penalties.part_is_over()
            return False
        state, before = self.keeper.clipping, self.keeper.clipping.snapshot()
        self.releasing = True
        try:
            self.add_noise()
            state.release(self.accumulated_iterations)
            self.hooks.run(self)
        except BaseException:  # not accounted, or a hook failed, Ctrl-C: nothing is released
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
        """One private step, or only an accumulation where the batch memory manager says so."""
        self.batch.last_was_real = False
        if closure is not None:
            with torch.enable_grad():
                closure()
        with self.keeper.trace.aside():
            if not self.pre_step():
                return None
            self._gate.open = True
            return self.original_optimizer.step()

    def discard_logical_batch(self) -> None:
        """Give up the logical batch that is being gathered: its sums, counts and gradients.

        For where a loop over a BatchMemoryManager is left before its end, or one of its physical
        batches is skipped. Nothing of it is released, so it costs nothing.
        """
        self.keeper.discard()
        keep_only(self, ())

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus: the next step() only accumulates (BatchMemoryManager calls this).

        Raises:
            StepError: for strategies that must see the whole logical batch before they clip it.
        """
        policy = self.keeper.clipping.strategy.threshold
        if do_skip and policy.same_step:
            raise StepError(split_refused(type(policy).__name__))
        self.batch.signal(do_skip)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and what the clipping strategy has to remember, if anything.

        Never the generator, the noise multiplier or anything of raw data.
        """
        saved = super().state_dict()
        state = self.keeper.clipping.state_dict()
        return saved if state is None else {**saved, STATE: state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, this class's or Opacus'.

        Raises:
            ArgumentError: if it holds the thresholds of another strategy; nothing is loaded.
        """
        inner = dict(state_dict)
        self.keeper.clipping.load_state_dict(inner.pop(STATE, None), self.batch.fresh)
        super().load_state_dict(inner)


def _take_no_samples(keeper: BookKeeper, parameters: list[nn.Parameter]) -> None:
    """A loop gives all parameters a `grad_sample` of no samples, and runs no pass: Opacus' way of an
    empty batch that its model does not take."""
    given = (p.__dict__.get("grad_sample") for p in parameters)
    none = all(isinstance(x, Tensor) and x.dim() and not len(x) for x in given)
    if none and keeper.clipping.ranks is None:
        for p in parameters:
            p.grad_sample = None  # type: ignore[attr-defined]
        keeper.contribute_none()

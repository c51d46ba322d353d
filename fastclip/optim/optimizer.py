"""The private optimizer: clipped sums in, noisy gradients out, then the inner optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fastclip._dynamo import disable_dynamo
from fastclip.accounting import NoiseLevels
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.guards import check_alone
from fastclip.clipping.policy import split_refused
from fastclip.errors import ArgumentError, StepError
from fastclip.noise import NoiseSource
from fastclip.optim.inner_step import gate_of, keep_only, release_to
from fastclip.optim.noise import OwnsNoise
from fastclip.optim.release import check_alike, copied, noisy_gradients
from fastclip.optim.step_hooks import KeepsAccount
from fastclip.parallel.ranks import whole_of

STATE = "fastclip_clipping"
"""Key of the strategy's state in `FastDPOptimizer.state_dict()`."""


class FastDPOptimizer(KeepsAccount, OwnsNoise, DPOptimizer):
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
        self.keeper = keeper
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

    @property
    def noise_multiplier(self) -> float:
        """Total sigma of the next real step; what the accountant records.

        Setting it takes effect at the next real step; a schedule goes on from the value set.
        """
        return self.keeper.clipping.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self.keeper.clipping.noise_multiplier = value

    @property
    def noise_levels(self) -> NoiseLevels:
        """Noise multipliers of the next real step: total, of the gradients, of the counts."""
        return self.keeper.clipping.levels

    @property
    def _source(self) -> NoiseSource:
        return self.keeper.clipping.noise

    @_source.setter
    def _source(self, value: NoiseSource) -> None:
        self.keeper.clipping.noise = value

    @property
    def expected_batch_size(self) -> float | None:
        """B, the public denominator of the gradients and of the counts."""
        return self.keeper.clipping.expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float | None) -> None:
        self.keeper.clipping.expected_batch_size = value

    @property
    def max_grad_norm(self) -> float:
        """C of the next logical batch: of layers the norm of the thresholds, of groups C_0.

        Setting it takes effect at the next logical batch: the noise of this one uses the
        sensitivity at which it was clipped. A per-layer strategy takes a list, or a number to which
        all thresholds are rescaled together; those of groups keep their ratios.
        """
        state = self.keeper.clipping
        return float(state.strategy.max_grad_norm(state.next))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float] | None) -> None:
        if value is None:  # the base class's constructor: the book-keeper has it already
            return
        state = self.keeper.clipping
        state.next = state.strategy.rescaled(state.next, value)

    @property
    def max_grad_norms(self) -> list[float]:
        """The thresholds of a per-layer strategy, in the order of the parameters."""
        return self.keeper.clipping.next.threshold.reshape(-1).tolist()

    @property
    def threshold(self) -> Tensor:
        """What the norms of the current (or last) logical batch are compared with.

        C, a scalar, or one a group or layer; Z of a global function. Public after the step; before
        it, where thresholds come from the same step's counts, it is not accounted yet. A copy: the
        noise follows from the one that rows were clipped at.
        """
        return self.keeper.clipping.current.threshold.clone()

    @property
    def group_weights(self) -> Tensor | None:
        """theta_k of the current (or last) logical batch, [k], where a strategy reweights groups."""
        return copied(self.keeper.clipping.current.weights)

    @property
    def sensitivity(self) -> Tensor:
        """L2 sensitivity S of the sum at which its noise is scaled, a scalar."""
        return self.keeper.clipping.sensitivity().clone()

    @property
    def per_sample_norms(self) -> Tensor | None:
        """Raw norms [rows, or units] of the last backward. For debugging; NOT private."""
        return self.keeper.per_sample_norms

    @property
    def warn_of_non_finite(self) -> bool:
        """Warn once, in a backward pass, if a sample's gradient is not finite; False.

        For debugging; NOT private: the warning tells something about one row.
        """
        return self.keeper.monitor.enabled

    @warn_of_non_finite.setter
    def warn_of_non_finite(self, value: bool) -> None:
        self.keeper.monitor.enabled = value

    @property
    def noisy_counts(self) -> Tensor | None:
        """Noisy counts of the last real step; None before it, or where nothing is counted.

        A scalar for a quantile; [2, k] for groups (beyond and within the threshold; for a quantile
        of groups counted and not); [k], the sizes of the groups, for reweighting.
        """
        return copied(self.keeper.clipping.noisy_counts)

    @property
    def grad_samples(self) -> list[Tensor]:
        """Never materialised here: see `p.summed_grad` and `per_sample_norms`."""
        raise AttributeError(
            "the fast mode keeps no per-sample gradients; use p.summed_grad and "
            "optimizer.per_sample_norms, or grad_sample_mode='hooks'"
        )

    @property
    def accumulated_iterations(self) -> int:
        """Batches that the current (or last) step consumes: scales the sampling rate."""
        batch = self.keeper.batch
        return batch.joined if batch.pending else batch.accumulated

    def clip_and_accumulate(self) -> None:
        """Nothing to do: the backward pass has clipped and summed."""

    def add_noise(self) -> None:
        """Replace `p.grad` by the noisy sum over the public denominator, once it is recorded."""
        if not self.releasing:  # by hand: the one release of these sums
            self.keeper.batch.step(skip=False)
        parameters, batches = self.params, self.accumulated_iterations
        divisor = self._divisor(batches)
        gradients = noisy_gradients(self.keeper, parameters, batches, divisor, self._record)
        self.keeper.penalties.add_to(parameters, gradients)
        keep_only(self, ())
        release_to(parameters, gradients)

    def scale_grad(self) -> None:
        """Nothing to do: `add_noise` divides, in the same pass over the gradients."""

    def _divisor(self, batches: int) -> float:
        if self.loss_reduction == "sum":
            return 1.0
        return float(self.expected_batch_size) * batches  # type: ignore[arg-type]

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
        self.keeper.batch.last_was_real = False
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
        if not self.keeper.batch.retired:
            self._take_no_samples(parameters)
            check_alone(self.keeper.names)
        self._is_last_step_skipped = skip = self._check_skip_next_step()
        self.keeper.batch.step(skip=skip)
        if skip:
            self.keeper.penalties.part_is_over()
            return False
        state, before = self.keeper.clipping, self.keeper.clipping.snapshot()
        self.releasing = True
        try:
            self.add_noise()
            state.release(self.accumulated_iterations)
            self._run_hooks()
        except BaseException:  # not accounted, or a hook failed, Ctrl-C: nothing is released
            keep_only(self, ())
            state.restore(before)
            raise
        finally:
            self.releasing = False
        state.advance()
        self.keeper.batch.count_release()
        return True

    def _take_no_samples(self, parameters: list[nn.Parameter]) -> None:
        """A loop gives all parameters a `grad_sample` of no samples, and runs no pass: Opacus' way of
        an empty batch that its model does not take."""
        given = (p.__dict__.get("grad_sample") for p in parameters)
        none = all(isinstance(x, Tensor) and x.dim() and not len(x) for x in given)
        if none and self.keeper.clipping.ranks is None:
            for p in parameters:
                p.grad_sample = None  # type: ignore[attr-defined]
            self.keeper.contribute_none()

    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One private step, or only an accumulation where the batch memory manager says so."""
        self.keeper.batch.last_was_real = False
        if closure is not None:
            with torch.enable_grad():
                closure()
        with self.keeper.trace.aside():
            if not self.pre_step():
                return None
            self._gate.open = True
            return self.original_optimizer.step()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for this in its step(), which would skip steps on overflow."""
        raise StepError(
            "torch.amp.GradScaler scaled the loss, but not the threshold at which it was clipped, and "
            "would skip steps on overflow, which tells something about raw gradients; use "
            "fastclip.GradScaler in its place, or bfloat16 without a scaler"
        )

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
        self.keeper.batch.signal(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        """Whether the next step only accumulates."""
        return self.keeper.batch.next_skip(pop=pop_next)

    @property
    def _step_skip_queue(self) -> list[bool]:
        """Opacus' queue of signals; the book-keeper's logical batch holds it."""
        return self.keeper.batch.flags

    @_step_skip_queue.setter
    def _step_skip_queue(self, value: list[bool]) -> None:
        self.keeper.batch.flags = value

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
        self.keeper.clipping.load_state_dict(inner.pop(STATE, None), self.keeper.batch.fresh)
        super().load_state_dict(inner)

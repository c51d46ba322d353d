"""The private optimizer: clipped sums in, noisy gradients out, then the inner optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from fastclip import ops
from fastclip.bookkeeping import BookKeeper
from fastclip.errors import ArgumentError, StepError


class FastDPOptimizer(DPOptimizer):
    """An opacus DPOptimizer whose clipping has already happened in the backward pass.

    Formal guarantee: each real step releases (sum + N(0, (noise_multiplier * S)^2 I)) / B once,
    where the sum has L2 sensitivity S, recorded when it was clipped, and B is public.

    Args:
        optimizer: the inner optimizer. keeper: book-keeper of the private model.
        noise_multiplier: sigma. expected_batch_size: B. loss_reduction: "mean" divides by B.
        generator: source of the noise (torch's global one if None). secure_mode: as in Opacus.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, keeper: BookKeeper, noise_multiplier: float,
        expected_batch_size: float | None, loss_reduction: str = "mean",
        generator: torch.Generator | None = None, secure_mode: bool = False,
    ) -> None:  # fmt: skip
        self.keeper = keeper
        super().__init__(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=None,  # type: ignore[arg-type]
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction,  # type: ignore[arg-type]
            generator=generator, secure_mode=secure_mode,
        )  # fmt: skip

    @property
    def max_grad_norm(self) -> float:
        """C of the next logical batch; for per-layer clipping the norm of the thresholds.

        Setting it takes effect at the next logical batch: the noise of this one uses the
        sensitivity at which it was clipped. A per-layer strategy takes a list, or a number to which
        all thresholds are rescaled together.
        """
        return float(self.keeper.clipping.threshold.bound(self.keeper.next_thresholds))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float] | None) -> None:
        if value is None:  # the base class's constructor: the book-keeper has it already
            return
        keeper = self.keeper
        if keeper.clipping.threshold.per_layer and not isinstance(value, Sequence):
            thresholds = keeper.next_thresholds
            value = (thresholds * (float(value) / torch.linalg.vector_norm(thresholds))).tolist()
        keeper.next_thresholds = keeper.clipping.threshold.initial(value, len(keeper.names))

    @property
    def max_grad_norms(self) -> list[float]:
        """The thresholds of a per-layer strategy, in the order of the parameters."""
        return self.keeper.next_thresholds.reshape(-1).tolist()

    @property
    def threshold(self) -> Tensor:
        """C at which the current (or last) logical batch is clipped: a scalar, or one a group."""
        return self.keeper.thresholds

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity S of the sum at which its noise is scaled."""
        return self.keeper.sensitivity()

    @property
    def per_sample_norms(self) -> Tensor | None:
        """Raw norms [physical batch] of the last backward. For debugging; NOT private."""
        return self.keeper.per_sample_norms

    @property
    def noisy_counts(self) -> Tensor | None:
        """Noisy counts of the last step; None for strategies that count nothing."""
        return None

    @property
    def grad_samples(self) -> list[Tensor]:
        """Never materialised here: see `p.summed_grad` and `per_sample_norms`."""
        raise AttributeError(
            "the fast mode keeps no per-sample gradients; use p.summed_grad and "
            "optimizer.per_sample_norms, or grad_sample_mode='hooks'"
        )

    @property
    def accumulated_iterations(self) -> int:
        """Backward passes that the current (or last) step consumes: scales the sampling rate."""
        return self.keeper.batch.pending or self.keeper.batch.accumulated

    def clip_and_accumulate(self) -> None:
        """Nothing to do: the backward pass has clipped and summed."""

    def add_noise(self) -> None:
        """Replace `p.grad` by the noisy sum over the public denominator, exactly once a step."""
        parameters = self.params
        std = self.noise_multiplier * self.sensitivity
        if not std >= 0:
            raise ArgumentError(
                f"noise_multiplier expects a number >= 0, got {self.noise_multiplier}"
            )
        gradients = ops.noise_finalize(
            [p.summed_grad for p in parameters], parameters, std, self._divisor(), self.generator,
            secure=self.secure_mode,
        )  # fmt: skip
        self._drop_gradients()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _drop_gradients(self) -> None:
        """Whatever is not private must not reach the inner step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def scale_grad(self) -> None:
        """Nothing to do: `add_noise` divides, in the same pass over the gradients."""

    def _divisor(self) -> float:
        if self.loss_reduction == "sum":
            return 1.0
        return float(self.expected_batch_size) * self.accumulated_iterations  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and the sums; the sums of a split batch stay until its real step.

        Raises:
            StepError: between backward() and step() of a split batch.
        """
        self.keeper.zero_grad()
        self.original_optimizer.zero_grad(set_to_none)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the inner step; False if this step only accumulates."""
        if not self.params:
            self._drop_gradients()
            return True
        unknown = sum(p not in self.keeper.names for p in self.params)
        if unknown:
            raise StepError(
                f"{unknown} of the optimizer's trainable parameters were not in it when make_private "
                "was called, so their gradients are not clipped; call make_private again"
            )
        skip = self._check_skip_next_step()
        self.keeper.batch.step(skip=skip)
        self._is_last_step_skipped = skip
        if skip:
            return False
        self.add_noise()
        if self.step_hook:
            self.step_hook(self)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One private step, or only an accumulation where the batch memory manager says so."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self.original_optimizer.step() if self.pre_step() else None

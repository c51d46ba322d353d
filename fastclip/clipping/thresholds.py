"""Threshold policies for the whole data set: constant, per layer, staged, and a moving quantile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastclip.clipping.policy import ThresholdPolicy, Thresholds, clamp, threshold
from fastclip.clipping.schedules import Stages
from fastclip.core.checks import between, keep, positive, whole
from fastclip.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Constant(ThresholdPolicy):
    """One threshold that does not move by itself (Abadi et al. 2016)."""


def listed(value: Any) -> Any:
    """Return thresholds in an array or a tensor as a list of numbers, and other values unchanged."""
    return value.tolist() if getattr(value, "ndim", 0) == 1 else value


@dataclass(frozen=True)
class PerLayer(ThresholdPolicy):
    """One threshold per parameter tensor, S = sqrt(sum C_l^2), Opacus' "per_layer"."""

    per_layer = True

    def initial(self, value: float | Sequence[float], parameters: int) -> Thresholds:
        value = listed(value)
        if not isinstance(value, Sequence):
            raise ArgumentTypeError(
                f"clipping='per_layer' expects max_grad_norm as a list of {parameters} numbers, "
                f"one per trainable parameter tensor of the optimizer, got {value!r}."
            )
        if len(value) != parameters:
            raise ArgumentError(
                f"clipping='per_layer' expects {parameters} thresholds in max_grad_norm, one per "
                f"trainable parameter tensor of the optimizer, got {len(value)}."
            )
        numbers = [threshold(one) for one in value]
        thresholds = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return Thresholds(thresholds, thresholds)

    def rescaled(self, state: Thresholds, value: float | Sequence[float]) -> Thresholds:
        value = listed(value)
        if not isinstance(value, Sequence):
            factor = threshold(value) / self.reading(state)
            value = (state.threshold * factor).tolist()
        return super().rescaled(state, value)

    def reading(self, state: Thresholds) -> Tensor:
        return torch.linalg.vector_norm(state.threshold)


@dataclass(frozen=True)
class StagedThreshold(ThresholdPolicy):
    """C_j = C_1 * decay^(j-1) in stage j (SAD-DPSGD). It is public, a function of the step's number.

    Args:
        total_steps: planned real steps.
        stages: number n of stages.
        decay: beta_C in (0, 1].
        length_decay: T_{j+1} = T_j / length_decay.
    """

    total_steps: int
    stages: int = 3
    decay: float = 0.8
    length_decay: float = 0.9
    moves = True

    def __post_init__(self) -> None:
        keep(self, decay=between("threshold_decay", self.decay, 0, 1, closed=True))
        _ = self.plan  # raises an error for empty stages

    @cached_property
    def plan(self) -> Stages:
        return Stages(self.total_steps, self.stages, self.length_decay)

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        passed = self.plan.at(step + 1) - self.plan.at(step)
        if not passed:
            return state
        return replace(state, threshold=clamp(state.threshold * self.decay**passed))


@dataclass(frozen=True)
class Quantile(ThresholdPolicy):
    """C follows a quantile of the norms by a geometric update from noisy counts.

    "below" counts sum 1{n <= C} and updates C <- C * exp(-lr * (f - target)) (Andrew et al. 2021).
    "above" counts sum 1{n > tau * C} and updates C <- C * exp(+lr * (f - target)) (Esipova et al. 2023).
    With `lower` this is bounded adaptive clipping (Zhao et al. 2025, Algorithm 2). f = noisy count / B
    with the public B. For the global functions Z moves instead of C.

    Formal guarantee: the counts have L2 sensitivity `count_sensitivity`. The threshold is
    post-processing of noisy counts.

    Args:
        count_as: "below" or "above".
        target: the fraction to leave at or below C ("below"), or beyond tau * C ("above").
        learning_rate: eta of the update.
        tau: multiple of C beyond which a norm counts ("above").
        lower: lower bound of C. None for the limit of float32 only.
        upper: upper bound of C. None for the limit of float32 only.
        count_noise_ratio: r = sigma_count / sigma_grad.
        centred: counts each sample as +1/2 or -1/2, with half the sensitivity and half the noise
            (Andrew et al.).
        num_groups: K. Each group follows its own quantile. One sample adds 1 to one of the 2 K counts,
            and f_k divides by the group's noisy size. S is the largest C_k.
    """

    count_as: str = "below"
    target: float = 0.5
    learning_rate: float = 0.2
    tau: float = 1.0
    lower: float | None = None
    upper: float | None = None
    count_noise_ratio: float = 10.0
    centred: bool = False
    num_groups: int | None = None
    moves = True

    def __post_init__(self) -> None:
        if self.count_as not in ("below", "above"):
            raise ArgumentError(f"count_as expects 'below' or 'above', got {self.count_as!r}.")
        keep(self, target=between("target_quantile", self.target, 0, 1))
        keep(self, learning_rate=positive("threshold_lr", self.learning_rate))
        keep(self, tau=positive("tau", self.tau))
        keep(self, count_noise_ratio=positive("count_noise_ratio", self.count_noise_ratio))
        if self.tau != 1 and self.count_as == "below":
            raise ArgumentError(
                f"tau={self.tau} expects count_as='above', got 'below', which counts norms up to C."
            )
        for name, value in (("lower", self.lower), ("upper", self.upper)):
            if value is not None:
                threshold(value, name)
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ArgumentError(f"lower={self.lower} expects at most upper={self.upper}.")
        if self.num_groups is not None:
            keep(self, num_groups=whole("num_groups", self.num_groups, 1))
            if self.centred:
                raise ArgumentError(
                    "centred=True expects a single count, but counts per group are one-hot (a sample "
                    "changes one of them by 1). Omit centred or num_groups.",
                    doc="unsupported-options",
                )

    @property
    def count_sensitivity(self) -> float:  # type: ignore[override]
        return 0.5 if self.centred else 1.0

    @property
    def count_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return () if self.num_groups is None else (2, self.num_groups)

    def _spread(self, origin: Tensor) -> Tensor:
        return origin if self.num_groups is None else origin.repeat(self.num_groups)

    def rescaled(self, state: Thresholds, value: float | Sequence[float]) -> Thresholds:
        new = super().rescaled(state, value)
        if self.num_groups is None:
            return new
        return replace(new, threshold=clamp(state.threshold / state.origin * new.origin))

    def reading(self, state: Thresholds) -> Tensor:
        return state.threshold if self.num_groups is None else state.origin

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        limits = (state.threshold * self.tau).to(norms.dtype)
        if groups is not None:
            limits = limits[groups.clamp(min=0)]
        # A norm that is NaN is beyond every threshold, so it counts as clipped, like inf.
        counted = norms <= limits if self.count_as == "below" else ~(norms <= limits)
        if groups is not None:
            assert self.num_groups is not None
            return two_way_counts(counted, groups, self.num_groups)
        ones = counted.to(torch.float64)
        return (ones - 0.5).sum() if self.centred else ones.sum()

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        assert noisy_counts is not None
        if self.num_groups is None:
            fraction = noisy_counts / batch_size + (0.5 if self.centred else 0.0)
        else:
            counts = noisy_counts.clamp(min=0)
            fraction = counts[0] / counts.sum(0).clamp(min=1)
        sign = -1.0 if self.count_as == "below" else 1.0
        factor = torch.exp(sign * self.learning_rate * (fraction - self.target))
        return replace(state, threshold=clamp(state.threshold * factor, self.lower, self.upper))


def two_way_counts(first: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Count i in k with first_i and without, float64 [2, k]. Group -1 counts nowhere."""
    member = groups >= 0
    ways = torch.stack([first & member, ~first & member]).to(torch.float64)  # [2, b]
    counts = ways.new_zeros(2, num_groups)
    return counts.index_add_(1, groups.clamp(min=0), ways)  # whole numbers are exact in any order

"""Threshold policies for groups: DPSGD-F and naive reweighting (Xu, Du and Wu 2020).

Noise can make counts negative and ratios huge, which the paper does not treat. Here counts are clamped
at 0, sizes of groups at 1 and ratios at a public maximum. The denominator is the public B, never the
realized batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastclip.clipping.policy import ThresholdPolicy, Thresholds, clamp
from fastclip.clipping.thresholds import two_way_counts
from fastclip.core.checks import keep, positive, whole
from fastclip.errors import ArgumentError

STEPS = ("same_step", "previous_step")


@dataclass(frozen=True)
class _Groups(ThresholdPolicy):
    num_groups: int
    count_noise_ratio: float = 10.0
    thresholds: str = "same_step"
    moves = True

    def __post_init__(self) -> None:
        keep(self, num_groups=whole("num_groups", self.num_groups, 1))
        keep(self, count_noise_ratio=positive("count_noise_ratio", self.count_noise_ratio))
        if self.thresholds not in STEPS:
            raise ArgumentError(f"thresholds expects one of {STEPS}, got {self.thresholds!r}.")

    @property
    def same_step(self) -> bool:  # type: ignore[override]
        return self.thresholds == "same_step"

    def reading(self, state: Thresholds) -> Tensor:
        return state.origin


@dataclass(frozen=True)
class Group(_Groups):
    """C_k = C_0 * (1 + (m_k / b_k) / (m / B)), DPSGD-F, Algorithm 2.

    m_k counts the norms of group k above C_0, and o_k the others. b_k = m_k + o_k and m = sum m_k. All
    of them are noisy. S is the largest C_k. Equal groups get C_k = 2 C_0.

    Formal guarantee: one sample adds 1 to one of the 2 K counts, so their L2 sensitivity is 1. The
    thresholds are post-processing of noisy counts.

    Args:
        num_groups: K.
        count_noise_ratio: r = sigma_count / sigma_grad.
        thresholds: "same_step" clips a batch at thresholds from its own counts, as in the paper. The
            logical batch must then be one physical batch. "previous_step" uses the counts of the step
            before, and ratio 1 in the first step.
        max_ratio: the largest (m_k / b_k) / (m / B).
    """

    max_ratio: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        keep(self, max_ratio=positive("max_ratio", self.max_ratio))

    @property
    def count_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (2, self.num_groups)

    def _spread(self, origin: Tensor) -> Tensor:
        return (2 * origin).repeat(self.num_groups)

    def rescaled(self, state: Thresholds, value: float | Sequence[float]) -> Thresholds:
        new = super().rescaled(state, value)
        return replace(new, threshold=clamp(state.threshold / state.origin * new.origin))

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        assert groups is not None
        return two_way_counts(~(norms <= state.origin.to(norms.dtype)), groups, self.num_groups)

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        assert noisy_counts is not None
        counts = noisy_counts.clamp(min=0)  # [2, k]: m_k, o_k
        share = (counts[0].sum() / batch_size).clamp(min=1 / batch_size)  # m / B
        ratio = (counts[0] / counts.sum(0).clamp(min=1) / share).clamp(max=self.max_ratio)
        return replace(state, threshold=clamp(state.origin * (1 + ratio)))


@dataclass(frozen=True)
class Reweighted(_Groups):
    """s_i = theta_k * s(n_i; C_0) with theta_k = (B / K) / b_k, naive reweighting, Algorithm 3.

    b_k is the noisy size of group k. S = C_0 * max theta_k.

    Formal guarantee: one sample adds 1 to one of the K counts, so their L2 sensitivity is 1. The
    weights are post-processing of noisy counts.

    Args:
        num_groups: K.
        count_noise_ratio: r = sigma_count / sigma_grad.
        thresholds: as for `Group`. In the first step of "previous_step" all weights are 1.
        max_weight: the largest theta_k.
    """

    max_weight: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        keep(self, max_weight=positive("max_weight", self.max_weight))

    @property
    def count_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.num_groups,)

    def initial(self, value: float | Sequence[float], parameters: int) -> Thresholds:
        weights = torch.ones(self.num_groups, dtype=torch.float64, device="cpu")
        return replace(super().initial(value, parameters), weights=weights)

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        assert groups is not None
        everyone = torch.ones_like(groups, dtype=torch.bool)
        return two_way_counts(everyone, groups, self.num_groups)[0]

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        assert noisy_counts is not None
        sizes = noisy_counts.clamp(min=1)
        weights = (batch_size / self.num_groups / sizes).clamp(max=self.max_weight)
        return replace(state, weights=weights)

"""Strategies as their papers write them, step after step, without noise: scales and thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip import clipping
from fastclip.clipping import Clipping

C, Z, B, K = 2.5, 2.5, 4, 3
"""First threshold, cutoff of the global function, public batch size, groups."""

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a batch's norms and groups the scales and the thresholds they are compared with, [b] each."""


def hard(n: Tensor, c: Tensor | float) -> Tensor:
    return (c / n).clamp(max=1.0)


def constant(scale: Callable[[Tensor], Tensor]) -> Callable[[], Step]:
    return lambda: lambda n, _: (scale(n), torch.full_like(n, C))


def soft_ada_clip() -> Step:
    """C falls where more than half are within it (target 0.5, rate 0.2)."""
    c = C

    def step(n: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal c
        scales, thresholds = torch.tanh(c / (n + 1e-6)), torch.full_like(n, c)
        c *= math.exp(-0.2 * (float((n <= c).sum()) / B - 0.5))
        return scales, thresholds

    return step


def global_adapt() -> Step:
    """C / Z within Z, C / n beyond; Z grows where more than half are beyond it (rate 1)."""
    z = Z

    def step(n: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal z
        scales, thresholds = C / n.clamp(min=z), torch.full_like(n, z)
        z *= math.exp(float((n > z).sum()) / B - 0.5)
        return scales, thresholds

    return step


def sizes(groups: Tensor, of: Tensor | None = None) -> Tensor:
    chosen = groups if of is None else groups[of]
    return chosen.bincount(minlength=K).double()


def dpsgd_f(previous: bool) -> Callable[[], Step]:
    """C_k = C (1 + (m_k / b_k) / (m / B)), of this batch or of the one before."""

    def start() -> Step:
        held = torch.full((K,), 2 * C, dtype=torch.float64)

        def step(n: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal held
            beyond = sizes(groups, n > C)
            share = max(float(beyond.sum()), 1.0) / B
            ratio = (beyond / sizes(groups).clamp(min=1) / share).clamp(max=10.0)
            now, held = (held if previous else C * (1 + ratio)), C * (1 + ratio)
            return hard(n, now[groups]), now[groups]

        return step

    return start


def reweighted(previous: bool) -> Callable[[], Step]:
    """theta_k = (B / K) / b_k times hard clipping at C."""

    def start() -> Step:
        held = torch.ones(K, dtype=torch.float64)

        def step(n: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal held
            weights = (B / K / sizes(groups).clamp(min=1)).clamp(max=10.0)
            now, held = (held if previous else weights), weights
            return now[groups] * hard(n, C), torch.full_like(n, C)

        return step

    return start


def sad_dpsgd() -> Step:
    """Three stages of two steps; C falls to 0.8 of it in each."""
    stages: Iterator[float] = iter([C * 0.8**stage for stage in (0, 0, 1, 1, 2, 2)])

    def step(n: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        c = next(stages)
        return hard(n, c), torch.full_like(n, c)

    return step


@dataclass(frozen=True)
class Case:
    strategy: Clipping
    start: Callable[[], Step]


CASES = {
    "dp_sgd": Case(clipping.dp_sgd(), constant(lambda n: hard(n, C))),
    "normalized_dp_sgd": Case(clipping.normalized_dp_sgd(), constant(lambda n: hard(n, C) / C)),
    "fixed_soft": Case(clipping.fixed_soft(), constant(lambda n: torch.tanh(C / (n + 1e-6)))),
    "automatic": Case(clipping.automatic(), constant(lambda n: C / (n + 0.01))),
    "automatic_v": Case(clipping.automatic(0.0), constant(lambda n: C / n)),
    "soft_ada_clip": Case(clipping.soft_ada_clip(), soft_ada_clip),
    "global_adapt": Case(clipping.global_adapt(Z), global_adapt),
    "dpsgd_f": Case(clipping.dpsgd_f(K), dpsgd_f(False)),
    "dpsgd_f_previous": Case(
        clipping.dpsgd_f(K, thresholds="previous_step"), dpsgd_f(True)
    ),
    "naive_reweighting": Case(clipping.naive_reweighting(K), reweighted(False)),
    "naive_previous": Case(
        clipping.naive_reweighting(K, thresholds="previous_step"), reweighted(True)
    ),
    "sad_dpsgd": Case(clipping.sad_dpsgd(6, length_decay=1.0), sad_dpsgd),
}  # fmt: skip

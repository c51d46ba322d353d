"""Differences between groups, and tests whether differences between runs exceed those of seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from fastclip.errors import ArgumentError

ALTERNATIVES = ("two-sided", "less", "greater")


@dataclass(frozen=True)
class Paired:
    """Result of a paired test.

    Attributes:
        p: p-value of no difference, 1 if no pair differs, NaN without pairs.
        pairs: number of pairs that differ. Equal pairs carry no information.
        least_p: the smallest p-value for this number of pairs, 0.0625 for five.
    """

    p: float
    pairs: int
    least_p: float


def paired_wilcoxon(
    a: Sequence[float], b: Sequence[float], alternative: str = "two-sided"
) -> Paired:
    """Compute Wilcoxon's signed-rank test of a - b, exact up to 50 pairs without ties.

    Args:
        a: values of one method, one per seed.
        b: values of the other method, in the same order of seeds.
        alternative: "two-sided", "less" (a is smaller) or "greater".

    Raises:
        ArgumentError: for different numbers of values, or another alternative.
    """
    if alternative not in ALTERNATIVES:
        raise ArgumentError(f"alternative expects one of {ALTERNATIVES}, got {alternative!r}.")
    if len(a) != len(b):
        raise ArgumentError(f"paired_wilcoxon expects pairs, got {len(a)} and {len(b)} values.")
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    known = difference[np.isfinite(difference)]
    difference = known[known != 0]
    n = len(difference)
    least = min(1.0, (2.0 if alternative == "two-sided" else 1.0) / 2.0**n)
    if not n:
        return Paired(1.0 if len(known) else math.nan, 0, 1.0)
    found = stats.wilcoxon(difference, alternative=alternative)
    return Paired(float(found.pvalue), n, least)


def bonferroni(p_values: Sequence[float]) -> list[float]:
    """Return p-values times their number, at most 1. NaN values count as no test and stay NaN."""
    known = sum(not math.isnan(p) for p in p_values)
    return [p if math.isnan(p) else min(1.0, p * known) for p in p_values]


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 9999, seed: int = 0
) -> tuple[float, float]:
    """Return the bias-corrected and accelerated bootstrap interval of the mean (Efron 1987).

    Returns:
        (low, high). (NaN, NaN) for fewer than two values, or for non-finite ones. The smallest and the
        largest value if they differ only by rounding.
    """
    known = np.asarray(values, np.float64)
    if len(known) < 2 or not np.isfinite(known).all():
        return math.nan, math.nan
    if np.ptp(known) <= 1e-12 * np.abs(known).max():
        return float(known.min()), float(known.max())
    generator = np.random.Generator(np.random.PCG64(seed))
    found = stats.bootstrap(
        (known,), np.mean, confidence_level=level, n_resamples=resamples, method="BCa",
        rng=generator,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


# -------------------------------------------------------------------------------------------------
# Differences between groups, as the papers define them.


def gap(values: Sequence[float]) -> float:
    """Return the largest difference between groups (SoftAdaClip, section 5).

    Groups without samples (NaN) do not count. The result is NaN if fewer than two are left.
    """
    known = [value for value in values if not math.isnan(value)]
    return max(known) - min(known) if len(known) > 1 else math.nan


def disparity_reduction(baseline: float, ours: float) -> float:
    """Return by how many percent our gap is below the baseline's (SoftAdaClip, appendix B.1)."""
    if not baseline > 0:
        raise ArgumentError(f"disparity_reduction expects a baseline above 0, got {baseline}.")
    return (baseline - ours) / baseline * 100


class PrivacyImpact(NamedTuple):
    """Delta_k by group, and the largest |Delta_i - Delta_j|."""

    by_group: dict[str, float]
    inequality: float


def privacy_impact(private: Mapping[str, float], plain: Mapping[str, float]) -> PrivacyImpact:
    """Return the cost of privacy by group: accuracy with privacy minus accuracy without.

    Equality of privacy impact (Xu et al. 2020, Definition 6) is an inequality of 0.

    Args:
        private: accuracy by group with privacy.
        plain: accuracy without privacy, of the same groups.

    Raises:
        ArgumentError: for different groups.
    """
    if set(private) != set(plain):
        raise ArgumentError(
            f"privacy_impact expects the same groups twice, got {sorted(private)} and {sorted(plain)}."
        )
    found = {group: private[group] - plain[group] for group in private}
    return PrivacyImpact(found, gap(list(found.values())))

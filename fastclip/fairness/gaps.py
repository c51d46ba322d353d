"""Differences between groups, as the papers define them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastclip.errors import ArgumentError


def gap(values: Sequence[float]) -> float:
    """Largest difference between groups: of two, the absolute one (SoftAdaClip, section 5).

    Groups without rows (NaN) do not count; NaN where fewer than two are left.
    """
    known = [value for value in values if not math.isnan(value)]
    return max(known) - min(known) if len(known) > 1 else math.nan


def disparity_reduction(baseline: float, ours: float) -> float:
    """By how many percent our gap is smaller than the baseline's (SoftAdaClip, appendix B.1)."""
    if not baseline > 0:
        raise ArgumentError(f"disparity_reduction expects a baseline above 0, got {baseline}")
    return (baseline - ours) / baseline * 100


class PrivacyImpact(NamedTuple):
    """Delta_k by group, and the largest |Delta_i - Delta_j|."""

    by_group: dict[str, float]
    inequality: float


def privacy_impact(private: Mapping[str, float], plain: Mapping[str, float]) -> PrivacyImpact:
    """What privacy costs each group: accuracy with it minus accuracy without.

    Equality of privacy impact (Xu et al. 2020, Definition 6) is an inequality of 0.

    Args:
        private: accuracy by group, of the same groups.
        plain: accuracy by group, of the same groups.
    """
    if set(private) != set(plain):
        raise ArgumentError(
            f"privacy_impact expects the same groups twice, got {sorted(private)} and {sorted(plain)}"
        )
    found = {group: private[group] - plain[group] for group in private}
    return PrivacyImpact(found, gap(list(found.values())))

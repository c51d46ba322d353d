"""What a count query answers: noisy counts, and rates of them with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from scipy.stats import norm
from torch import Tensor

from fastclip.checks import between
from fastclip.counts.query import CountQuery
from fastclip.errors import ArgumentError


class Rate(NamedTuple):
    """A share with its interval.

    Attributes:
        value: noisy numerator over noisy denominator, between 0 and 1; NaN where the denominator is not
            positive.
        low, high: of the interval, within [0, 1]; [0, 1] says that nothing is known.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class NoisyCounts:
    """An answer. All that is computed from it is as private as it is, and costs nothing more.

    Args:
        query: what was counted.
        counts: float64 [groups, measures]; they may be negative or no integers. Of public data, exact.
        std: standard deviation of each count's noise.
    """

    query: CountQuery
    counts: Tensor
    std: float

    def count(self, group: str, measure: str = "rows") -> float:
        """Of one group.

        Raises:
            ArgumentError: no such group or measure.
        """
        return float(self.counts[self._group(group), self._measure(measure)])

    def total(self, measure: str = "rows") -> tuple[float, float]:
        """(sum over all groups, standard deviation of its noise); for disjoint groups.

        Raises:
            ArgumentError: no such measure, or the groups overlap.
        """
        if not self.query.disjoint:
            raise ArgumentError(
                "the groups of this query overlap, so their sum counts samples more than once. Count a "
                "group of all samples, too"
            )
        column = self.counts[:, self._measure(measure)]
        return float(column.sum()), self.std * math.sqrt(len(column))

    def rates(
        self,
        of: str = "correct",
        among: str = "rows",
        *,
        level: float = 0.95,
        sampling: bool = True,
    ) -> dict[str, Rate]:
        """The share of `among` that is `of`, by group.

        Formal guarantee: post-processing. For a rate r of noisy counts X and N with noise of variance
        s^2 each, X - r N is normal with variance s^2 (1 + r^2), and with `sampling` that of
        N drawn samples of rate r, k N r (1 - r), is added (k = per_group: one unit's samples may agree).
        The interval is all r in [0, 1] for which X - r N is within the quantile of `level`: exact for
        the noise alone, Wilson's where there is no noise.

        Source: Fieller 1954; Wilson 1927.

        Args:
            of: measure of the numerator, samples of which are samples of `among`.
            among: measure of the denominator.
            level: of each interval alone, in (0, 1).
            sampling: the interval is for the rate of the people of whom these are a sample; else for
                that of this data set.

        Raises:
            ArgumentError: no such measure, or a level out of range.
        """
        level = between("level", level, 0, 1)
        x, n = self.counts[:, self._measure(of)], self.counts[:, self._measure(among)]
        z, k = float(norm.ppf((1 + level) / 2)), self.query.per_group if sampling else 0
        return {
            group: _rate(a, b, z * self.std, z**2 * k)
            for group, a, b in zip(self.query.groups, x.tolist(), n.tolist(), strict=True)
        }

    def rate(
        self,
        of: str = "correct",
        among: str = "rows",
        *,
        level: float = 0.95,
        sampling: bool = True,
    ) -> Rate:
        """The share over all groups, which must be disjoint; as `rates`."""
        level = between("level", level, 0, 1)
        (x, std), (n, _) = self.total(of), self.total(among)
        z, k = float(norm.ppf((1 + level) / 2)), self.query.per_group if sampling else 0
        return _rate(x, n, z * std, z**2 * k)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        query = self.query
        return {
            "data": query.data.name, "unit": query.unit, "noise_multiplier": query.noise_multiplier,
            "sensitivity": query.sensitivity, "std": self.std, "groups": list(query.groups),
            "measures": list(query.measures), "counts": self.counts.tolist(),
        }  # fmt: skip

    def __str__(self) -> str:
        kind = f"noise of {self.std:.4g}" if self.std else "no noise"
        lines = [f"counts of {self.query.data.name}, {kind} on each"]
        width = max(map(len, self.query.groups))
        for group, row in zip(self.query.groups, self.counts.tolist(), strict=True):
            told = ", ".join(f"{m} {c:.1f}" for m, c in zip(self.query.measures, row, strict=True))
            lines.append(f"  {group:<{width}}  {told}")
        return "\n".join(lines)

    def _group(self, name: str) -> int:
        return _index("group", name, self.query.groups)

    def _measure(self, name: str) -> int:
        return _index("measure", name, self.query.measures)


def _index(kind: str, name: str, names: Any) -> int:
    if name not in names:
        raise ArgumentError(f"this query has no {kind} {name!r}, but {list(names)}")
    return int(names.index(name))


def _rate(x: float, n: float, noise: float, drawn: float) -> Rate:
    """The hull of all r in [0, 1] with (x - r n)^2 <= noise^2 (1 + r^2) + drawn n r (1 - r)."""
    n_drawn = drawn * max(n, 0.0)
    a, b, c = n * n - noise**2 + n_drawn, -2 * x * n - n_drawn, x * x - noise**2
    inside = [r for r in (0.0, 1.0) if a * r * r + b * r + c <= 0]
    inside += [r for r in _roots(a, b, c) if 0 <= r <= 1]
    if n > 0:
        inside.append(value := min(max(x / n, 0.0), 1.0))
        return Rate(value, min(inside), max(inside))
    return Rate(math.nan, min(inside, default=0.0), max(inside, default=1.0))


def _roots(a: float, b: float, c: float) -> list[float]:
    """Of a quadratic, without cancellation."""
    square = b * b - 4 * a * c
    if square < 0 or (a == 0 and b == 0):
        return []
    half = -(b + math.copysign(math.sqrt(square), b)) / 2
    return ([half / a] if a else []) + ([c / half] if half else [0.0] if a else [])


def as_counts(steps: Tensor, grid: int) -> Tensor:
    """Grid steps as float64; exact up to 2^53 of them."""
    return steps.to(torch.float64) / grid

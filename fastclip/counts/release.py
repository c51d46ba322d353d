"""Answers of count queries, recorded before their noise is drawn, and rates with intervals."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from scipy.stats import norm
from torch import Tensor

from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Entry, new_name
from fastclip.core.checks import between, whole
from fastclip.core.system import this_process
from fastclip.counts.lines import line_for, line_name
from fastclip.counts.query import GRID, TRAINING, CountQuery, tally
from fastclip.distributed.ranks import Ranks, together
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise

# -------------------------------------------------------------------------------------------------
# Answers of a count query: noisy counts, and rates with intervals.


class Rate(NamedTuple):
    """A share with its interval.

    Attributes:
        value: noisy numerator over noisy denominator, between 0 and 1. NaN if the denominator is not
            positive.
        low: lower end of the interval, at least 0. The interval [0, 1] means that nothing is known.
        high: upper end of the interval, at most 1.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class NoisyCounts:
    """An answer. Anything computed from it is equally private and has no further privacy cost.

    Args:
        query: the query.
        counts: float64 [groups, measures], possibly negative or fractional. Exact for public data.
        std: standard deviation of each count's noise.
    """

    query: CountQuery
    counts: Tensor
    std: float

    def count(self, group: str, measure: str = "rows") -> float:
        """Return the noisy count of one group.

        Raises:
            ArgumentError: for an unknown group or measure.
        """
        return float(self.counts[self._group(group), self._measure(measure)])

    def total(self, measure: str = "rows") -> tuple[float, float]:
        """Return (sum over all groups, standard deviation of its noise), for disjoint groups.

        Raises:
            ArgumentError: for an unknown measure, or groups that overlap.
        """
        if not self.query.disjoint:
            raise ArgumentError(
                "The groups of this query overlap, so their sum counts samples more than once. Add a "
                "group of all samples to the query.",
                doc="noisy-counts",
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
        """Return the share of `among` that is `of`, by group.

        Formal guarantee: post-processing. For a rate r of noisy counts X and N with noise of variance
        s^2 each, X - r N is normal with variance s^2 (1 + r^2). `sampling` adds the variance of N random
        samples of rate r, k N r (1 - r), with k = per_group because one unit's samples may agree.
        The interval is all r in [0, 1] for which X - r N is within the quantile of `level`. It is exact
        for the noise alone, and Wilson's interval if there is no noise.

        Source: Fieller 1954; Wilson 1927.

        Args:
            of: measure of the numerator. Its samples are among those of `among`.
            among: measure of the denominator.
            level: level of each single interval, in (0, 1).
            sampling: if True, the interval covers the rate of the population that was sampled. If
                False, it covers the rate of this data set.

        Raises:
            ArgumentError: for an unknown measure, or a level out of range.
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
        """Return the share over all groups, which must be disjoint, as `rates`."""
        level = between("level", level, 0, 1)
        (x, std), (n, _) = self.total(of), self.total(among)
        z, k = float(norm.ppf((1 + level) / 2)), self.query.per_group if sampling else 0
        return _rate(x, n, z * std, z**2 * k)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
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
        for group, counts in zip(self.query.groups, self.counts.tolist(), strict=True):
            named = ", ".join(
                f"{m} {c:.1f}" for m, c in zip(self.query.measures, counts, strict=True)
            )
            lines.append(f"  {group:<{width}}  {named}")
        return "\n".join(lines)

    def _group(self, name: str) -> int:
        return _index("group", name, self.query.groups)

    def _measure(self, name: str) -> int:
        return _index("measure", name, self.query.measures)


def _index(kind: str, name: str, names: Any) -> int:
    if name not in names:
        raise ArgumentError(f"{kind} expects one of {list(names)}, got {name!r}.")
    return int(names.index(name))


def _rate(x: float, n: float, noise: float, sampled: float) -> Rate:
    """Return the hull of all r in [0, 1] with (x - r n)^2 <= noise^2 (1 + r^2) + sampled n r (1 - r)."""
    n_sampled = sampled * max(n, 0.0)
    a, b, c = n * n - noise**2 + n_sampled, -2 * x * n - n_sampled, x * x - noise**2
    inside = [r for r in (0.0, 1.0) if a * r * r + b * r + c <= 0]
    inside += [r for r in _roots(a, b, c) if 0 <= r <= 1]
    if n > 0:
        inside.append(value := min(max(x / n, 0.0), 1.0))
        return Rate(value, min(inside), max(inside))
    return Rate(math.nan, min(inside, default=0.0), max(inside, default=1.0))


def _roots(a: float, b: float, c: float) -> list[float]:
    """Return the real roots of a quadratic, without cancellation."""
    square = b * b - 4 * a * c
    if square < 0 or (a == 0 and b == 0):
        return []
    half = -(b + math.copysign(math.sqrt(square), b)) / 2
    return ([half / a] if a else []) + ([c / half] if half else [0.0] if a else [])


def as_counts(steps: Tensor, grid: int) -> Tensor:
    """Return grid steps as float64, exact up to 2^53 steps."""
    return steps.to(torch.float64) / grid


# -------------------------------------------------------------------------------------------------


def noise_of_counts(secure: bool) -> NoiseSource:
    """Return a separate noise source, which shares no random words with the gradients' noise."""
    return SecureNoise() if secure else SeededNoise(purpose="noise of counts")


class _Draws:
    """The account of a NoiseSource: the ledger and the number of draws of noise."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.steps = ledger, 0


def check_query(query: object) -> CountQuery:
    """Return `query`, or raise an ArgumentTypeError if it is not a CountQuery."""
    if not isinstance(query, CountQuery):
        raise ArgumentTypeError(f"query expects a CountQuery, got {type(query).__name__}.")
    return query


def reserved(reserve: Iterable[tuple[CountQuery, int]], ledger: Ledger) -> tuple[Entry, ...]:
    """Return the steps (sigma, q, steps) of planned counts of the training set.

    Args:
        reserve: (query, number of answers) each.
        ledger: ledger of the engine.

    Raises:
        ArgumentError: a data set shares nobody with the training set.
    """
    found: list[Entry] = []
    for query, times in reserve:
        if not check_query(query).data.private:
            continue
        if line_name(query, ledger) != TRAINING:
            raise ArgumentError(
                f"reserve expects counts of the training set, got one of {query.data.name!r}, which "
                "costs the training set nothing. Leave it out."
            )
        found.append((query.noise_multiplier, 1.0, whole("times", times, 1)))
    return tuple(found)


def pay(
    query: CountQuery, times: int, ledger: Ledger, trained: frozenset[str], ranks: Ranks | None
) -> None:
    """Record answers before their noise is drawn, also in the ledger's file if it has one.

    Args:
        query: the query.
        times: number of answers.
        ledger: ledger of the engine.
        trained: units of its models.
        ranks: the ranks that record together, or None.

    Raises:
        ArgumentError: as `line_for`.
        StepError: the answers cannot be recorded, and nothing may be released.
    """
    if not query.data.private:
        return
    line, whom = line_for(query, ledger, trained)
    if ranks is not None and line is not ledger and not line.history:
        line.share_names(ranks.first(new_name()))
    line.protected = line.protected.beside(whom)
    line.taken_by(ranks=ranks is not None)
    for _ in range(times):
        with line.on_all_ranks():
            line.step(noise_multiplier=query.noise_multiplier, sample_rate=1.0)


def exact_counts(
    query: CountQuery, groups: Any, measures: Mapping[str, Any] | None, unit_ids: Any,
    ranks: Ranks | None,
) -> Tensor:  # fmt: skip
    """Return the exact counts of `tally`, the same on all ranks. They are NOT private.

    Raises:
        RanksDiffer: a rank has other data, or an error with its own data.
    """
    salt = b"" if ranks is None else ranks.first(os.urandom(16))
    with together(ranks) as compared:
        found = tally(query, groups, measures or {}, unit_ids)
        if ranks is not None:
            compared["count query"] = repr(query)
            words = found.numpy().tobytes()
            compared["samples of a count query (all of the data set, on every rank)"] = (
                hashlib.blake2b(words, key=salt, digest_size=16).hexdigest()
            )
    return found


def draw(
    query: CountQuery, exact: Tensor, noise: NoiseSource, ledger: Ledger, ranks: Ranks | None
) -> NoisyCounts:
    """Return the noisy answer, which must already be recorded. Ranks share the first one's answer.

    Args:
        query: the query.
        exact: the exact counts, from `exact_counts`.
        noise: noise source of the engine's counts.
        ledger: ledger of the engine.
        ranks: the ranks that share the answer, or None.
    """
    found: list[list[int]] | None = None
    if not query.data.private:
        return NoisyCounts(query, as_counts(exact, GRID), 0.0)
    if ranks is None or ranks.number == 0:
        found = (exact + _rounded_noise(exact, query.std * GRID, noise, ledger)).tolist()
    if ranks is not None:
        found = ranks.first(found)
    steps = torch.tensor(found, dtype=torch.int64, device="cpu")
    return NoisyCounts(query, as_counts(steps, GRID), query.std)


def _rounded_noise(like: Tensor, std: float, noise: NoiseSource, ledger: Ledger) -> Tensor:
    """Return noise in whole steps of the grid, int64."""
    if noise.account is None or noise.account.ledger is not ledger:
        noise.account = _Draws(ledger)
    noise.account.steps += 1
    drawn = noise.draw(like.double(), std)
    assert drawn is not None
    return drawn.round_().to(torch.int64)


class PaidCounts:
    """Answers of one query that are already recorded in the ledger. `count` gives one at a time.

    Formal guarantee: the ledger holds all of them from the beginning, however many are used. Epsilon
    does not depend on when a loop stops. A copy or a fork has none left.

    Args:
        query: the query.
        times: number of recorded answers.
        noise: noise source of the engine's counts.
        ledger: ledger of the engine.
        ranks: the ranks that share the answers, or None.
    """

    def __init__(
        self, query: CountQuery, times: int, noise: NoiseSource, ledger: Ledger, ranks: Ranks | None
    ) -> None:
        self.query, self._left = query, whole("times", times, 0)
        self._noise, self._ledger, self._ranks = noise, ledger, ranks
        self._lock, self._process = threading.Lock(), this_process()

    @property
    def left(self) -> int:
        """Number of answers that are left."""
        return self._left if self._process == this_process() else 0

    def count(
        self, *, groups: Any, measures: Mapping[str, Any] | None = None, unit_ids: Any = None
    ) -> NoisyCounts:
        """Return the next answer. The arguments are those of `engine.count`.

        Raises:
            StepError: none is left.
            ArgumentError, ArgumentTypeError: as `engine.count`. No answer is used.
        """
        exact = exact_counts(self.query, groups, measures, unit_ids, self._ranks)
        with self._lock:
            if not self.left:
                raise StepError(
                    "All answers that were paid for have been given. Pay for more with engine.prepay, "
                    "or count once with engine.count.",
                    doc="noisy-counts",
                )
            self._left -= 1
        return draw(self.query, exact, self._noise, self._ledger, self._ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaidCounts:
        return PaidCounts(self.query, 0, self._noise, self._ledger, self._ranks)

    def __reduce__(self) -> Any:
        return PaidCounts, (self.query, 0, self._noise, self._ledger, None)

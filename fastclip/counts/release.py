"""Answers of count queries: paid for first, then drawn; rates of them with intervals."""

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
# What a count query answers: noisy counts, and rates of them with intervals.


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
        for group, sample in zip(self.query.groups, self.counts.tolist(), strict=True):
            told = ", ".join(
                f"{m} {c:.1f}" for m, c in zip(self.query.measures, sample, strict=True)
            )
            lines.append(f"  {group:<{width}}  {told}")
        return "\n".join(lines)

    def _group(self, name: str) -> int:
        return _index("group", name, self.query.groups)

    def _measure(self, name: str) -> int:
        return _index("measure", name, self.query.measures)


def _index(kind: str, name: str, names: Any) -> int:
    if name not in names:
        raise ArgumentError(f"{kind} expects one of {list(names)}, got {name!r}.")
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


# -------------------------------------------------------------------------------------------------


def noise_of_counts(secure: bool) -> NoiseSource:
    """A source of its own: no count's noise is made of random words of the gradients' noise."""
    return SecureNoise() if secure else SeededNoise(purpose="noise of counts")


class _Draws:
    """For whom noise is drawn, as a NoiseSource asks: the number of the draw, and the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.steps = ledger, 0


def check_query(query: object) -> CountQuery:
    """Raises: ArgumentTypeError: it is no CountQuery."""
    if not isinstance(query, CountQuery):
        raise ArgumentTypeError(f"query expects a CountQuery, got {type(query).__name__}.")
    return query


def reserved(reserve: Iterable[tuple[CountQuery, int]], ledger: Ledger) -> tuple[Entry, ...]:
    """What counts of the training set will cost, (query, times) each: (sigma, q, steps).

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
    """Record answers before they are drawn; on disk, too, where the ledger is kept in a file.

    Args:
        query: of the answers. times: how many.
        ledger: of the engine. trained: units of its models. ranks: who record together.

    Raises:
        ArgumentError: as `line_for`. StepError: it cannot be recorded; nothing may be released.
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
    """As `tally`, the same on all ranks. NOT private.

    Raises:
        RanksDiffer: a rank has other data, or refuses its own.
    """
    salt = b"" if ranks is None else ranks.first(os.urandom(16))
    with together(ranks) as told:
        found = tally(query, groups, measures or {}, unit_ids)
        if ranks is not None:
            told["count query"] = repr(query)
            words = found.numpy().tobytes()
            told["samples of a count query (all of the data set, on every rank)"] = hashlib.blake2b(
                words, key=salt, digest_size=16
            ).hexdigest()
    return found


def draw(
    query: CountQuery, exact: Tensor, noise: NoiseSource, ledger: Ledger, ranks: Ranks | None
) -> NoisyCounts:
    """The noisy answer, which must be paid for; on several ranks that of the first.

    Args:
        exact: as of `exact_counts`. noise: of the engine's counts.
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
    """Noise in whole steps of the grid, int64."""
    if noise.account is None or noise.account.ledger is not ledger:
        noise.account = _Draws(ledger)
    noise.account.steps += 1
    drawn = noise.draw(like.double(), std)
    assert drawn is not None
    return drawn.round_().to(torch.int64)


class PaidCounts:
    """Answers of one query that are paid for: `count` gives one at a time, as often as was paid.

    Formal guarantee: the ledger holds all of them from the beginning, however many are drawn. So epsilon
    does not depend on when a loop stops asking. A copy, and a fork, has none left.

    Args:
        query: of the answers. times: how many were paid.
        noise, ledger, ranks: of the engine.
    """

    def __init__(
        self, query: CountQuery, times: int, noise: NoiseSource, ledger: Ledger, ranks: Ranks | None
    ) -> None:
        self.query, self._left = query, whole("times", times, 0)
        self._noise, self._ledger, self._ranks = noise, ledger, ranks
        self._lock, self._process = threading.Lock(), this_process()

    @property
    def left(self) -> int:
        """Answers that may still be drawn."""
        return self._left if self._process == this_process() else 0

    def count(
        self, *, groups: Any, measures: Mapping[str, Any] | None = None, unit_ids: Any = None
    ) -> NoisyCounts:
        """The next answer; arguments as of `engine.count`.

        Raises:
            StepError: none is left. ArgumentError, ArgumentTypeError: as `engine.count`; none is used.
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

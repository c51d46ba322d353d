"""Answers of count queries: paid for first, on disk too, then drawn."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastclip.accounting.ledger import Ledger
from fastclip.accounting.segments import Entry, new_name
from fastclip.checks import whole
from fastclip.counts.answer import NoisyCounts, as_counts
from fastclip.counts.lines import line_for, line_name
from fastclip.counts.query import TRAINING, CountQuery
from fastclip.counts.tally import GRID, tally
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from fastclip.forks import this_process
from fastclip.noise import NoiseSource, SecureNoise, SeededNoise
from fastclip.parallel.ranks import Ranks, together


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
        raise ArgumentTypeError(f"query expects a CountQuery, got {type(query).__name__}")
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
                f"reserve got a count of {query.data.name!r}, which costs the training set nothing. "
                "Leave it out"
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
                    "all answers that were paid for have been given. Pay for more with engine.prepay, "
                    "or count once with engine.count"
                )
            self._left -= 1
        return draw(self.query, exact, self._noise, self._ledger, self._ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaidCounts:
        return PaidCounts(self.query, 0, self._noise, self._ledger, self._ranks)

    def __reduce__(self) -> Any:
        return PaidCounts, (self.query, 0, self._noise, self._ledger, None)

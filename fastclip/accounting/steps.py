"""The steps taken: histories under names, truncated rates, and whom they protect.

A history alone cannot tell the steps of one run from equal steps of another. A segment is what one
accountant recorded in one process, under a random name; it only grows. Two ledgers are joined by
name: of one segment the longer state is kept, different segments add up.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

from fastclip.core.checks import between, keep, whole
from fastclip.core.opacus_names import mechanism_of
from fastclip.core.system import this_process
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError

# -------------------------------------------------------------------------------------------------
# Whom the steps of one accountant protect: its one epsilon is of all of them.


PROTECTED_KEY = "fastclip_protected"
"""Of a saved state."""


@dataclass(frozen=True)
class Protected:
    """The privacy unit of recorded steps, and whether their price leaves the number of units secret.

    Args:
        units: "row" or "unit"; empty before the first step.
        size_is_secret: nothing depends on N.
        data: names of data sets other than the training set whose people are among them.
    """

    units: frozenset[str] = frozenset()
    size_is_secret: bool = True
    data: frozenset[str] = frozenset()

    def beside(self, other: Protected) -> Protected:
        """Of these steps and others.

        Raises:
            ArgumentError: one epsilon would be stated for rows and for units at once.
        """
        both = self.units | other.units
        if len(both) > 1:
            raise ArgumentError(
                "Steps that protect samples and steps that protect units (unit_ids) are in one "
                "accountant, so one epsilon would hold for neither. Use one FastPrivacyEngine() for "
                "each, and state both epsilons.",
                doc="privacy-budget",
            )
        secret = self.size_is_secret and other.size_is_secret
        return Protected(both, secret, self.data | other.data)

    def saved(self) -> dict[str, Any]:
        """As JSON and checkpoints hold it."""
        found = {"units": sorted(self.units), "size_is_secret": self.size_is_secret}
        return found | ({"data": sorted(self.data)} if self.data else {})


BY_OPACUS = Protected(frozenset({"row"}), False)
"""Steps of which nothing else is known: of rows, at a rate that follows from their number."""


def protected_by(state: Mapping[str, Any], history: Sequence[Any]) -> Protected:
    """Whom the steps of a saved accountant protect.

    Args:
        state: of the accountant.
        history: its entries, none if it has taken no step.

    Raises:
        ArgumentError: it is damaged.
    """
    saved = state.get(PROTECTED_KEY)
    if saved is None:
        return BY_OPACUS if history else Protected()
    try:
        data = frozenset(saved.get("data", ()))
        found = Protected(frozenset(saved["units"]), saved["size_is_secret"], data)
    except (AttributeError, KeyError, TypeError):
        found = None
    if (
        found is None or found.units - {"row", "unit"} or type(found.size_is_secret) is not bool
        or any(type(name) is not str for name in found.data)
    ):  # fmt: skip
        raise ArgumentError(
            f"{PROTECTED_KEY} of the saved accountant is damaged, got {saved!r}. Resume from another "
            "checkpoint.",
            doc="checkpoints",
        )
    return found


# -------------------------------------------------------------------------------------------------
# Poisson draws that are cut to a largest batch, as histories hold them in the place of a rate.


@dataclass(frozen=True)
class TruncatedPoisson:
    """Each row is drawn with probability `rate`; of more than `max_batch_size` that many are kept.

    Those that are kept are a uniformly random subset of the draw. It takes the place of a sample rate
    wherever fastclip.accounting expects one. It is no number on purpose: an accountant that does not
    know it fails, where a rate alone would be read as an uncut draw, which costs less.

    Args:
        rate: q in (0, 1].
        rows: N of the larger of two neighbors, public: the number of rows of the data set, where a
            neighbor lacks one of them.
        max_batch_size: the most rows of a logical batch, at least 1.
        at_most: `rows` is a public upper bound, and what is accounted holds for every data set of at
            most so many rows. It costs next to nothing while a cut is rare.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, or of another type.
    """

    rate: float
    rows: int
    max_batch_size: int
    at_most: bool = False

    def __post_init__(self) -> None:
        keep(self, rate=between("sample_rate", self.rate, 0, 1, closed=True))
        keep(self, rows=whole("rows", self.rows, 1))
        keep(self, max_batch_size=whole("max_batch_size", self.max_batch_size, 1))
        if not isinstance(self.at_most, bool):
            raise ArgumentTypeError(f"at_most expects True or False, got {self.at_most!r}.")

    def __mul__(self, joined: object) -> TruncatedPoisson:
        """Itself, for the one draw of a step; Opacus multiplies a rate by the batches that it joins.

        Raises:
            StepError: for several draws in one step, of which no accounting is known.
        """
        if type(joined) is not int:
            return NotImplemented
        if joined != 1:
            raise StepError(
                f"This step joins {joined} sampled batches truncated to max_batch_size="
                f"{self.max_batch_size}, and no accounting is known for that. Call optimizer.step() "
                "after every sampled batch.",
                doc="privacy-budget",
            )
        return self


Rate: TypeAlias = "float | TruncatedPoisson"
"""How the rows of a step were drawn: the rate of a Poisson draw, or a draw that is cut."""


def probability(rate: Rate) -> float:
    """q: with which a row is drawn."""
    return rate.rate if isinstance(rate, TruncatedPoisson) else rate


def checked_rate(rate: Any) -> Rate:
    """`rate` as a sample rate in (0, 1], or as the truncated draw that it is.

    Raises:
        ArgumentError, ArgumentTypeError: if it is neither.
    """
    if isinstance(rate, TruncatedPoisson):
        return rate
    return between("sample_rate", rate, 0, 1, closed=True)


def check_not_truncated(entries: Any, mechanism: str) -> None:
    """Only "pld" knows what a truncated draw costs.

    Args:
        entries: (noise multiplier, rate, steps).
        mechanism: of the accountant that would read them.

    Raises:
        ArgumentError: if there is one and the accountant is another.
    """
    if mechanism == "pld":
        return
    for _, rate, _ in entries:
        if isinstance(rate, TruncatedPoisson):
            raise ArgumentError(
                f"accountant={mechanism!r} cannot account for batches truncated to max_batch_size="
                f"{rate.max_batch_size}. Use accountant='pld', or sample without max_batch_size.",
                doc="privacy-budget",
            )


def encoded(rate: Rate) -> float | dict[str, Any]:
    """A rate as JSON and checkpoints hold it; an uncut one stays the number that Opacus reads."""
    return asdict(rate) if isinstance(rate, TruncatedPoisson) else rate


def decoded(saved: Any) -> Rate:
    """What `encoded` returned, perhaps by way of JSON.

    Raises:
        TypeError, ValueError: if it is neither.
    """
    if isinstance(saved, Mapping):
        return TruncatedPoisson(**saved)
    return saved if isinstance(saved, TruncatedPoisson) else float(saved)


# -------------------------------------------------------------------------------------------------


Entry = tuple[float, Rate, int]
"""(noise multiplier, sampling rate, steps), as Opacus' accountants keep it."""
History = Sequence[Entry]
"""What an accountant holds of a whole run."""
Segments = dict[str, list[Entry]]
"""Name -> what was recorded under it, in the order in which it was first seen."""


class Spent(NamedTuple):
    """Of a ledger as it stood: its steps, and whom they protect."""

    segments: Segments
    protected: Protected


SEGMENTS_KEY = "segments"
DIGEST = "fastclip_digest"
"""Of an accountant's state."""
LINES = "fastclip_lines"
"""Of an accountant's state: those of other data sets, by name."""


def new_name() -> str:
    """That nothing else bears; never of a generator that a script seeds."""
    return os.urandom(8).hex()


def runs(entries: Iterable[Entry]) -> list[Entry]:
    """Adjacent entries of equal noise and rate as one, as step() keeps them."""
    return [
        (sigma, rate, sum(steps for _, _, steps in same))
        for (sigma, rate), same in groupby(entries, key=lambda entry: entry[:2])
    ]


def joined(segments: Segments) -> list[Entry]:
    """All of them as one history."""
    return runs(chain.from_iterable(segments.values()))


def remainder(longer: list[Entry], shorter: list[Entry]) -> list[Entry] | None:
    """What `longer` has beyond `shorter`; None if it does not begin with it. Both are `runs`."""
    if not shorter:
        return longer
    last = len(shorter) - 1
    sigma, rate, steps = shorter[last]
    if longer[:last] != shorter[:last] or len(longer) <= last:
        return None
    if longer[last][:2] != (sigma, rate) or longer[last][2] < steps:
        return None
    more = longer[last][2] - steps
    return [(sigma, rate, more)] * bool(more) + longer[last + 1 :]


def union(own: Segments, others: Segments) -> Segments:
    """Every step of either. One name with two stories (tampered, or a copied memory) is two runs."""
    merged = dict(own)
    for name, entries in others.items():
        known = merged.get(name, [])
        if remainder(entries, known) is not None:
            merged[name] = entries
        elif remainder(known, entries) is None:
            merged[new_name()] = entries
    return merged


def saved_entries(entries: Iterable[Entry]) -> list[tuple[float, Any, int]]:
    """A history as plain values, for JSON and checkpoints."""
    return [(float(sigma), encoded(rate), int(steps)) for sigma, rate, steps in entries]


def digest(state: Mapping[str, Any]) -> str:
    """Of what a state says was spent: a flipped bit of a ledger is seen, wherever it was stored.

    Args:
        state: of an accountant, perhaps by way of JSON.
    """
    named = sorted(
        (name, saved_entries(_entries(part))) for name, part in state[SEGMENTS_KEY].items()
    )
    said = [
        mechanism_of(state),
        saved_entries(_entries(state["history"])),
        named,
        state[PROTECTED_KEY],
    ]
    if state.get(LINES):
        said.append(sorted((name, line[DIGEST]) for name, line in state[LINES].items()))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read_segments(saved: Any, mechanism: str, place: str) -> Segments:
    """The segments of an accountant's state.

    A history without names (of plain Opacus, or changed by hand) gets a new one: it is not known to
    be of any run, so it will be added. One that lacks steps that are named is counted beside them.

    Args:
        saved: what state_dict() returned, perhaps by way of JSON.
        mechanism: of the accountant that reads it.
        place: where it comes from, for messages.

    Raises:
        ArgumentError: if it is damaged, or of another accountant.
    """
    try:
        found, history = mechanism_of(saved), _entries(saved["history"])
        named = {
            str(name): _entries(part) for name, part in (saved.get(SEGMENTS_KEY) or {}).items()
        }
        for part in (history, *named.values()):
            check_entries(part)
        if DIGEST in saved and saved[DIGEST] != digest(saved):
            raise ValueError("its digest belongs to other steps")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{place} is damaged ({error!r}), so the privacy spent by its run is unknown. Resume from "
            "another checkpoint.",
            doc="checkpoints",
        ) from None
    if found != mechanism:
        raise ArgumentError(
            f"{place} was accounted by {found!r}, but this run uses {mechanism!r}. Resume with "
            f"accountant={found!r}.",
            doc="checkpoints",
        )
    by_name, whole = _totals(joined(named)), _totals(history)
    if by_name == whole:
        return named
    if by_name <= whole:
        return {new_name(): history}
    return {**named, new_name(): history}  # names of steps that the history has lost


def check_entries(history: Iterable[Entry]) -> None:
    """Refuse steps that no run has, and that would cost nothing, or less.

    Raises:
        ValueError: naming the entry.
    """
    for sigma, rate, steps in history:
        if not (0 <= sigma < math.inf and 0 < probability(rate) <= 1 and steps >= 0):
            raise ValueError(f"no run can have the steps {(sigma, rate, steps)}")


def _entries(history: Any) -> list[Entry]:
    entries = [(float(sigma), decoded(rate), _steps(steps)) for sigma, rate, steps in history]
    return runs(entry for entry in entries if entry[2])


def _steps(saved: Any) -> int:
    if isinstance(saved, bool) or int(saved) != saved or saved < 0:
        raise ValueError(f"{saved!r} is not a number of steps")
    return int(saved)


def _totals(history: Iterable[Entry]) -> Counter[tuple[float, Rate]]:
    totals: Counter[tuple[float, Rate]] = Counter()
    for sigma, rate, steps in history:
        totals[sigma, rate] += steps
    return totals


# -------------------------------------------------------------------------------------------------
# What the segments of a ledger are called (fastclip.accounting.steps).


class Names:
    """Those of one ledger, in one process.

    Ranks that take every step together record it under one name, so that it counts once: the first
    one's, and a number. Steps that one of them takes alone are under a name that nobody else gives, and
    add up. So are those of a fork.
    """

    def __init__(self) -> None:
        self._shared, self._given, self._alone = "", 0, False
        self.process = this_process()

    def share(self, name: str) -> None:
        """All ranks have been given this one, and nobody else."""
        self._shared, self._given, self._alone = name, 0, False
        self.process = this_process()

    def alone(self, alone: bool) -> bool:
        """Whether the next steps need another name: they are this process' own, or again all ranks'."""
        changed = bool(self._shared) and alone != self._alone
        self._alone = alone
        return changed

    def new(self) -> str:
        """That of the segment that begins."""
        process = this_process()
        if process != self.process:
            self._shared, self.process = "", process
        if not self._shared or self._alone:
            return new_name()
        self._given += 1
        return f"{self._shared}.{self._given}"

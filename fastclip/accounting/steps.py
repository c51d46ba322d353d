"""Recorded steps: histories under names, truncated rates, and the protected unit.

A history alone does not distinguish the steps of one run from equal steps of another. A segment holds
the steps that one accountant recorded in one process, under a random name, and only grows. Two ledgers
are joined by name. The longer state of one segment is kept, and different segments add up.
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

from fastclip.accounting.allocation import RandomAllocation, one_batch
from fastclip.core.checks import between, keep, whole
from fastclip.core.opacus_names import mechanism_of
from fastclip.core.system import this_process
from fastclip.errors import ArgumentError, ArgumentTypeError

# -------------------------------------------------------------------------------------------------
# The unit that the steps of one accountant protect. Its epsilon covers all of them.


PROTECTED_KEY = "fastclip_protected"
"""Key of a saved state."""


@dataclass(frozen=True)
class Protected:
    """The privacy unit of recorded steps, and whether their epsilon keeps the number of units secret.

    Args:
        units: "row" (one sample) or "unit". Empty before the first step.
        size_is_secret: whether nothing depends on N.
        data: names of other data sets with people in the training set.
    """

    units: frozenset[str] = frozenset()
    size_is_secret: bool = True
    data: frozenset[str] = frozenset()

    def beside(self, other: Protected) -> Protected:
        """Return the protected unit of these steps and others together.

        Raises:
            ArgumentError: one epsilon would be stated for samples and for units at once.
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
        """Return plain values for JSON and checkpoints."""
        found = {"units": sorted(self.units), "size_is_secret": self.size_is_secret}
        return found | ({"data": sorted(self.data)} if self.data else {})


BY_OPACUS = Protected(frozenset({"row"}), False)
"""Steps without further information. They protect samples, at a rate that follows from N."""


def protected_by(state: Mapping[str, Any], history: Sequence[Any]) -> Protected:
    """Return the unit that the steps of a saved accountant protect.

    Args:
        state: state of the accountant.
        history: its entries, empty before the first step.

    Raises:
        ArgumentError: the state is damaged.
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
# Sampled batches that are truncated to a largest size, which histories hold instead of a rate.


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson sampling at `rate`, truncated to a random subset of at most `max_batch_size` samples.

    The subset is uniformly random. Pass it instead of a sample rate anywhere in fastclip.accounting. It
    is deliberately not a number, so an accountant that does not support it fails. A rate alone would be
    read as an untruncated batch, which has a lower privacy cost.

    Args:
        rate: q in (0, 1].
        rows: the public number N of samples in the larger of two neighbors, which is the data set if
            a neighbor lacks one sample.
        max_batch_size: the most samples of a logical batch, at least 1.
        at_most: `rows` is a public upper bound, and the accounting holds for every data set of at most
            that size. The additional cost is close to zero if truncation is rare.

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
        """Return itself for one sampled batch. Opacus multiplies a rate by the batches of a step.

        Raises:
            StepError: for several sampled batches in one step, for which no accounting is known.
        """
        kind = f"sampled batches truncated to max_batch_size={self.max_batch_size}"
        return one_batch(self, joined, kind)


Rate: TypeAlias = "float | TruncatedPoisson | RandomAllocation"
"""Sampling of a step: the rate of Poisson sampling, or a truncated batch. Or that of a whole epoch."""


def probability(rate: Rate) -> float:
    """Return q, the probability with which a sample is drawn in a step."""
    if isinstance(rate, RandomAllocation):
        return rate.times / rate.steps
    return rate.rate if isinstance(rate, TruncatedPoisson) else rate


def checked_rate(rate: Any) -> Rate:
    """Return `rate` as a sample rate in (0, 1], or unchanged if it is another sampling.

    Raises:
        ArgumentError, ArgumentTypeError: if it is neither.
    """
    if isinstance(rate, (TruncatedPoisson, RandomAllocation)):
        return rate
    return between("sample_rate", rate, 0, 1, closed=True)


def check_not_truncated(entries: Any, mechanism: str) -> None:
    """Check that an accountant has an epsilon for the sampling of these steps.

    Only "pld" has one for truncated batches, and only "prv" and "pld" for a random allocation.

    Args:
        entries: (noise multiplier, rate, steps).
        mechanism: mechanism of the accountant that would read them.

    Raises:
        ArgumentError: for another accountant.
    """
    if mechanism == "pld":
        return
    for _, rate, _ in entries:
        if isinstance(rate, RandomAllocation) and mechanism != "prv":
            raise ArgumentError(
                f"accountant={mechanism!r} cannot account for {rate}. Use accountant='prv' or 'pld', or "
                "Poisson sampling.",
                doc="privacy-budget",
            )
        if isinstance(rate, TruncatedPoisson):
            raise ArgumentError(
                f"accountant={mechanism!r} cannot account for batches truncated to max_batch_size="
                f"{rate.max_batch_size}. Use accountant='pld', or sample without max_batch_size.",
                doc="privacy-budget",
            )


def encoded(rate: Rate) -> float | dict[str, Any]:
    """Return a rate for JSON and checkpoints. A plain rate is unchanged, for Opacus."""
    return rate if isinstance(rate, (int, float)) else asdict(rate)


def decoded(saved: Any) -> Rate:
    """Return the rate of an `encoded` value, also after JSON.

    Raises:
        TypeError, ValueError: for any other value.
    """
    if isinstance(saved, Mapping):
        return RandomAllocation(**saved) if "steps" in saved else TruncatedPoisson(**saved)
    return saved if isinstance(saved, (TruncatedPoisson, RandomAllocation)) else float(saved)


# -------------------------------------------------------------------------------------------------


Entry = tuple[float, Rate, int]
"""(noise multiplier, sampling rate, steps), as in Opacus' accountants."""
History = Sequence[Entry]
"""The entries of a whole run."""
Segments = dict[str, list[Entry]]
"""Name -> the entries recorded under it, in the order of their first appearance."""


class Spent(NamedTuple):
    """Snapshot of a ledger: its steps, and the unit that they protect."""

    segments: Segments
    protected: Protected


SEGMENTS_KEY = "segments"
DIGEST = "fastclip_digest"
"""Key of the digest in an accountant's state."""
LINES = "fastclip_lines"
"""Key of the lines of other data sets, by name, in an accountant's state."""


def new_name() -> str:
    """Return a unique name, never from a generator that a script may seed."""
    return os.urandom(8).hex()


def runs(entries: Iterable[Entry]) -> list[Entry]:
    """Merge adjacent entries of equal noise and rate, as step() does."""
    return [
        (sigma, rate, sum(steps for _, _, steps in same))
        for (sigma, rate), same in groupby(entries, key=lambda entry: entry[:2])
    ]


def joined(segments: Segments) -> list[Entry]:
    """Return all segments as one history."""
    return runs(chain.from_iterable(segments.values()))


def remainder(longer: list[Entry], shorter: list[Entry]) -> list[Entry] | None:
    """Return the entries of `longer` after `shorter`, or None if it does not begin with it.

    Both are results of `runs`.
    """
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
    """Return every step of either. Two histories under one name (a copy, or tampering) both count."""
    merged = dict(own)
    for name, entries in others.items():
        known = merged.get(name, [])
        if remainder(entries, known) is not None:
            merged[name] = entries
        elif remainder(known, entries) is None:
            merged[new_name()] = entries
    return merged


def saved_entries(entries: Iterable[Entry]) -> list[tuple[float, Any, int]]:
    """Return a history as plain values, for JSON and checkpoints."""
    return [(float(sigma), encoded(rate), int(steps)) for sigma, rate, steps in entries]


def digest(state: Mapping[str, Any]) -> str:
    """Return a digest of a state's steps, which detects a flipped bit wherever the state was stored.

    Args:
        state: state of an accountant, also after JSON.
    """
    named = sorted(
        (name, saved_entries(_entries(part))) for name, part in state[SEGMENTS_KEY].items()
    )
    values = [
        mechanism_of(state),
        saved_entries(_entries(state["history"])),
        named,
        state[PROTECTED_KEY],
    ]
    if state.get(LINES):
        values.append(sorted((name, line[DIGEST]) for name, line in state[LINES].items()))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_segments(saved: Any, mechanism: str, place: str) -> Segments:
    """Return the segments of an accountant's state.

    A history without names (of plain Opacus, or changed by hand) gets a new name. It cannot be
    identified with any run, so it is added. A history that lacks named steps is counted in addition to
    them.

    Args:
        saved: the result of state_dict(), also after JSON.
        mechanism: mechanism of the accountant that reads it.
        place: the origin of the state, for messages.

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
    """Check for impossible steps, which could have a zero or negative cost.

    Raises:
        ValueError: for such an entry. The message names it.
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
# Names of the segments of a ledger.


class Names:
    """Names of the segments of one ledger, in one process.

    Ranks that take every step together record it under one name, so it counts once. The name is the
    first rank's, and a number. Steps that one rank takes alone have a unique name and add up. So do
    the steps of a fork.
    """

    def __init__(self) -> None:
        self._shared, self._given, self._alone = "", 0, False
        self.process = this_process()

    def share(self, name: str) -> None:
        """Set the name that all ranks share, and no other process."""
        self._shared, self._given, self._alone = name, 0, False
        self.process = this_process()

    def alone(self, alone: bool) -> bool:
        """Return whether the next steps need another name, after a change between alone and shared."""
        changed = bool(self._shared) and alone != self._alone
        self._alone = alone
        return changed

    def new(self) -> str:
        """Return the name of a new segment."""
        process = this_process()
        if process != self.process:
            self._shared, self.process = "", process
        if not self._shared or self._alone:
            return new_name()
        self._given += 1
        return f"{self._shared}.{self._given}"

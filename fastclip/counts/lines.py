"""Lines of a ledger: the data sets, the protected unit, the privacy spent, and the total."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fastclip.accounting.epsilon import spent
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Protected
from fastclip.counts.query import TRAINING, CountQuery, PrivateData
from fastclip.errors import ArgumentError


@dataclass(frozen=True)
class Line:
    """Privacy spent on the people of some data sets together.

    Formal guarantee: all releases of this ledger are (epsilon, delta)-differentially private for data
    that differ in one unit of these data sets (added, removed or zeroed out as `size_is_secret` says).
    """

    data_sets: tuple[str, ...]
    unit: str
    """"row" (one sample), "unit", or "" before the first release."""
    epsilon: float
    delta: float
    releases: int
    """Number of recorded steps and counts."""
    size_is_secret: bool
    """Whether neighbors differ in one unit that is added or removed. Otherwise one is zeroed out."""


@dataclass(frozen=True)
class PrivacyByDataSet:
    """All lines of a ledger, to be printed.

    Formal guarantee: nobody is in two lines, so each person has the epsilon of their line, and the
    largest epsilon holds for everybody. That nobody is in two lines follows from the declared
    `PrivateData.overlap`, which is not checked.
    """

    lines: tuple[Line, ...]

    @property
    def epsilon(self) -> float:
        """Epsilon that holds for everybody in any of the data sets."""
        return max(line.epsilon for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """Return plain values. An infinite epsilon is None."""
        found = [
            asdict(line) | {"epsilon": line.epsilon if math.isfinite(line.epsilon) else None}
            for line in self.lines
        ]
        return {"lines": found}

    def __str__(self) -> str:
        found = []
        for line in self.lines:
            of = " or ".join(line.data_sets)
            who = f"a {worded(line.unit)} of {of}" if line.unit else "nobody yet"
            found.append(
                f"{', '.join(line.data_sets)}: epsilon = {line.epsilon:.4f} at delta = {line.delta:g}, "
                f"{line.releases} releases, protects {who}"
            )
        names = [name for line in self.lines for name in line.data_sets]
        found.append(
            f"total: epsilon = {self.epsilon:.4f} at delta = {self.lines[0].delta:g} for everybody in "
            f"{', '.join(names)} (each person in one line), and for nobody else"
        )
        return "\n".join(found)


def worded(unit: str) -> str:
    """A privacy unit in words."""
    return "sample" if unit == "row" else unit


def lines_of(ledger: Ledger, delta: float) -> PrivacyByDataSet:
    """Return all lines of a ledger, the training set's first.

    Raises:
        ArgumentError, ArgumentTypeError: for a delta out of range, or a failure of an accountant.
    """
    found = [_line(ledger, (TRAINING,), delta)]
    found += [_line(line, (), delta) for line in ledger.lines.values() if line.history]
    return PrivacyByDataSet(tuple(found))


def said_of_overlaps(ledger: Ledger) -> tuple[str, ...]:
    """Return the assumptions of the lines that are not checked, in words."""
    found = [f"epsilon also holds for the people of {name!r}, declared to overlap the training set"
             for name in sorted(ledger.protected.data)]  # fmt: skip
    separate = sorted({name for line in ledger.lines.values() for name in line.protected.data})
    if separate:
        found.append(
            f"nobody of {', '.join(map(repr, separate))} is in the training set; what they have spent "
            "is in separate lines (engine.privacy_by_data_set)"
        )
    return tuple(found)


def _line(ledger: Ledger, first: tuple[str, ...], delta: float) -> Line:
    whom = ledger.protected
    return Line(
        data_sets=(*first, *sorted(whom.data)), unit="".join(whom.units),
        epsilon=spent(ledger, delta), delta=float(delta),
        releases=sum(int(steps) for *_, steps in ledger.history),
        size_is_secret=whom.size_is_secret,
    )  # fmt: skip


def line_for(
    query: CountQuery, ledger: Ledger, trained: frozenset[str]
) -> tuple[Ledger, Protected]:
    """Return the ledger line of a query of private data, and whom that line then protects.

    Args:
        query: the query.
        ledger: ledger of the engine.
        trained: units of the models that were made private under it.

    Raises:
        ArgumentError: the data set shares people with two lines, or contradicts its earlier overlap.
            Also if the line protects other units, or if "gdp" cannot compose it.
    """
    data, name = query.data, line_name(query, ledger)
    line = ledger if name == TRAINING else ledger.line(name)
    others = frozenset({data.name}) - {TRAINING}
    whom = Protected(frozenset({query.unit}), data=others)
    differ = (line.protected.units | (trained if line is ledger else set())) - {query.unit}
    if differ:
        raise ArgumentError(
            f"A count of {data.name!r} protects each {worded(query.unit)}, but other releases of its "
            f"people protect each {' or '.join(map(worded, sorted(differ)))}, so one epsilon would hold "
            "for neither. Count by the same unit.",
            doc="privacy-budget",
        )
    if line.mechanism() == "gdp":
        raise ArgumentError(
            "accountant='gdp' expects a constant noise multiplier and sample rate, but counts of people "
            "in the training set have others. Use FastPrivacyEngine(accountant='prv').",
            doc="privacy-budget",
        )
    return line, whom


def line_name(query: CountQuery, ledger: Ledger) -> str:
    """Return the name of the line of a query of private data, the training set or a data set.

    Raises:
        ArgumentError: the overlap of its data set contradicts what was counted before.
    """
    data = query.data
    if not isinstance(data, PrivateData):
        return TRAINING
    before = {TRAINING: TRAINING}
    for name in ledger.protected.data:
        before[name] = TRAINING
    for line, theirs in ledger.lines.items():
        before |= dict.fromkeys(theirs.protected.data, line)
    unknown = [name for name in data.overlap or () if name not in before]
    if unknown:
        raise ArgumentError(
            f"The overlap of {data.name!r} names {unknown[0]!r}, which has no counts yet. Count that "
            "data set first, or name this one in its overlap instead.",
            doc="noisy-counts",
        )
    meant = {before[name] for name in data.overlap or ()} or {data.name}
    if len(meant) > 1:
        raise ArgumentError(
            f"The overlap of {data.name!r} names data sets with separate privacy accounts, "
            f"{sorted(data.overlap or ())}. Name the earlier one in the overlap of the later one, "
            "before anything of it is counted.",
            doc="noisy-counts",
        )
    (line,) = meant
    known = before.get(data.name, line)
    if known != line:
        raise ArgumentError(
            f"The data set {data.name!r} was counted with the people of {known!r} before, but overlap="
            f"{data.overlap!r} contradicts this. Pass the same overlap as before.",
            doc="noisy-counts",
        )
    return line

"""Who has taken which steps: histories under names, so that no step is forgotten or counted twice.

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
from itertools import chain, groupby
from typing import Any, NamedTuple

from fastclip._opacus import mechanism_of
from fastclip.accounting.protected import KEY as PROTECTED
from fastclip.accounting.protected import Protected
from fastclip.accounting.truncation import Rate, decoded, encoded, probability
from fastclip.errors import ArgumentError

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


KEY = "segments"
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
    named = sorted((name, saved_entries(_entries(part))) for name, part in state[KEY].items())
    said = [mechanism_of(state), saved_entries(_entries(state["history"])), named, state[PROTECTED]]
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
        named = {str(name): _entries(part) for name, part in (saved.get(KEY) or {}).items()}
        for part in (history, *named.values()):
            check_entries(part)
        if DIGEST in saved and saved[DIGEST] != digest(saved):
            raise ValueError("its digest is of other steps")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{place} is damaged, so what its run has spent is not known ({error!r}); resume from "
            "another checkpoint"
        ) from None
    if found != mechanism:
        raise ArgumentError(
            f"{place} was accounted by {found!r}, this run by {mechanism!r}; resume with "
            f"accountant={found!r}"
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
            raise ValueError(f"no run has steps of {(sigma, rate, steps)}")


def _entries(history: Any) -> list[Entry]:
    entries = [(float(sigma), decoded(rate), _steps(steps)) for sigma, rate, steps in history]
    return runs(entry for entry in entries if entry[2])


def _steps(saved: Any) -> int:
    if isinstance(saved, bool) or int(saved) != saved or saved < 0:
        raise ValueError(f"{saved!r} is no number of steps")
    return int(saved)


def _totals(history: Iterable[Entry]) -> Counter[tuple[float, Rate]]:
    totals: Counter[tuple[float, Rate]] = Counter()
    for sigma, rate, steps in history:
        totals[sigma, rate] += steps
    return totals

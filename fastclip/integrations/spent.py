"""What was spent, as a checkpoint keeps it: loading it never makes less of what is accounted already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain, groupby, repeat
from typing import Any

from fastclip.errors import ArgumentError

History = list[tuple[float, float, int]]
"""As Opacus' accountants keep it: (noise multiplier, sampling rate, steps)."""

_LEDGER = "_fastclip_ledger"


def ledger_of(accountant: Any) -> str:
    """A name of the accountant's history; a history that is loaded and goes on keeps its name."""
    if _LEDGER not in accountant.__dict__:
        setattr(accountant, _LEDGER, os.urandom(8).hex())
    return getattr(accountant, _LEDGER)


def spent_state(accountant: Any) -> dict[str, Any]:
    """For a checkpoint."""
    return {**accountant.state_dict(), "ledger": ledger_of(accountant)}


def read_spent(saved: Any, accountant: Any, place: str) -> History:
    """The history of a checkpoint; the accountant is not changed.

    Raises:
        ArgumentError: if it is damaged, or of another accountant.
    """
    try:
        found = saved["mechanism"]
        history = [(float(sigma), float(q), int(steps)) for sigma, q, steps in saved["history"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{place} is damaged, so what its run has spent is not known ({error!r}); resume from "
            "another checkpoint"
        ) from None
    if found != accountant.mechanism():
        raise ArgumentError(
            f"{place} was accounted by {found!r}, this run by {accountant.mechanism()!r}; resume with "
            f"accountant={found!r}"
        )
    return history


def load_spent(accountant: Any, saved: Mapping[str, Any], place: str) -> None:
    """Go on from a checkpoint, without forgetting what this accountant recorded itself.

    Of the same history, the longer is kept where one begins with the other. Anything else was spent
    besides, so it is added.

    Raises:
        ArgumentError: as `read_spent`; the accountant is then as it was.
    """
    history = read_spent(saved, accountant, place)
    own: History = list(accountant.history)
    ledger = saved.get("ledger")
    if not own and ledger is not None:
        setattr(accountant, _LEDGER, ledger)
    known = ledger is None or ledger == ledger_of(accountant)
    merged = _merged(own, history) if known or not own else _runs(_steps(own) + _steps(history))
    if accountant.mechanism() == "gdp" and len(merged) > 1:
        raise ArgumentError(
            "accountant='gdp' cannot compose steps of several noise multipliers or sampling rates; "
            "use accountant='prv' or 'rdp'"
        )
    accountant.history = merged


def _merged(own: History, saved: History) -> History:
    mine, theirs = _steps(own), _steps(saved)
    if mine == theirs[: len(mine)]:
        return _runs(theirs)
    if theirs == mine[: len(theirs)]:
        return _runs(mine)
    return _runs(mine + theirs)


def _steps(history: History) -> list[tuple[float, float]]:
    return list(chain.from_iterable(repeat((sigma, q), steps) for sigma, q, steps in history))


def _runs(steps: list[tuple[float, float]]) -> History:
    return [(sigma, q, len(list(same))) for (sigma, q), same in groupby(steps)]

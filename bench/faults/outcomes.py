"""What becomes of a run that was disturbed, and the comparisons that decide it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastclip import FastPrivacyEngine

EXACT, ERROR, FAILED = "continues exactly", "clear error", "FAILED"
KINDS = (EXACT, ERROR, FAILED)


@dataclass(frozen=True)
class Outcome:
    """Of one disturbed run.

    Args:
        kind: of `KINDS`. `EXACT`: what follows equals, bit for bit, a run that was not disturbed or in
            which the disturbed step was wholly absent. `ERROR`: an error said so, nothing was released
            that is not counted, and what follows holds nothing of it. `FAILED`: anything else.
        note: what happened, in a few words; runs are counted by it.
    """

    kind: str
    note: str


class Broken(Exception):
    """The run did something that it may not; the message says what."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise `Broken` unless something holds."""
    if not holds:
        raise Broken(otherwise)


def counted(ledger: Path) -> int:
    """Steps in a ledger's file, as a new engine counts them; the file itself is not touched."""
    if not ledger.exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ledger"
        shutil.copyfile(ledger, copy)
        engine = FastPrivacyEngine(accountant="rdp")
        engine.write_ahead(copy)
        return steps_of(engine)


def steps_of(engine: FastPrivacyEngine) -> int:
    """Steps that an engine has recorded."""
    return sum(steps for *_, steps in engine.accountant.history)


def check_ledger(found: int, released: int, faults: int = 1) -> None:
    """No step was released that is not in it, and each fault has added one at most.

    Raises:
        Broken: saying which.
    """
    expect(found >= released, f"the ledger is short: {found} steps, {released} were released")
    expect(found <= released + faults, f"the ledger holds {found} steps, {released} were released")


def same(a: Any, b: Any) -> bool:
    """Two states are equal, bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def bits(x: torch.Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory."""
    return x.detach().cpu().contiguous().numpy().tobytes()


def mixed(weights: Mapping, old: Mapping, new: Mapping) -> bool:
    """Every weight is the old or the new one: an inner step that was interrupted between two of them."""
    return all(
        bool(((weights[name] == old[name]) | (weights[name] == new[name])).all())
        for name in weights
    )


def tally(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many runs had each outcome, and each note of each."""
    notes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for outcome in outcomes:
        found = notes[outcome.kind]
        found[outcome.note] = found.get(outcome.note, 0) + 1
    return {
        "outcomes": {kind: sum(notes[kind].values()) for kind in KINDS},
        "notes": {kind: found for kind, found in notes.items() if found},
    }

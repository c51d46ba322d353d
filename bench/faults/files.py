"""Damaged checkpoints and ledgers, and a disk that is full while they are written."""

from __future__ import annotations

import random
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from bench.faults.outcomes import (
    ERROR,
    EXACT,
    Outcome,
    check_ledger,
    counted,
    expect,
    same,
    steps_of,
)
from bench.faults.processes import in_fork
from bench.faults.runs import Run, undisturbed
from fastclip.errors import ArgumentError, StepError

STEPS = 3


def walked(steps: int, ledger: Path | None = None) -> Run:
    """A run that has taken a few steps."""
    run = Run("plain", 0, ledger)
    for number, batch in run.batches():
        if number == steps:
            break
        run.step(number, batch)
    return run


def save(run: Run, path: Path) -> None:
    """Write its checkpoint."""
    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)


@cache
def _whole(kind: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        run = walked(STEPS, path if kind == "ledger" else None)
        if kind == "checkpoint":
            save(run, path)
        return path.read_bytes()


def damaged_checkpoint(how: str, seed: int, folder: Path) -> Outcome:
    """A checkpoint of which one bit is flipped, or the end is missing, is loaded."""
    content, what = _damaged("checkpoint", how, seed)
    path = folder / "run.pt"
    path.write_bytes(content)
    run = Run("plain", 0)
    before = run.state()
    try:
        run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    except ArgumentError:
        expect(same(run.state(), before), f"refused, and loaded ({what})")
        expect(not steps_of(run.engine), f"refused, and its steps are counted ({what})")
        return Outcome(ERROR, "refused; nothing was loaded")
    expect(same(run.state(), undisturbed("plain", 0)[STEPS]), f"loaded with other numbers ({what})")
    expect(steps_of(run.engine) == STEPS, f"loaded with {steps_of(run.engine)} steps ({what})")
    return Outcome(EXACT, "loaded: what was damaged holds nothing")


def flipped_ledger(seed: int, folder: Path) -> Outcome:
    """A ledger on disk of which one bit is flipped is gone on with."""
    content, what = _damaged("ledger", "flipped", seed)
    path = folder / "ledger"
    path.write_bytes(content)
    run = Run("plain", 0)
    try:
        run.engine.write_ahead(path)
    except ArgumentError:
        expect(path.read_bytes() == content, "refused, and changed")
        return Outcome(ERROR, "refused; the file is as it was")
    expect(steps_of(run.engine) >= STEPS, f"{steps_of(run.engine)} of {STEPS} steps ({what})")
    return Outcome(EXACT, "every step is counted")


def _damaged(kind: str, how: str, seed: int) -> tuple[bytes, str]:
    content, draw = _whole(kind), random.Random(f"{kind} {how} {seed}")
    if how == "truncated":
        length = draw.randrange(len(content))
        return content[:length], f"{length} of {len(content)} bytes"
    place = draw.randrange(8 * len(content))
    flipped = bytearray(content)
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped), f"bit {place}"


@contextmanager
def room(size: int) -> Iterator[None]:
    """Files may have so many bytes, no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_room_for_a_checkpoint(seed: int, folder: Path) -> Outcome:
    """The disk is full in the middle of a checkpoint; the one before it must be there."""
    path = folder / "run.pt"
    run = walked(STEPS)
    save(run, path)
    old = path.read_bytes()
    size = random.Random(f"room {seed}").randrange(len(old))

    def work() -> None:
        later = walked(STEPS + 1)
        try:
            with room(size):
                save(later, path)
        except (OSError, RuntimeError):
            expect(path.read_bytes() == old, "the old checkpoint is gone")
            expect([p.name for p in folder.iterdir()] == ["run.pt"], "half a file is left")
            return
        raise AssertionError("saved without room")

    in_fork(work, folder.with_name(folder.name + "-said"))
    again = Run("plain", 0)
    again.engine.load_checkpoint(path=path, module=again.model, optimizer=again.optimizer)
    expect(same(again.state(), undisturbed("plain", 0)[STEPS]), "the old one holds other numbers")
    return Outcome(ERROR, "an error of the system; the checkpoint before it is whole")


def no_room_for_the_ledger(setup: str, seed: int, folder: Path) -> Outcome:
    """The disk is full in the middle of the ledger's next line; then there is room again."""
    states, ledger = undisturbed(setup, 0), folder / "ledger"
    more = random.Random(f"line {seed}").randrange(60)
    run, refused = Run(setup, 0, ledger), 0
    found: list[Any] = []
    for number, batch in run.batches():
        size = ledger.stat().st_size + more if number == STEPS else 2**40
        try:
            with room(size):
                run.step(number, batch)
        except StepError:
            refused += 1
            expect(same(run.state(), states[number]), "refused, and the weights have moved")
            found.append(number)
    expect(found == [STEPS], f"refused were {found}")
    check_ledger(counted(ledger), run.released, faults=0)
    expect(run.released == len(states) - 2, "another number of steps")
    return Outcome(ERROR, "the step is refused, and the next ones are taken")

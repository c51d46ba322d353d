"""SIGKILL in the middle of training: by a clock, at a moment inside fastclip, right after a release.

A run tells of each release in a file of its own, as somebody would who saw the weights. Killed, it is
resumed in a new process from its last checkpoint, and its end is that of a run that nobody killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bench.faults.injected import AtMoment, UsersError, kill
from bench.faults.outcomes import ERROR, EXACT, Outcome, check_ledger, counted, expect, same
from bench.faults.processes import ended, forked, in_fork
from bench.faults.runs import Run

EPOCHS = 6
WAYS = ("time", "moment", "release")
TRIES = 8
"""At a time before the run has ended."""


def train(setup: str, folder: Path, each: Callable[[int], None] = lambda released: None) -> None:
    """Go on from the checkpoint in `folder`, if there is one, to the end of the run.

    Args:
        each: called right after a release, with the number of releases of this process.
    """
    run, begin = Run(setup, 0, folder / "ledger"), 0
    if (folder / "run.pt").exists():
        rest = run.engine.load_checkpoint(
            path=folder / "run.pt", module=run.model, optimizer=run.optimizer
        )
        begin = rest["epoch"] + 1
    released = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell() -> None:
        os.write(released, b"x")
        each(run.released)

    run.on_release = tell
    for epoch in range(begin, EPOCHS):
        for number, batch in enumerate(run.epoch(epoch)):
            run.step(1000 * epoch + number, batch)
        run.engine.save_checkpoint(
            path=folder / "run.pt", module=run.model, optimizer=run.optimizer,
            checkpoint_dict={"epoch": epoch},
        )  # fmt: skip
    torch.save(run.state(), folder / "end.pt")


def training(setup: str) -> Callable[..., None]:
    """`train` of a set-up, in a folder: of "trainer" that of transformers."""
    if setup != "trainer":
        return partial(train, setup)
    from bench.faults import trainers  # takes seconds

    return trainers.train


@cache
def whole(setup: str) -> dict[str, Any]:
    """Of a run that nobody kills: where it ends, its seconds and its releases."""
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), training(setup)
        start = time.perf_counter()
        in_fork(lambda: run(folder), folder / "said")
        seconds = time.perf_counter() - start
        end, releases = torch.load(folder / "end.pt"), (folder / "released").stat().st_size
    return {"end": end, "seconds": seconds, "releases": releases}


@cache
def moments(setup: str) -> int:
    """How many moments inside fastclip a run has."""
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), training(setup)

        def count() -> None:
            counter = AtMoment(-1, kill)
            with counter:
                run(folder)
            (folder / "moments").write_text(str(counter.seen))

        in_fork(count, folder / "said")
        return int((folder / "moments").read_text())


def killed(setup: str, seed: int, folder: Path) -> Outcome:
    """One run that is killed, and the one that goes on."""
    way, draw = WAYS[seed % len(WAYS)], random.Random(f"kill {setup} {seed}")
    known, run = whole(setup), training(setup)
    for _ in range(TRIES):
        _empty(folder)
        code = _kill(setup, way, draw, folder)
        if code == -signal.SIGKILL:
            break
        expect(code == 0, f"the run ended with {code}: {_said(folder)}")
    expect(code == -signal.SIGKILL, "the run always ended before it was killed")
    before = _released(folder)
    check_ledger(counted(folder / "ledger"), before)
    saved = (folder / "run.pt").exists() or any(folder.glob("hf/checkpoint-*"))
    in_fork(lambda: run(folder), folder / "said")
    check_ledger(counted(folder / "ledger"), _released(folder))
    expect(same(torch.load(folder / "end.pt"), known["end"]), "the resumed run ends elsewhere")
    if (folder / "refused").exists():
        errors = (folder / "refused").read_text().split()
        return Outcome(
            ERROR, f"{way}; newest checkpoint refused ({errors[0]}), resumed from another"
        )
    return Outcome(EXACT, f"{way}; resumed from {'a checkpoint' if saved else 'the start'}")


def failing_callback(seed: int, folder: Path) -> Outcome:
    """A callback of the Trainer fails, and a new Trainer resumes."""
    from bench.faults import trainers

    known = whole("trainer")
    event = trainers.EVENTS[seed % len(trainers.EVENTS)]
    step = random.Random(f"callback {seed}").randrange(1, known["releases"] - 3)

    def fails() -> None:
        try:
            trainers.train(folder, callback=trainers.Fails(event, step))
        except UsersError:
            return
        raise AssertionError(f"the error of {event} was swallowed")

    in_fork(fails, folder / "said")
    check_ledger(counted(folder / "ledger"), _released(folder))
    in_fork(lambda: trainers.train(folder), folder / "said")
    check_ledger(counted(folder / "ledger"), _released(folder))
    expect(same(torch.load(folder / "end.pt"), known["end"]), "the resumed run ends elsewhere")
    return Outcome(EXACT, f"{event}: UsersError; a new Trainer resumes")


def _kill(setup: str, way: str, draw: random.Random, folder: Path) -> int:
    run, known = training(setup), whole(setup)
    if way == "time":
        child = forked(lambda: run(folder), folder / "said")
        time.sleep(draw.uniform(0.0, known["seconds"]))
        os.kill(child, signal.SIGKILL)
        return ended(child)
    last = draw.randrange(1, known["releases"] + 1)
    moment = draw.randrange(moments(setup)) if way == "moment" else 0

    def work() -> None:
        if way == "release":
            run(folder, lambda released: kill() if released == last else None)
        else:
            with AtMoment(moment, kill):
                run(folder)

    return ended(forked(work, folder / "said"))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _released(folder: Path) -> int:
    path = folder / "released"
    return path.stat().st_size if path.exists() else 0


def _said(folder: Path) -> str:
    path = folder / "said"
    return path.read_text().strip().splitlines()[-1] if path.exists() else ""

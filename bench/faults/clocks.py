"""A clock that jumps: nothing that is trained, saved or counted may depend on it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.faults.outcomes import EXACT, Outcome, check_ledger, counted, expect, same
from bench.faults.runs import Run, undisturbed

CLOCKS = ("time", "monotonic", "perf_counter", "process_time")


@contextmanager
def jumping(draw: random.Random) -> Iterator[None]:
    """Every reading of a clock is off by up to ten years, in either direction."""
    real = {name: getattr(time, name) for clock in CLOCKS for name in (clock, f"{clock}_ns")}

    def jumps(name: str) -> Any:
        unit = 10**9 if name.endswith("_ns") else 1.0
        return lambda: type(unit)(real[name]() + draw.uniform(-3e8, 3e8) * unit)

    for name in real:
        setattr(time, name, jumps(name))
    try:
        yield
    finally:
        for name, clock in real.items():
            setattr(time, name, clock)


def clock_jumps(setup: str, seed: int, folder: Path) -> Outcome:
    """A whole run, its checkpoint and a run that goes on from it."""
    states, ledger = undisturbed(setup, 0), folder / "ledger"
    with jumping(random.Random(f"clock {seed}")):
        run = Run(setup, 0, ledger)
        for number, batch in run.batches():
            run.step(number, batch)
        run.engine.save_checkpoint(
            path=folder / "run.pt", module=run.model, optimizer=run.optimizer
        )
        again = Run(setup, 0)
        again.engine.load_checkpoint(
            path=folder / "run.pt", module=again.model, optimizer=again.optimizer
        )
    expect(same(run.state(), states[-1]), "another end")
    expect(same(again.state(), states[-1]), "another checkpoint")
    check_ledger(counted(ledger), run.released, faults=0)
    return Outcome(EXACT, "nothing depends on it")

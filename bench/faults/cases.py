"""Every fault by name: how many runs it has, and what one of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.faults import clocks, coupled, files, forks, kills, steps
from bench.faults.outcomes import Outcome


@dataclass(frozen=True)
class Case:
    """One kind of fault.

    Args:
        name: for the command line. group: of the picture. title: what happens, in a few words.
        runs: how many there are; each is told by its number, which is its seed.
        quick: how many of them a quick look takes, spread over all.
        run: one of them, in a folder of its own.
    """

    name: str
    group: str
    title: str
    runs: Callable[[], int]
    quick: int
    run: Callable[[int, Path], Outcome]

    def seeds(self, quick: bool) -> Sequence[int]:
        """The runs to make."""
        count = self.runs()
        if not quick or self.quick >= count:
            return range(count)
        return sorted({i * count // self.quick for i in range(self.quick)})


def _always(count: int) -> Callable[[], int]:
    return lambda: count


def _memory(setup: str, part: str, title: str, runs: int | None = None, quick: int = 3) -> Case:
    def count() -> int:
        found = steps.operators(setup, steps.place(setup, part))
        return found if runs is None else min(runs, found)

    def run(seed: int, folder: Path) -> Outcome:
        every = steps.operators(setup, steps.place(setup, part)) // count()
        return steps.memory(setup, part, seed * every, folder)

    name = f"memory-{setup}" + ("" if part == "last" else f"-{part}")
    return Case(name, "out of memory", title, count, quick, run)


MEMORY = [
    _memory("plain", "last", "at every operator of a step"),
    _memory("split", "last", "... of the last part of a split batch"),
    _memory("split", "before", "... of the part before it"),
    _memory("tied", "last", "... of a model with tied and own parameters"),
    _memory("hooks", "last", "... in Opacus' hooks mode"),
    _memory("plain", "first", "at 200 operators of the first step (probing)", 200),
    _memory("tied", "first", "... of a model with tied and own parameters", 200, 2),
]
MEMORY.append(
    Case("memory-coupled", "out of memory", "... of models whose rows are coupled",
         _always(coupled.RUNS), 3, coupled.coupled)
)  # fmt: skip
INTERRUPTED = [
    Case(f"ctrl-c-{way}-{setup}", "Ctrl-C", title, runs, quick, partial(function, setup))
    for setup, more in (("plain", ""), ("split", ", split batch"), ("tied", ", tied"))
    for way, title, runs, quick, function in (
        ("operator", f"at every operator of a step{more}",
         partial(lambda s: steps.operators(s, steps.place(s, "last")), setup), 1,
         steps.interrupted_operator),
        ("moment", f"at random moments inside fastclip{more}", _always(100), 1,
         steps.interrupted_moment),
        ("time", f"by a signal at a random time{more}", _always(30), 1, steps.interrupted_time),
    )
]  # fmt: skip
HOOKS = [
    Case(f"hook-{setup}", "failing hooks", f"of 8 kinds{more}", _always(32), 3,
         partial(steps.failing_hook, setup))
    for setup, more in (("plain", ""), ("split", ", split batch"), ("tied", ", tied"))
]  # fmt: skip

KILLS = [
    Case(f"kill-{setup}", "SIGKILL", title, _always(runs), quick, partial(kills.killed, setup))
    for setup, title, runs, quick in (
        ("plain", "of a plain loop", 30, 2),
        ("split", "of a loop of split batches", 25, 1),
        ("workers", "of a loop with two loader workers", 25, 1),
        ("trainer", "of transformers' Trainer", 21, 0),
    )
]
HOOKS.append(
    Case("hook-trainer", "failing hooks", "callbacks of transformers' Trainer", _always(14), 0,
         kills.failing_callback)
)  # fmt: skip
FILES = [
    Case("checkpoint-truncated", "files", "a checkpoint without its end", _always(200), 5,
         partial(files.damaged_checkpoint, "truncated")),
    Case("checkpoint-flipped", "files", "a checkpoint with a flipped bit", _always(300), 8,
         partial(files.damaged_checkpoint, "flipped")),
    Case("ledger-flipped", "files", "a ledger with a flipped bit", _always(200), 5,
         files.flipped_ledger),
    Case("disk-checkpoint", "files", "disk full in a checkpoint", _always(30), 2,
         files.no_room_for_a_checkpoint),
    Case("disk-ledger", "files", "disk full in the ledger", _always(60), 3,
         partial(files.no_room_for_the_ledger, "plain")),
]  # fmt: skip
OTHERS = [
    Case(f"clock-{setup}", "clock", f"every reading off by years{more}", _always(20), 1,
         partial(clocks.clock_jumps, setup))
    for setup, more in (("plain", ""), ("split", ", split batch"), ("tied", ", tied"))
] + [
    Case(f"fork-{noise}", "fork", title, _always(10), 1, partial(forks.fork, noise))
    for noise, title in (
        ("secure", "secure noise"), ("ledger", "a ledger on disk, the parent's"),
        ("own", "a seeded generator"), ("global", "torch's generator"),
    )
]  # fmt: skip

CASES = {case.name: case for case in [*KILLS, *FILES, *MEMORY, *INTERRUPTED, *HOOKS, *OTHERS]}

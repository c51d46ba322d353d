"""A step that fails in its middle, and what the loop that goes on makes of it.

The state after the fault must be that of before the step, or that of a step that was not disturbed, or,
where the inner optimizer was interrupted, hold of every weight the one or the other (noise is in both,
and the step is in the ledger). What follows must equal, bit for bit, a new run that goes on from that
state: anything left over from the failed step would show.
"""

from __future__ import annotations

import random
import time
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

from bench.faults.injected import (
    HOOKS,
    AtMoment,
    AtOperator,
    Injection,
    UsersError,
    alarm,
    hooked,
    interrupt,
    no_memory,
    out_of_memory,
)
from bench.faults.outcomes import (
    ERROR,
    EXACT,
    Outcome,
    check_ledger,
    counted,
    expect,
    mixed,
    same,
    steps_of,
)
from bench.faults.runs import SETUPS, Run, resumed, undisturbed
from fastclip.errors import FastclipError

SEED = 0
FAULTS = (RuntimeError, MemoryError, KeyboardInterrupt, UsersError, FastclipError)


def disturbed(setup: str, at: int, injection: Injection, ledger: Path, seed: int = SEED) -> Outcome:
    """A whole run, one of whose steps fails.

    Raises:
        Broken: it went on as it may not.
    """
    states = undisturbed(setup, seed)
    before, after = states[at], states[at + 1]
    run, error, found = Run(setup, seed, ledger), None, before
    absent: set[int] = set()
    released = 0
    for number, batch in run.batches():
        if number != at:
            try:
                run.step(number, batch)
            except FastclipError:
                expect(number > at, "a step before the fault was refused")
                absent.add(number)
                run.optimizer.discard_logical_batch()
            continue
        ended = run.released
        try:
            with injection(run):
                run.step(number, batch)
        except FAULTS as raised:
            error = raised
            run.recover()
        found = run.state()
        moved = not same(found["weights"], before["weights"])
        released = int(moved and run.released == ended)
    end, total = run.state(), run.released + released
    check_ledger(counted(ledger), total, faults=error is not None)
    expect(total <= steps_of(run.engine) <= counted(ledger), "the engine forgot a step of its file")
    if error is None:
        expect(not absent, "a step was refused for an error that nobody saw")
        expect(same(end, states[-1]), "another end, and no error")
        return Outcome(EXACT, "the fault was not met, or was caught")
    told, where = _told(error), _place(found, before, after)
    follows = _follows(setup, seed, at, where, found, frozenset(absent))
    expect(same(end, follows), f"what follows holds something of the failed step ({told}, {where})")
    if absent:
        return Outcome(ERROR, f"{told}, then {len(absent)} step refused, and on from there")
    return Outcome(ERROR if where == "partly" else EXACT, f"{told}; the step is {where} there")


def _told(error: BaseException) -> str:
    """The error that the loop saw, and whose it was first."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    name, cause = type(error).__name__, type(first).__name__
    return name if first is error or name == cause else f"{name} (of a {cause})"


def _place(found: dict, before: dict, after: dict) -> str:
    if same(found, before):
        return "not"
    if same(found, after):
        return "wholly"
    weights = (found["weights"], before["weights"], after["weights"])
    expect(mixed(*weights), "weights are neither those of before the step nor those after it")
    return "partly"


_ENDS: dict = {}


def _follows(
    setup: str, seed: int, at: int, where: str, state: dict, absent: frozenset[int]
) -> dict:
    gone = set(range(at + 1)) | absent
    if where == "partly":
        return resumed(setup, seed, state, at, gone)
    key = setup, seed, at, where, absent
    if key not in _ENDS:
        _ENDS[key] = resumed(setup, seed, state, at, gone)
    return _ENDS[key]


@cache
def place(setup: str, part: str) -> int:
    """The physical batch that is disturbed.

    Args:
        part: "first" of the run, in which the model is probed. "last" of a later logical batch, which is
            released; in a split one several came before it. "before": the one before that.
    """
    if part == "first":
        return 0
    states, split = undisturbed(setup, SEED), SETUPS[setup].physical is not None
    moved = [not same(old["weights"], new["weights"]) for old, new in pairwise(states)]
    last = next(n for n in range(4, len(moved)) if moved[n] and not (split and moved[n - 1]))
    return last if part == "last" else last - 1


@cache
def operators(setup: str, at: int) -> int:
    """How many operators the step has."""
    return _count(setup, at, AtOperator(-1, interrupt))


@cache
def moments(setup: str, at: int) -> int:
    """How many moments of the step a signal may choose."""
    return _count(setup, at, AtMoment(-1, interrupt))


def _count(setup: str, at: int, counter: AtOperator | AtMoment) -> int:
    run = Run(setup, SEED)
    for number, batch in run.batches():
        if number == at:
            with counter:
                run.step(number, batch)
            return counter.seen
        run.step(number, batch)
    raise AssertionError("a run has more batches")


def memory(setup: str, part: str, seed: int, folder: Path) -> Outcome:
    """No memory for the `seed`-th operator of a step."""
    fails = no_memory if seed % 2 else out_of_memory
    at = place(setup, part)
    return disturbed(setup, at, lambda run: AtOperator(seed, fails), folder / "ledger")


def interrupted_operator(setup: str, seed: int, folder: Path) -> Outcome:
    """Ctrl-C at the `seed`-th operator of the step."""
    return disturbed(
        setup, place(setup, "last"), lambda run: AtOperator(seed, interrupt), folder / "ledger"
    )


def interrupted_moment(setup: str, seed: int, folder: Path) -> Outcome:
    """Ctrl-C at a moment inside fastclip, drawn from `seed`."""
    moment = random.Random(f"moment {setup} {seed}").randrange(moments(setup, place(setup, "last")))
    return disturbed(
        setup, place(setup, "last"), lambda run: AtMoment(moment, interrupt), folder / "ledger"
    )


@cache
def _seconds(setup: str) -> float:
    run, start, at = Run(setup, SEED), 0.0, place(setup, "last")
    for number, batch in run.batches():
        if number == at:
            start = time.perf_counter()
        run.step(number, batch)
        if number == at:
            break
    return time.perf_counter() - start


def interrupted_time(setup: str, seed: int, folder: Path) -> Outcome:
    """Ctrl-C by a signal, after a time that is drawn from `seed`."""
    wait = random.Random(f"time {setup} {seed}").uniform(1e-5, 1.2 * _seconds(setup))
    return disturbed(setup, place(setup, "last"), lambda run: alarm(wait), folder / "ledger")


def failing_hook(setup: str, seed: int, folder: Path) -> Outcome:
    """A hook of the user's own fails: `seed` says which, and on which part of the model."""
    kind = list(HOOKS)[seed % len(HOOKS)]
    injection = partial(hooked, kind=kind, part=seed // len(HOOKS))
    found = disturbed(setup, place(setup, "last"), injection, folder / "ledger")
    expect("UsersError" in found.note, f"the error of the {kind} was swallowed: {found.note}")
    return Outcome(found.kind, f"{kind}: {found.note}")

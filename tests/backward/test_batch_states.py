"""The states of a logical batch: the table is whole, is the page's, and releases nothing twice."""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path

import pytest

from fastclip.backward.logical_batch import TABLE, Event, LogicalBatch, Refusal, State
from fastclip.errors import StepError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
LENGTH = 6


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(State)
    assert all(list(row) == list(Event) for row in TABLE.values())


def test_the_page_has_the_table() -> None:
    """A state, `error` for what raises, in the order of events."""
    rows = re.findall(r"^\| \*\*([A-Z]+)\*\*[^|]*\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    shown = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    expected = {
        state.name: ["error" if isinstance(x, Refusal) else x.name for x in row.values()]
        for state, row in TABLE.items()
    }
    assert shown == expected


class Loop:
    """A training loop's calls, and by hand: which passes the sums hold, and what became of them."""

    def __init__(self, joined: bool) -> None:
        self.batch = LogicalBatch()
        self.batch.accumulation_allowed = joined
        self.passes = itertools.count()
        self.summed: list[int] = []
        self.current: list[int] = []
        """Of the physical batch that no step has followed yet."""
        self.released: list[int] = []

    def backward(self) -> None:
        self.batch.begin_pass()
        with self.batch.changing():
            self.current.append(next(self.passes))
            self.summed.append(self.current[-1])
            self.batch.end_pass(1, 1)

    def skip(self) -> None:
        self.batch.step(skip=True)
        assert self.current, "nothing to accumulate"
        self.current = []

    def step(self) -> None:
        self.batch.step(skip=False)
        assert self.current, "a release without a pass of its own"
        assert not set(self.summed) & set(self.released), "released twice"
        assert self.batch.accumulated == len(self.current)
        self.released += self.summed
        self.current = []

    def zero_grad(self) -> None:
        if self.batch.keeps_sums():
            assert self.summed
            assert not self.current
            assert not set(self.summed) & set(self.released)
            return
        stale = set(self.summed) & set(self.released)
        assert stale or self.summed == self.current, "earlier physical batches were dropped"
        with self.batch.clearing():
            self.summed, self.current = [], []

    def discard(self) -> None:
        with self.batch.abandon():
            self.summed, self.current = [], []

    def check(self, joined: bool) -> None:
        """What the state says is what the sums are."""
        stale = bool(set(self.summed) & set(self.released))
        expected = {
            (False, False): State.RELEASED if stale else State.HELD,
            (False, True): State.EMPTY,
            (True, False): State.STALE if stale else self.batch.state,
        }[bool(self.current), not self.summed]
        assert self.batch.state is expected
        if self.current and not stale:
            earlier = set(self.summed) - set(self.current)
            assert self.batch.state is (State.JOINED if earlier else State.GATHERED)
        assert self.batch.pending == len(self.current)
        assert joined or len(self.current) <= 1


@pytest.mark.parametrize("joined", [True, False])
def test_every_short_loop(joined: bool) -> None:
    """A refused call changes nothing, and no pass is released twice, in any order of calls."""
    calls = (Loop.backward, Loop.skip, Loop.step, Loop.zero_grad, Loop.discard)
    refused = 0
    for order in itertools.product(calls, repeat=LENGTH):
        loop = Loop(joined)
        for call in order:
            before = loop.batch.state
            try:
                call(loop)
            except StepError:
                refused += 1
                assert loop.batch.state is before
            loop.check(joined)
        assert len(set(loop.released)) == len(loop.released)
    assert refused


def reach(state: State) -> LogicalBatch:
    """A logical batch in this state."""
    ways = {
        State.EMPTY: "", State.GATHERED: "p", State.HELD: "ph", State.JOINED: "php",
        State.RELEASED: "ps", State.STALE: "psp",
    }  # fmt: skip
    loop = Loop(True)
    calls = {"p": loop.backward, "h": loop.skip, "s": loop.step}
    for letter in ways[state]:
        calls[letter]()
    assert loop.batch.state is state
    return loop.batch


WHOLE = [state for state in State if state not in (State.BROKEN, State.RETIRED)]


def broken(batch: LogicalBatch) -> None:
    with contextlib.suppress(KeyboardInterrupt), batch.changing():
        raise KeyboardInterrupt


@pytest.mark.parametrize("state", WHOLE)
def test_a_change_that_fails_leaves_nothing_to_release(state: State) -> None:
    batch = reach(state)
    broken(batch)
    assert batch.state is State.BROKEN
    for call in (batch.begin_pass, lambda: batch.step(skip=False), lambda: batch.step(skip=True)):
        with pytest.raises(StepError, match="sums are incomplete"):
            call()
    assert not batch.keeps_sums()
    with batch.clearing():
        pass
    assert batch.state is State.EMPTY


@pytest.mark.parametrize("state", WHOLE)
def test_a_change_that_is_refused_leaves_the_state(state: State) -> None:
    batch = reach(state)
    with contextlib.suppress(StepError), batch.changing():
        batch.unchanged()
        raise StepError("the strategy has refused the batch")
    assert batch.state is state


@pytest.mark.parametrize("state", WHOLE)
@pytest.mark.parametrize("fails", [False, True])
def test_retired_is_the_end(state: State, fails: bool) -> None:
    batch = reach(state)
    if fails:
        broken(batch)
    batch.retire()
    for clear in (batch.clearing, batch.abandon):
        assert not batch.keeps_sums()
        broken(batch)
        with clear():
            pass
        assert batch.state is State.RETIRED
        with pytest.raises(StepError, match="made private again or cleaned up"):
            batch.step(skip=False)

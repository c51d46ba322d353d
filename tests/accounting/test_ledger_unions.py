"""Whatever is branched, saved and joined, a ledger holds exactly the steps that it has heard of."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.accounting import TruncatedPoisson
from fastclip.accounting.ledger import keep_ledger
from fastclip.core.opacus_names import create_accountant

KINDS = [(1.0, 0.1), (2.0, 0.1), (1.0, TruncatedPoisson(0.1, 50, 8))]
COMMON = settings(max_examples=200, deadline=None, derandomize=True, database=None)


class Book:
    """A ledger, and the truth: which steps, each with a number of its own, it has heard of."""

    def __init__(self, ledger: Any, steps: set) -> None:
        self.ledger, self.steps = ledger, steps

    def check(self) -> None:
        found: Counter = Counter()
        for sigma, rate, steps in self.ledger.history:
            found[sigma, rate] += steps
        assert found == Counter(kind for kind, _ in self.steps)


@COMMON
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 99)), max_size=40
    )
)
def test_a_ledger_holds_what_it_has_heard_of(moves: list[tuple[int, int, int]]) -> None:
    """Never fewer, and with names never more, for any order of steps, saves, loads, copies, joins."""
    books = [Book(keep_ledger(create_accountant("pld")), set()) for _ in range(2)]
    saved: list[tuple[dict, set]] = []
    number = 0
    for move, first, second in moves:
        book = books[first % len(books)]
        if move <= 1:
            kind = KINDS[second % (len(KINDS) if move else 1)]  # mostly equal ones
            book.ledger.step(noise_multiplier=kind[0], sample_rate=kind[1])
            number += 1
            book.steps.add((kind, number))
        elif move == 2:
            saved.append((json.loads(json.dumps(book.ledger.state_dict())), set(book.steps)))
        elif move == 3 and saved:
            state, steps = saved[second % len(saved)]
            book.ledger.load_state_dict(state)
            book.steps |= steps
        elif move == 4:
            copies = (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))
            books.append(Book(copies[second % 3](book.ledger), set(book.steps)))
        elif move == 5:
            other = books[second % len(books)]
            book.ledger.join(other.ledger.segments(), other.ledger.protected)
            book.steps |= other.steps
        for one in books:
            one.check()


def test_a_run_without_names_is_added_each_time() -> None:
    """That it is the same one is not known."""
    plain = create_accountant("rdp")
    ours = keep_ledger(create_accountant("rdp"))
    for book in (plain, ours, ours):
        book.step(noise_multiplier=1.0, sample_rate=0.1)
    for total in (3, 4):
        ours.load_state_dict(plain.state_dict())
        assert ours.history == [(1.0, 0.1, total)]


@pytest.mark.parametrize("history", [[], [(1.0, 0.1, 2)], [(2.0, 0.1, 9)]])
def test_a_history_that_has_lost_named_steps(history: list) -> None:
    """Whoever shortened it, the names say that more was taken."""
    run = keep_ledger(create_accountant("rdp"))
    for _ in range(4):
        run.step(noise_multiplier=1.0, sample_rate=0.1)
    state = {**run.state_dict(), "history": history}
    del state["fastclip_digest"]
    other = keep_ledger(create_accountant("rdp"))
    other.load_state_dict(state)
    found = Counter({(sigma, rate): steps for sigma, rate, steps in other.history})
    assert found[1.0, 0.1] >= 4
    assert sum(found.values()) == 4 + sum(steps for *_, steps in history)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_with_its_parents_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of its own, where both are process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run = keep_ledger(create_accountant("rdp"))
    run.step(noise_multiplier=1.0, sample_rate=0.1)
    source, target = os.pipe()
    child = os.fork()
    if not child:
        run.step(noise_multiplier=1.0, sample_rate=0.1)
        os.write(target, json.dumps(run.state_dict()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    run.step(noise_multiplier=1.0, sample_rate=0.1)
    run.load_state_dict(json.loads(os.read(source, 10_000)))
    assert run.history == [(1.0, 0.1, 3)]

"""Ledgers are joined as unions: no step is forgotten, none that is known by name counts twice."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random

import pytest
from opacus.accountants import IAccountant, RDPAccountant, create_accountant

from fastclip.accounting.ledger import keep_ledger
from fastclip.core.opacus_names import to_load
from tests.refusal import refused

A, B = (1.0, 0.1), (2.0, 0.1)


def ledger(mechanism: str = "rdp"):
    return keep_ledger(create_accountant(mechanism))


def walk(accountant: IAccountant, steps: int, mechanism: tuple[float, float] = A):
    for _ in range(steps):
        accountant.step(noise_multiplier=mechanism[0], sample_rate=mechanism[1])
    return accountant


def taken(accountant: IAccountant) -> int:
    return sum(steps for _, _, steps in accountant.history)


def resumed(state: dict, steps: int):
    """Another engine's accountant that goes on from a checkpoint."""
    other = ledger()
    other.load_state_dict(json.loads(json.dumps(state)))
    return walk(other, steps)


def test_it_is_still_opacus_accountant() -> None:
    plain, ours = walk(RDPAccountant(), 5), walk(ledger(), 5)
    assert isinstance(ours, RDPAccountant)
    assert keep_ledger(ours) is ours
    assert ours.history == plain.history == [(*A, 5)]
    assert ours.get_epsilon(1e-3) == plain.get_epsilon(1e-3)
    plain.load_state_dict(to_load(plain, ours.state_dict()))
    assert plain.history == ours.history


def test_the_number_of_steps_is_known_after_every_change() -> None:
    """Steps, a checkpoint, a join, a copy, and a history that was assigned, cut or cleared by hand."""
    ours = ledger()
    assert ours.total == 0
    walk(walk(ours, 3), 2, B)
    assert ours.total == 5
    ours.load_state_dict(walk(ledger(), 4).state_dict())
    assert ours.total == taken(ours) == 9
    ours.join({"another": [(*B, 2)]}, ours.protected)
    assert ours.total == taken(ours) == 11
    twin = pickle.loads(pickle.dumps(ours))
    assert walk(twin, 1).total == taken(twin) == 12
    assert walk(copy.copy(ours), 1).total == 12
    assert ours.total == 11
    for history in ([(*A, 50)], [(*A, 49), (*B, 1)], [(*A, 49)], []):
        ours.history = list(history)
        ours.check_cuts()
        assert ours.total == taken(ours) == sum(steps for *_, steps in history)
        assert walk(ours, 1, B).total == taken(ours)


def test_two_forks_with_equal_noise_and_rate_count_both() -> None:
    trunk = walk(ledger(), 4).state_dict()
    left, right = resumed(trunk, 3), resumed(trunk, 3)
    left.load_state_dict(right.state_dict())
    assert left.history == [(*A, 4 + 3 + 3)]
    left.load_state_dict(right.state_dict())
    left.load_state_dict(trunk)
    assert left.history == [(*A, 10)]


def test_the_order_of_joining_does_not_matter() -> None:
    trunk = walk(ledger(), 2).state_dict()
    branches = [resumed(trunk, n) for n in (1, 2, 3)]
    branches.append(resumed(branches[1].state_dict(), 5))
    states = [branch.state_dict() for branch in branches]
    for seed in range(5):
        random.Random(seed).shuffle(states)
        joined = ledger()
        for state in states:
            joined.load_state_dict(state)
        assert joined.history == [(*A, 2 + 1 + 2 + 3 + 5)]


def test_a_run_that_is_set_back_keeps_its_steps() -> None:
    """Results of the steps since the checkpoint have been seen."""
    run = walk(ledger(), 4)
    saved = run.state_dict()
    walk(run, 4)
    run.load_state_dict(saved)
    assert run.history == [(*A, 8)]
    walk(run, 4)
    later = run.state_dict()
    run.load_state_dict(saved)
    run.load_state_dict(later)
    assert run.history == [(*A, 12)]
    assert resumed(later, 0).history == [(*A, 12)]


@pytest.mark.parametrize(
    ("own", "saved", "merged"),
    [
        ([], [(*A, 3)], [(*A, 3)]),
        ([(*A, 3)], [], [(*A, 3)]),
        ([(*A, 5)], [(*A, 3)], [(*A, 8)]),
        ([(*A, 3)], [(*A, 2), (*A, 3)], [(*A, 8)]),
        ([(*A, 3)], [(*B, 2)], [(*A, 3), (*B, 2)]),
    ],
)
def test_a_history_without_names_is_added(own: list, saved: list, merged: list) -> None:
    """A checkpoint of plain Opacus: whose steps they are is not known."""
    accountant = ledger()
    accountant.history = list(own)
    accountant.load_state_dict({"history": saved, "mechanism": "rdp"})
    assert accountant.history == merged


def test_names_that_do_not_fit_their_history_are_not_believed() -> None:
    run = walk(ledger(), 4)
    state = run.state_dict() | {"history": [(*A, 9)]}
    with pytest.raises(ValueError, match="its digest belongs to other steps"):
        run.load_state_dict(state)
    assert run.history == [(*A, 4)]
    del state["fastclip_digest"]  # as it was saved before there was one
    run.load_state_dict(state)
    assert run.history == [(*A, 13)]


def test_a_name_with_two_stories_is_two_runs() -> None:
    run = walk(ledger(), 4)
    (name,) = run.state_dict()["segments"]
    run.load_state_dict(
        {"mechanism": "rdp", "history": [(*B, 2)], "segments": {name: [(*B, 2)]}}
    )  # fmt: skip
    assert sorted(run.history) == [(*A, 4), (*B, 2)]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))]
)
def test_a_copy_is_a_fork(copied) -> None:
    run = walk(ledger(), 4)
    twin = copied(run)
    walk(run, 3)
    walk(twin, 3)
    assert taken(run) == taken(twin) == 7
    run.load_state_dict(twin.state_dict())
    assert taken(run) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_process_is_a_fork() -> None:
    run = walk(ledger(), 4)
    source, target = os.pipe()
    child = os.fork()
    if not child:
        os.write(target, json.dumps(walk(run, 3).state_dict()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    walk(run, 3).load_state_dict(json.loads(os.read(source, 10_000)))
    assert taken(run) == 10


def test_a_history_that_is_assigned_is_who_assigns_it() -> None:
    """As who captures a step by hand takes it back."""
    run = walk(ledger(), 3)
    before = list(run.history)
    walk(run, 1)
    run.history = before
    walk(run, 2)
    assert resumed(run.state_dict(), 0).history == [(*A, 5)]
    loaded = resumed(run.state_dict(), 1)
    loaded.history = [(*B, 1)]
    assert loaded.state_dict()["history"] == [(*B, 1)]
    loaded.load_state_dict(run.state_dict())
    assert sorted(loaded.history) == [(*A, 5), (*B, 1)]


class Broken(RDPAccountant):
    """Writes half of a step and fails."""

    def step(self, **values) -> None:
        super().step(**values)
        if values["noise_multiplier"] == B[0]:
            raise MemoryError


@pytest.mark.parametrize("held", [[], [(*A, 2)], [(*A, 2), (*B, 3)]])
def test_a_step_that_fails_leaves_no_trace(held: list) -> None:
    run = keep_ledger(Broken())
    run.history = list(held)
    with pytest.raises(MemoryError):
        walk(run, 1, B)
    assert run.history == held
    assert taken(walk(run, 1)) == sum(steps for *_, steps in held) + 1


class Copied(list):
    """A history that is not copied while it is closed."""

    closed = False

    def __iter__(self):
        assert not self.closed, "all of the history was copied"
        return super().__iter__()


def test_a_step_copies_no_history() -> None:
    run = ledger()
    run.history = Copied((1.0 + step, 0.1, 1) for step in range(50))
    walk(run, 1, A)  # looks at what was assigned
    run.history.closed = True
    walk(walk(run, 2, A), 1, B)
    assert len(run.history) == 52


def test_an_accountant_of_ones_own_keeps_what_it_keeps() -> None:
    class Own(RDPAccountant):
        note = ""

        def state_dict(self, destination=None):
            return {**super().state_dict(destination), "note": self.note}

        def load_state_dict(self, state_dict) -> None:
            super().load_state_dict(state_dict)
            self.note = state_dict["note"]

    mine, other = keep_ledger(Own()), keep_ledger(Own())
    walk(mine, 2).note = "kept"
    walk(other, 3).load_state_dict(mine.state_dict())
    assert (other.note, other.history) == ("kept", [(*A, 5)])
    state = walk(mine, 1).state_dict()
    del state["note"]
    with pytest.raises(KeyError):
        other.load_state_dict(state)
    assert (other.note, other.history) == ("kept", [(*A, 5)])


@pytest.mark.parametrize(
    ("saved", "way_out"),
    [
        (None, "another checkpoint"),
        ({}, "another checkpoint"),
        ({"mechanism": "rdp"}, "another checkpoint"),
        ({"mechanism": "rdp", "history": [[1.0]]}, "another checkpoint"),
        ({"mechanism": "rdp", "history": [], "segments": 3}, "another checkpoint"),
        ({"mechanism": "prv", "history": []}, "accountant='prv'"),
    ],
)
def test_a_damaged_history_changes_nothing(saved, way_out: str) -> None:
    accountant = walk(ledger(), 3)
    with refused(way_out):
        accountant.load_state_dict(saved)
    assert accountant.history == [(*A, 3)]


@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_gdp_composes_one_mechanism_only() -> None:
    accountant = walk(ledger("gdp"), 3)
    with refused("accountant='prv' or 'rdp'"):
        accountant.load_state_dict({"history": [(*B, 2)], "mechanism": "gdp"})
    with pytest.raises(ValueError, match="constant"):
        walk(accountant, 1, B)
    assert accountant.history == [(*A, 3)]
    accountant.load_state_dict({"history": [(*A, 2)], "mechanism": "gdp"})
    assert accountant.history == [(*A, 5)]

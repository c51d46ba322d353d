"""What has changed since it was read."""

from __future__ import annotations

import math
from typing import Any

import torch

from fastclip.core.snapshot import Facts, Snapshot, fact, which
from fastclip.errors import StepError
from tests.refusal import refused


def test_names_of_what_has_changed() -> None:
    held: dict[str, Any] = {"a": 1, "b": [1], "c": None}
    snapshot = Snapshot([Facts([*held], held.values, which), fact("size", lambda: len(held))])
    assert snapshot.stands()
    assert not snapshot.changed()
    held["b"] = [1]
    held["d"] = 2
    assert not snapshot.stands()
    assert snapshot.changed() == ["a", "b", "c", "size"]  # a column of another length, as a whole
    del held["d"]
    assert snapshot.changed() == ["b"]
    snapshot = Snapshot([Facts([*held], held.values, which)])
    assert not snapshot.changed()


def test_other_objects_that_are_worth_as_much() -> None:
    """A number that is computed anew is the same one; of another type it is not."""
    held: list[Any] = [1e9, "ab", math.inf]
    snapshot = Snapshot([Facts("abc", lambda: held, which)])
    held[0], held[1] = float("1e9"), "".join("ab")
    assert not snapshot.stands()
    assert not snapshot.changed()
    held[0] = 10**9
    assert snapshot.changed() == ["a"]


def test_tensors_are_told_apart_and_not_compared() -> None:
    held = [torch.ones(2), 1.0]
    snapshot = Snapshot([Facts("xy", lambda: held, which)])
    held[:] = [torch.ones(2), torch.ones(2)]
    assert snapshot.changed() == ["x", "y"]


def test_what_cannot_be_read_any_more_has_changed() -> None:
    held = [1, 2]
    snapshot = Snapshot([Facts("xy", lambda: (held[i] for i in range(2)), which)])
    held.pop()
    assert snapshot.changed() == ["x", "y"]


def test_names_of_what_holds() -> None:
    held = {"a": True, "b": False}
    snapshot = Snapshot([Facts(None, lambda: (name for name, on in held.items() if on))])
    assert not snapshot.changed()
    held.update(a=False, b=True)
    assert sorted(snapshot.changed()) == ["a", "b"]
    assert snapshot.values() == {"a": ["a"]}


def test_a_refusal_names_them() -> None:
    held = dict.fromkeys("abcde", 0)
    snapshot = Snapshot([Facts([*held], held.values)])
    snapshot.require(StepError, "{names} changed")
    held["d"] = 1
    with refused("d changed", StepError):
        snapshot.require(StepError, "{names} changed")
    held.update(dict.fromkeys("abcde", 1))
    with refused("a, b, c, d, e changed", StepError):
        snapshot.require(StepError, "{names} changed")

"""Early stopping: what it says, and that all of it is paid for before the first evaluation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastclip import FastPrivacyEngine
from fastclip.counts import CountQuery, EarlyStopping, PublicData, worst_rate
from tests.counts.runs import APART, DELTA, SAME, accuracy
from tests.refusal import refused

PUBLIC = accuracy(PublicData("demo"), sigma=0.0)


def predictions(right: int) -> dict[str, Any]:
    """So many of 40 are correct."""
    return {"groups": torch.arange(40) % 2, "measures": {"correct": torch.arange(40) < right}}


def run(stopping: EarlyStopping, rights: list[int]) -> list[tuple[float, bool, bool]]:
    found = [stopping.evaluate(**predictions(right)) for right in rights]
    assert [seen.number for seen in found] == list(range(1, len(rights) + 1))
    return [(seen.value, seen.improved, seen.stop) for seen in found]


def test_patience_and_the_best() -> None:
    engine = FastPrivacyEngine()
    stopping = EarlyStopping(engine, PUBLIC, evaluations=10, patience=2)
    assert run(stopping, [20, 30, 28, 32, 31, 32]) == [
        (0.5, True, False), (0.75, True, False), (0.7, False, False), (0.8, True, False),
        (0.775, False, False), (0.8, False, True),
    ]  # fmt: skip
    assert (stopping.best, stopping.best_number, stopping.left) == (0.8, 4, 4)
    assert not engine.accountant.lines
    assert not engine.accountant.history


def test_it_stops_when_no_evaluation_is_left() -> None:
    stopping = EarlyStopping(FastPrivacyEngine(), PUBLIC, evaluations=2, patience=5)
    assert [stop for *_, stop in run(stopping, [20, 30])] == [False, True]
    with refused("paid for"):
        stopping.evaluate(**predictions(40))
    assert stopping.values == [0.5, 0.75]


def test_an_improvement_is_more_than_min_delta() -> None:
    stopping = EarlyStopping(FastPrivacyEngine(), PUBLIC, evaluations=9, patience=9, min_delta=0.06)
    assert [better for _, better, _ in run(stopping, [20, 22, 24, 38])] == [True, False, True, True]


@pytest.mark.parametrize("data", [APART, SAME])
def test_all_evaluations_are_paid_for_before_the_first(data: Any) -> None:
    engine = FastPrivacyEngine()
    stopping = EarlyStopping(engine, accuracy(data, sigma=8.0), evaluations=6, patience=1)
    spent = engine.privacy_by_data_set(DELTA)
    assert sum(line.releases for line in spent.lines) == 6
    while not stopping.evaluate(**predictions(20)).stop:
        pass
    assert stopping.left < 6
    assert engine.privacy_by_data_set(DELTA) == spent


def test_a_metric_of_ones_own() -> None:
    """The worst group; NaN is never an improvement."""
    stopping = EarlyStopping(
        FastPrivacyEngine(), PUBLIC, evaluations=9, patience=9, metric=worst_rate
    )
    groups = torch.tensor([0, 0, 1, 1])
    seen = stopping.evaluate(groups=groups, measures={"correct": [1, 1, 1, 0]})
    assert (seen.value, seen.improved) == (0.5, True)
    seen = stopping.evaluate(groups=groups * 0, measures={"correct": [1, 1, 1, 0]})
    assert math.isnan(seen.value)
    assert not seen.improved
    assert stopping.best == 0.5


def test_a_resumed_run_goes_on_with_what_it_pays_for_itself() -> None:
    stopping = EarlyStopping(FastPrivacyEngine(), PUBLIC, evaluations=3, patience=2)
    run(stopping, [20, 30])
    again = EarlyStopping(FastPrivacyEngine(), PUBLIC, evaluations=3, patience=2)
    again.load_state_dict(stopping.state_dict())
    assert (again.best, again.best_number, again.left) == (0.75, 2, 3)
    assert [again.evaluate(**predictions(29)).stop for _ in range(2)] == [False, True]
    assert again.values[:2] == stopping.values
    for wrong in ({}, {"values": [0.5], "best": 0.6, "best_number": 1}, {"values": None}):
        with refused("load_state_dict expects"):
            again.load_state_dict(wrong)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evaluations": 0}, "at least 1"),
        ({"patience": 0}, "at least 1"),
        ({"min_delta": -1.0}, ">= 0"),
        ({"query": CountQuery(APART, ("f", "m"), 1.0, "row")}, "Pass metric="),
        ({"query": accuracy(APART, disjoint=False)}, "Pass metric="),
    ],
)
def test_what_it_cannot_do_costs_nothing(options: dict[str, Any], text: str) -> None:
    engine = FastPrivacyEngine()
    given = {"query": accuracy(APART), "evaluations": 3, "patience": 2, **options}
    with refused(text):
        EarlyStopping(engine, **given)
    assert not engine.accountant.lines

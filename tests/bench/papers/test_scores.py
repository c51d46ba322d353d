"""Scores of runs against numbers worked out by hand."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from bench.papers.scores import accuracy, final, inequality, loss_gap, worst_accuracy
from tests.bench.papers.results import run
from tests.refusal import refused

TABULAR = {
    ("all", "all", "accuracy"): 0.8,
    ("sex", "female", "accuracy"): 0.9,
    ("sex", "male", "accuracy"): 0.75,
    ("sex", "female", "loss_mean"): 30.0,
    ("sex", "male", "loss_mean"): 50.0,
    ("age", "below 38", "accuracy"): 0.7,
    ("age", "38 and above", "accuracy"): 0.85,
    ("age", "below 38", "loss_mean"): 44.0,
    ("age", "38 and above", "loss_mean"): 36.0,
    ("class", "0", "accuracy"): 0.1,
    ("class", "1", "accuracy"): 0.99,
    ("class", "0", "loss_mean"): 79.0,
    ("class", "1", "loss_mean"): 1.0,
    ("all", "all", "worst_class_accuracy"): 0.1,
}
"""Two classes: they are labels, not groups."""
PICTURES = {
    ("all", "all", "accuracy"): 0.9,
    ("class", "0", "accuracy"): 0.95,
    ("class", "1", "accuracy"): 0.9,
    ("class", "8", "accuracy"): 0.3,
    ("class", "0", "loss_mean"): 5.0,
    ("class", "1", "loss_mean"): 7.0,
    ("class", "8", "loss_mean"): 90.0,
    ("all", "all", "worst_class_accuracy"): 0.3,
}


def score(function, *runs: pd.DataFrame) -> dict[tuple[str, int], float]:
    return function(final(pd.concat(runs))).to_dict()


@pytest.mark.parametrize(
    ("function", "numbers", "expected"),
    [
        (loss_gap, TABULAR, (20 + 8) / 2),
        (loss_gap, PICTURES, 85),
        (worst_accuracy, TABULAR, 0.7),
        (worst_accuracy, PICTURES, 0.3),
        (accuracy, TABULAR, 0.8),
        (accuracy, PICTURES, 0.9),
    ],
)
def test_score(function, numbers, expected):
    found = score(function, run("dp_sgd", 3, numbers))
    assert found == {("dp_sgd", 3): pytest.approx(expected)}


def test_rows_of_unknown_group_are_no_group():
    odd = {
        ("sex", "unknown", "loss_mean"): 0.5,
        ("sex", "unknown", "accuracy"): 0.0,
        **TABULAR,
    }
    assert score(loss_gap, run("dp_sgd", 0, odd)) == {("dp_sgd", 0): pytest.approx(14)}
    assert score(worst_accuracy, run("dp_sgd", 0, odd)) == {("dp_sgd", 0): pytest.approx(0.7)}


def test_a_group_without_rows_leaves_its_attribute_out():
    empty = TABULAR | {
        ("sex", "male", "loss_mean"): math.nan,
        ("sex", "male", "accuracy"): math.nan,
    }
    assert score(loss_gap, run("dp_sgd", 0, empty)) == {("dp_sgd", 0): pytest.approx(8)}
    assert score(worst_accuracy, run("dp_sgd", 0, empty)) == {("dp_sgd", 0): pytest.approx(0.7)}


def test_inequality_is_of_costs_and_not_of_accuracies():
    """Costs by sex 0.10 and 0.02, by age 0.05 and 0.04, though all are equally accurate."""
    base = {
        ("sex", "female", "accuracy"): 0.90,
        ("sex", "male", "accuracy"): 0.82,
        ("age", "old", "accuracy"): 0.85,
        ("age", "young", "accuracy"): 0.84,
    }
    private = dict.fromkeys(base, 0.80)
    other = {key: value + 0.05 for key, value in base.items()}  # another seed, another cost
    found = score(
        inequality,
        run("dp_sgd", 1, private),
        run("non_private", 0, other | {("sex", "male", "accuracy"): 0.5}, epsilon=None),
        run("non_private", 1, base, epsilon=None),
    )
    assert found["dp_sgd", 1] == pytest.approx(0.08)


def test_inequality_without_a_run_of_the_seed_is_unknown():
    found = score(
        inequality, run("dp_sgd", 1, TABULAR), run("non_private", 0, TABULAR, epsilon=None)
    )
    assert math.isnan(found["dp_sgd", 1])


def test_without_groups_there_is_no_score_of_them():
    frame = final(run("dp_sgd", 0, {("all", "all", "accuracy"): 0.5}))
    assert loss_gap(frame).dropna().empty
    assert worst_accuracy(frame).dropna().empty
    assert accuracy(frame).to_dict() == {("dp_sgd", 0): 0.5}


def test_final_is_the_last_step_of_each_run_and_of_the_part():
    number = {("all", "all", "accuracy"): 0.1}
    frame = pd.concat(
        [
            run("dp_sgd", 0, number, step=10),
            run("dp_sgd", 0, {("all", "all", "accuracy"): 0.2}, step=20),
            run("dp_sgd", 0, {("all", "all", "accuracy"): 0.9}, step=20, part="train"),
            run("dp_sgd", 1, {("all", "all", "accuracy"): 0.3}, step=15),
            run("non_private", 0, {("all", "all", "accuracy"): 0.4}, step=5, epsilon=None),
            run("non_private", 0, {("all", "all", "accuracy"): 0.5}, step=6, epsilon=None),
        ]
    )
    assert final(frame).value.tolist() == [0.2, 0.3, 0.5]
    assert final(frame, part="train").value.tolist() == [0.9]


def test_final_refuses_two_runs_in_one():
    one = run("dp_sgd", 0, {("all", "all", "accuracy"): 0.1})
    with refused("one value of a number at its last step; two of .*strategy dp_sgd.*seed 0"):
        final(pd.concat([one, one]))


def test_final_refuses_a_missing_column():
    with refused("results need columns experiment.*; seed, step missing"):
        final(run("dp_sgd", 0, TABULAR).drop(columns=["seed", "step"]))

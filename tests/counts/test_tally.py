"""Exact counts: what one unit contributes, against a loop over units, and at most the sensitivity."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest
import torch

from fastclip.counts import CountQuery, PublicData
from fastclip.counts.query import GRID, MOST, MOST_PER_GROUP, tally
from tests.refusal import refused

PUBLIC = PublicData("demo")
NAMES = ("a", "b", "c")


def query(unit: str, **options: Any) -> CountQuery:
    return CountQuery(PUBLIC, NAMES, 0, unit, **{"measures": ("correct", "rows"), **options})


def one_unit(asked: CountQuery, rows: list[tuple[set[int], int]]) -> list[list[Fraction]]:
    """What a unit of these rows contributes: each is (its groups, whether it is correct)."""
    held = Counter(g for groups, _ in rows for g in groups)
    kept = sorted(held, key=lambda g: (-held[g], g))[: asked.groups_per_unit]
    found = [[Fraction(0)] * 2 for _ in NAMES]
    for g in kept:
        weight = min(Fraction(1), Fraction(asked.per_group, held[g]))
        right = sum(correct for groups, correct in rows if g in groups)
        exact = right * weight, held[g] * weight
        found[g] = [Fraction(floor(x * GRID), GRID) for x in exact]
    return found


QUERIES = [
    query("row"),
    query("row", disjoint=False),
    query("row", disjoint=False, groups_per_unit=2),
    query("unit"),
    query("unit", per_group=2),
    query("unit", groups_per_unit=1),
    query("unit", per_group=3, groups_per_unit=2),
    query("unit", disjoint=False, per_group=2),
    query("unit", disjoint=False, groups_per_unit=2),
]


class Data:
    """Rows of a few units, as a query takes them."""

    def __init__(self, asked: CountQuery, seed: int, rows: int = 9) -> None:
        draw = np.random.default_rng(seed)
        self.query = asked
        self.member = draw.random((rows, 3)) < 0.6
        if asked.disjoint:
            self.member = np.eye(3, dtype=bool)[draw.integers(0, 3, rows)]
        self.correct = draw.random(rows) < 0.7
        self.ids = np.arange(rows) if asked.unit == "row" else draw.integers(0, 4, rows)

    def counts(self, without: int | None = None) -> np.ndarray:
        kept = self.ids != without
        groups = self.member[kept]
        found = tally(
            self.query, groups.argmax(1) if self.query.disjoint else groups,
            {"correct": self.correct[kept]}, None if self.query.unit == "row" else self.ids[kept],
        )  # fmt: skip
        return found.numpy()

    def of(self, unit: int) -> list[tuple[set[int], int]]:
        places = np.flatnonzero(self.ids == unit)
        return [(set(np.flatnonzero(self.member[i])), int(self.correct[i])) for i in places]


@pytest.mark.parametrize("asked", QUERIES)
def test_counts_are_sums_of_bounded_contributions(asked: CountQuery) -> None:
    for seed in range(20):
        data = Data(asked, seed)
        expected = sum(
            (np.array(one_unit(asked, data.of(u))) for u in set(data.ids)), np.zeros((3, 2), object)
        )
        assert ([[Fraction(int(x), GRID) for x in row] for row in data.counts()] == expected).all()


@pytest.mark.parametrize("asked", QUERIES)
def test_one_unit_moves_counts_by_at_most_the_sensitivity(asked: CountQuery) -> None:
    """In integers: no rounding is allowed for."""
    most = round(asked.sensitivity**2) * GRID**2
    assert most == asked.per_group**2 * asked.groups_per_unit * 2 * GRID**2  # type: ignore[operator]
    for seed in range(60):
        data = Data(asked, seed)
        for unit in set(data.ids):
            moved = (data.counts() - data.counts(without=unit)).astype(object)
            assert (moved**2).sum() <= most


@pytest.mark.parametrize("asked", QUERIES)
def test_the_sensitivity_is_attained(asked: CountQuery) -> None:
    """By a unit of many correct rows in every group."""
    copies = 1 if asked.unit == "row" else 5
    if asked.disjoint:
        groups = np.repeat(np.arange(1 if asked.unit == "row" else 3), copies)
    else:
        groups = np.ones((copies, 3), dtype=bool)
    ids = None if asked.unit == "row" else ["p"] * len(groups)
    found = tally(asked, groups, {"correct": np.ones(len(groups))}, ids).numpy().astype(object)
    assert (found**2).sum() == round(asked.sensitivity**2) * GRID**2


def test_a_unit_in_too_many_groups_counts_where_it_has_most_rows() -> None:
    asked = query("unit", groups_per_unit=1)
    found = tally(asked, [2, 1, 2, 0], {"correct": [1, 1, 0, 1]}, ["p", "p", "p", "q"])
    assert (found / GRID).tolist() == [[1, 1], [0, 0], [0.5, 1]]


def test_intersections_of_attributes_add_up() -> None:
    """Women, and women over 80: a sample of both counts in both, and both are paid for."""
    asked = CountQuery(PUBLIC, ("women", "women over 80"), 0, "row", disjoint=False)
    assert asked.sensitivity == pytest.approx(2**0.5)
    women, old = torch.tensor([1, 1, 0, 1]) == 1, torch.tensor([1, 0, 1, 1]) == 1
    found = tally(asked, torch.stack([women, women & old], 1), {}, None)
    assert (found / GRID).tolist() == [[3], [2]]


@pytest.mark.parametrize("kind", [list, np.asarray, torch.as_tensor])
def test_no_rows_and_kinds_of_arrays(kind: Any) -> None:
    assert tally(query("row"), kind([]), {"correct": kind([])}, None).tolist() == [[0, 0]] * 3
    found = tally(query("row"), kind([0, 2]), {"correct": kind([1.0, 0.0])}, None)
    assert (found / GRID).tolist() == [[1, 1], [0, 0], [0, 1]]


ROWS, RIGHT = [0, 1, 2], [1, 0, 1]
WRONG: list[tuple[str, CountQuery, Any, Any, Any, str]] = [
    ("nan", query("row"), ROWS, {"correct": [1.0, float("nan"), 0.0]}, None, "0 or 1"),
    ("negative", query("row"), ROWS, {"correct": [1, -1, 0]}, None, "0 or 1"),
    ("half", query("row"), ROWS, {"correct": [1, 0.5, 0]}, None, "0 or 1"),
    ("short", query("row"), ROWS, {"correct": [1, 0]}, None, "each of 3 samples"),
    ("square", query("row"), ROWS, {"correct": [RIGHT] * 3}, None, "each of 3 samples"),
    ("missing", query("row"), ROWS, {}, None, "values of \\['correct'\\]"),
    ("unknown", query("row"), ROWS, {"correct": RIGHT, "x": RIGHT}, None, "values of"),
    ("rows given", query("row"), ROWS, {"correct": RIGHT, "rows": RIGHT}, None, "values of"),
    ("group -1", query("row"), [0, -1, 2], {"correct": RIGHT}, None, "from 0 to 2"),
    ("group 3", query("row"), [0, 3, 2], {"correct": RIGHT}, None, "from 0 to 2"),
    ("masks", query("row"), np.ones((3, 3)), {"correct": RIGHT}, None, "\\[samples\\]"),
    ("labels", query("row", disjoint=False), ROWS, {"correct": RIGHT}, None, "\\[samples, 3\\]"),
    ("mask of 2", query("row", disjoint=False), [[1, 0, 2]] * 3, {"correct": RIGHT}, None, "0 or 1"),
    ("no ids", query("unit"), ROWS, {"correct": RIGHT}, None, "Pass unit_ids"),
    ("ids of rows", query("row"), ROWS, {"correct": RIGHT}, [1, 1, 2], "unit='unit'"),
    ("few ids", query("unit"), ROWS, {"correct": RIGHT}, [1, 1], r"\(3\), got 2"),
    ("missing id", query("unit"), ROWS, {"correct": RIGHT}, ["p", None, "q"], "got none"),
    ("mixed ids", query("unit"), ROWS, {"correct": RIGHT}, ["1", 1, "q"], "strings and numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "groups", "measures", "ids", "text"), [w[1:] for w in WRONG],
                         ids=[w[0] for w in WRONG])  # fmt: skip
def test_other_input_is_an_error(
    asked: Any, groups: Any, measures: Any, ids: Any, text: str
) -> None:
    with refused(text):
        tally(asked, groups, measures, ids)


def test_groups_of_floats_and_strings_are_errors() -> None:
    for groups in ([0.0, 1.0, 2.0], ["a", "b", "c"], [[0], [1, 2], [2]]):
        with pytest.raises(TypeError):
            tally(query("row"), groups, {"correct": RIGHT}, None)


def test_bounds_of_the_arithmetic() -> None:
    """The largest share of the largest unit stays below 2^63 (see MOST and MOST_PER_GROUP)."""
    assert MOST * MOST_PER_GROUP * GRID < 2**63

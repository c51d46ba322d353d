"""What a query must say, and what it says of itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastclip.counts import TRAINING_SET, CountQuery, PrivateData, PublicData, accuracy_query
from fastclip.errors import ArgumentError
from tests.refusal import refused

GIVEN: dict[str, Any] = {
    "data": PrivateData("validation", overlap=()), "groups": ("a", "b", "c"), "noise_multiplier": 2.0,
    "unit": "row",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.0),
        ({"measures": ("correct", "rows")}, math.sqrt(2)),
        ({"disjoint": False}, math.sqrt(3)),
        ({"disjoint": False, "groups_per_unit": 2}, math.sqrt(2)),
        ({"unit": "unit"}, math.sqrt(3)),
        ({"unit": "unit", "groups_per_unit": 1}, 1.0),
        ({"unit": "unit", "groups_per_unit": 9}, math.sqrt(3)),
        ({"unit": "unit", "per_group": 4, "groups_per_unit": 1}, 4.0),
        ({"unit": "unit", "per_group": 4, "measures": ("correct", "rows")}, 4 * math.sqrt(6)),
    ],
)
def test_sensitivity_in_closed_form(options: dict[str, Any], expected: float) -> None:
    query = CountQuery(**{**GIVEN, **options})
    assert query.sensitivity == pytest.approx(expected, rel=1e-15)
    assert query.std == 2.0 * query.sensitivity


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unit": None}, "unit expects 'row'"),
        ({"unit": "patient"}, "unit expects 'row'"),
        ({"groups": ("a", "a")}, "different names"),
        ({"measures": (1, 2)}, "all strings"),
        ({"noise_multiplier": 0}, "need noise"),
        ({"noise_multiplier": -1.0}, ">= 0"),
        ({"noise_multiplier": float("nan")}, ">= 0"),
        ({"noise_multiplier": float("inf")}, "finite"),
        ({"noise_multiplier": 1e7}, "at most 1e6"),
        ({"per_group": 2}, "at most 1 for unit='row'"),
        ({"per_group": 0}, "at least 1"),
        ({"unit": "unit", "per_group": 5000}, "at most 1024"),
        ({"groups_per_unit": 0}, "at least 1"),
        ({"data": PublicData("demo")}, "Pass 0"),
    ],
)
def test_a_query_that_is_not_said_is_an_error(options: dict[str, Any], text: str) -> None:
    with refused(text):
        CountQuery(**{**GIVEN, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"data": "validation"},
        {"groups": "abc"},
        {"groups": ()},
        {"per_group": 1.5},
        {"disjoint": 1},
    ],
)
def test_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        CountQuery(**{**GIVEN, **options})


def test_an_overlap_that_is_not_known_is_an_error() -> None:
    with refused(r"overlap=\(\) .* overlap='training'", ArgumentError):
        PrivateData("validation")
    assert PrivateData("validation", "training") == PrivateData("validation", ("training",))


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, 3, "training"])
def test_names_of_data_sets(name: Any) -> None:
    with refused("name"):
        PrivateData(name, overlap=())


def test_an_accuracy_query_pays_for_both_of_its_counts() -> None:
    query = accuracy_query(TRAINING_SET, ("f", "m"), 3.0, "unit", groups_per_unit=1)
    assert query.measures == ("correct", "rows")
    assert query.sensitivity == pytest.approx(math.sqrt(2))
    assert hash(query) == hash(
        accuracy_query(TRAINING_SET, ["f", "m"], 3, "unit", groups_per_unit=1)
    )

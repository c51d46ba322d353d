"""Random networks: no coupling is accepted, and few errors are needless."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.trace.apart import APART
from tests.trace.coupled import COUPLED
from tests.trace.fuzz import Recipe, is_needless, is_wrong, outcome, recipe

SHARE = 25
MENDED = (3001687, 3004849, 20038, 20137, 20561, 20719, 20983)
"""Networks of which the trace said what is wrong, once."""
NEEDLESS = {"every row"}
"""Steps that end in an error without need: rows that are written in place, one after the other."""


@pytest.mark.one_in(12)
@pytest.mark.parametrize("first", range(0, 600, SHARE))
def test_networks(first: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(first, first + SHARE):
        one = recipe(seed)
        truth, verdict, found = outcome(one)
        assert not is_wrong(truth, verdict), (one, found and found.report)
        tally[verdict] += 1
        if not NEEDLESS & set(one.names):
            tally["needless"] += is_needless(truth, verdict)
    assert tally["needless"] <= 2, tally
    assert tally["coupled"] > SHARE // 4
    assert tally["proven"] + tally["values"] > SHARE // 4


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", sorted(set(APART) - NEEDLESS))
def test_apart(name: str) -> None:
    truth, verdict, found = outcome(Recipe(1, [name]))
    assert truth == "apart"
    assert verdict in ("proven", "values", "path"), found and found.report


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    truth, verdict, found = outcome(Recipe(1, [f"!{name}"], "sum", name))
    assert truth in ("coupled", "unclear")
    assert verdict in ("coupled", "path"), found and found.report


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", MENDED)
def test_what_once_failed(seed: int) -> None:
    truth, verdict, found = outcome(recipe(seed))
    assert not is_wrong(truth, verdict), found and found.report
    assert not is_needless(truth, verdict), found and found.report

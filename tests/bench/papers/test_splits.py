"""Draws of parts: their sizes, strata and units, and what is written of them."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from bench.papers.data.splits import drawn, fingerprint, shares_of, split, with_fewer
from tests.refusal import refused

ROWS = np.arange(1_000)


def test_shares() -> None:
    assert shares_of(0.2) == {"train": 0.8, "test": 0.2}
    assert shares_of(0.2, 0.1) == pytest.approx({"train": 0.7, "validation": 0.1, "test": 0.2})


@pytest.mark.parametrize("validation", [-0.1, 0.8, 1.0, float("nan")])
def test_shares_that_leave_nothing_to_train_on(validation: float) -> None:
    with refused("expected at least 0 and below 0.8"):
        shares_of(0.2, validation)


def test_each_part_has_its_share_of_each_stratum() -> None:
    strata = np.repeat([0, 1, 2], [700, 200, 100])
    parts = split(ROWS, shares_of(0.2, 0.1), seed=0, strata=strata)
    counts = {name: np.bincount(strata[rows]).tolist() for name, rows in parts.items()}
    assert counts == {"train": [490, 140, 70], "validation": [70, 20, 10], "test": [140, 40, 20]}
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), ROWS)


def test_units_stay_together() -> None:
    units = np.random.RandomState(0).randint(0, 300, 1_000)
    parts = split(ROWS, shares_of(0.2, 0.1), seed=0, strata=units % 3, units=units)
    of_part = [set(units[rows]) for rows in parts.values()]
    assert sum(map(len, of_part)) == len(set(units)) == len(set.union(*of_part))
    assert sum(map(len, parts.values())) == 1_000


def test_numbers_of_rows_are_kept() -> None:
    some = np.array([3, 5, 8, 13, 21])
    parts = split(some, {"train": 0.6, "test": 0.4}, seed=0)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == some.tolist()
    assert len(parts["train"]) == 3


@pytest.mark.parametrize(("kept", "left"), [(0.1, 10), (0.0, 0), (1.0, 100), (7, 7), (0, 0)])
def test_a_class_with_fewer_rows(kept: float, left: int) -> None:
    classes = np.arange(1_000) % 10
    rows = with_fewer(ROWS, classes, 8, kept, seed=0)
    assert np.bincount(classes[rows], minlength=10).tolist() == [100] * 8 + [left, 100]
    assert np.array_equal(rows, np.unique(rows))


@pytest.mark.parametrize("kept", [-1, -0.1, 101, 1.1])
def test_more_rows_than_there_are(kept: float) -> None:
    with refused(r"a share from 0\.0 to 1\.0, or a number up to the 100 training rows"):
        with_fewer(ROWS, np.arange(1_000) % 10, 8, kept, seed=0)


def test_draws_and_fingerprints_never_change() -> None:
    assert drawn(np.arange(10), 3, seed=0).tolist() == [2, 4, 8]
    packed = struct.pack("<3q", 2, 4, 8)
    assert fingerprint(np.array([8, 2, 4])) == hashlib.sha256(packed).hexdigest()

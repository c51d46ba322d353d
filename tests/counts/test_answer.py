"""Rates of noisy counts, and their intervals: against Wilson's, and by how often they hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from fastclip.counts import NoisyCounts, PrivateData, PublicData, accuracy_query
from tests.refusal import refused


def answer(counts: Any, std: float = 0.0, **options: Any) -> NoisyCounts:
    data = PrivateData("validation", overlap=()) if std else PublicData("demo")
    names = [f"group {k}" for k in range(len(counts))]
    query = accuracy_query(data, names, 1.0 if std else 0.0, "row", **options)
    return NoisyCounts(query, torch.tensor(counts, dtype=torch.float64), std)


@pytest.mark.parametrize(("right", "rows"), [(7, 10), (0, 10), (10, 10), (1, 2), (431, 500)])
def test_without_noise_the_interval_is_wilsons(right: int, rows: int) -> None:
    found = answer([[right, rows]]).rates(level=0.9)["group 0"]
    expected = binomtest(right, rows).proportion_ci(0.9, method="wilson")
    assert found == pytest.approx((right / rows, expected.low, expected.high), abs=1e-12)


def test_of_the_data_set_itself_there_is_no_doubt_without_noise() -> None:
    found = answer([[7, 10]]).rates(sampling=False)["group 0"]
    assert found == pytest.approx((0.7, 0.7, 0.7), abs=1e-12)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize(("rows", "std"), [(400, 10.0), (30, 10.0)])
def test_intervals_hold_as_often_as_they_say(sampling: bool, rows: int, std: float) -> None:
    """Fieller's is exact for the noise; with sampling the share is that of a normal approximation.

    4000 intervals at 90 %: the share that holds is within 5 standard deviations (2.4 %) of it, or above
    it where the interval meets the ends of [0, 1]; and with sampling within 1 % more.
    """
    draw, rate, many = np.random.default_rng(0), 0.8, 4000
    right = draw.binomial(rows, rate, many) if sampling else np.full(many, int(rate * rows))
    noisy = np.stack([right, np.full(many, rows)], 1) + draw.normal(0, std, (many, 2))
    found = answer(noisy.tolist(), std).rates(level=0.9, sampling=sampling).values()
    held = np.mean([low <= rate <= high for _, low, high in found])
    assert held == pytest.approx(0.9, abs=0.024 + 0.01 * sampling)


def test_counts_that_say_nothing() -> None:
    rates = answer([[3.0, 2.0], [5.0, -4.0], [1.0, 0.0]], std=20.0).rates()
    for name in ("group 0", "group 1", "group 2"):
        assert rates[name][1:] == (0.0, 1.0)
    assert math.isnan(rates["group 1"].value)
    assert math.isnan(rates["group 2"].value)


def test_noisy_counts_beyond_each_other_stay_in_the_unit_interval() -> None:
    found = answer([[104.0, 100.0]], std=2.0).rates()["group 0"]
    assert found.value == 1.0 == found.high
    assert 0.9 < found.low < 1.0


def test_the_overall_rate_has_the_noise_of_all_groups() -> None:
    given = answer([[80.0, 100.0], [120.0, 200.0]], std=3.0)
    assert given.total("rows") == (300.0, pytest.approx(3 * math.sqrt(2)))
    one = answer([[200.0, 300.0]], std=3 * math.sqrt(2)).rates()["group 0"]
    assert given.rate() == pytest.approx(one)
    with refused("count samples more than once|counts samples more than once"):
        answer([[1.0, 2.0]], disjoint=False).total()


def test_names() -> None:
    given = answer([[80.0, 100.0]], std=3.0)
    assert given.count("group 0", "correct") == 80.0
    for wrong in (
        lambda: given.count("group 7"),
        lambda: given.rates("right"),
        lambda: given.rate("x"),
    ):
        with refused("(group|measure) expects one of"):
            wrong()
    assert "noise of 3 on each" in str(given)
    assert given.as_json()["counts"] == [[80.0, 100.0]]

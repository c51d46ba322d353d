"""Gaps and paired tests beside worked numbers; what bootstrap intervals promise."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fastclip.errors import ArgumentError
from fastclip.fairness import (
    Paired,
    bonferroni,
    bootstrap_interval,
    disparity_reduction,
    gap,
    paired_wilcoxon,
    privacy_impact,
)

NAN = math.nan

# Gaps


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25, 1.0], 0.75),
        ([1.0, 0.25], 0.75),
        ([3.0, -1.0, 0.5], 4.0),
        ([0.5, NAN, 0.75], 0.25),
        ([0.5, NAN], NAN),
        ([0.5], NAN),
        ([], NAN),
        ([1, 1], 0.0),
    ],
)
def test_gap(values: list[float], expected: float) -> None:
    assert gap(values) == pytest.approx(expected, nan_ok=True)


def test_the_papers_disparity_reduction() -> None:
    """SoftAdaClip, Table 2 from Table 3: Income, simple network, C = 0.01, men and women summed."""
    ours, dp_sgd = 44.8026 + 37.4131, 376.6299 + 273.1533
    assert disparity_reduction(dp_sgd, ours) == pytest.approx(87.3, abs=0.05)


@pytest.mark.parametrize(
    ("baseline", "ours", "expected"), [(2.0, 1.0, 50), (2.0, 3.0, -50), (2.0, 2.0, 0), (4.0, 0.0, 100)]
)  # fmt: skip
def test_disparity_reduction(baseline: float, ours: float, expected: float) -> None:
    assert disparity_reduction(baseline, ours) == expected


@pytest.mark.parametrize("baseline", [0.0, -1.0, NAN])
def test_no_reduction_of_nothing(baseline: float) -> None:
    with pytest.raises(ArgumentError, match="baseline above 0"):
        disparity_reduction(baseline, 1.0)


def test_privacy_impact() -> None:
    private = {"a": 0.75, "b": 0.5, "c": 0.5, "d": NAN}
    plain = {"d": 0.5, "c": 0.75, "b": 1.0, "a": 0.5}
    found = privacy_impact(private, plain)
    assert list(found.by_group) == ["a", "b", "c", "d"]
    assert found.by_group == pytest.approx(
        {"a": 0.25, "b": -0.5, "c": -0.25, "d": NAN}, nan_ok=True
    )
    assert found.inequality == 0.75
    with pytest.raises(ArgumentError, match=r"the same groups twice, got \['a'\] and \['a', 'b'\]"):
        privacy_impact({"a": 1.0}, {"a": 1.0, "b": 1.0})


# Paired tests


def enumerated(difference: np.ndarray, alternative: str) -> float:
    """Of all signs of the differences, how many give a rank sum as extreme."""
    ranks = stats.rankdata(abs(difference))
    seen = ranks[difference > 0].sum()
    sums = np.array(
        [(ranks * np.array(s)).sum() for s in itertools.product((0, 1), repeat=len(ranks))]
    )
    less, greater = (sums <= seen + 1e-9).mean(), (sums >= seen - 1e-9).mean()
    return {"less": less, "greater": greater, "two-sided": min(1.0, 2 * min(less, greater))}[
        alternative
    ]


@pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", range(3))
def test_wilcoxon_is_exact(n: int, seed: int, alternative: str) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, n))
    found = paired_wilcoxon(a, b, alternative)
    assert found.p == pytest.approx(enumerated(a - b, alternative))
    assert found.pairs == n
    assert found.p >= found.least_p


@pytest.mark.parametrize("alternative", ["two-sided", "less"])
def test_wilcoxon_of_ties_is_exact(alternative: str) -> None:
    a = np.array([1.0, 2.0, 2.0, -2.0, 5.0, -1.0])
    assert paired_wilcoxon(a, 0 * a, alternative).p == pytest.approx(enumerated(a, alternative))


@pytest.mark.parametrize(
    ("a", "b", "alternative", "expected"),
    [
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], "two-sided", Paired(0.0625, 5, 0.0625)),
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], "less", Paired(0.03125, 5, 0.03125)),
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], "greater", Paired(1.0, 5, 0.03125)),
        ([1, 2, 3, 4, 5, 7, 7], [2, 4, 6, 8, 10, 7, NAN], "two-sided", Paired(0.0625, 5, 0.0625)),
        ([1, 2], [1, 2], "two-sided", Paired(1.0, 0, 1.0)),
    ],
)
def test_worked_pairs(a: Any, b: Any, alternative: str, expected: Paired) -> None:
    """Pairs that are equal, or of which one is not known, say nothing."""
    assert paired_wilcoxon(a, b, alternative) == expected


@pytest.mark.parametrize(("a", "b"), [([], []), ([NAN], [1.0])])
def test_no_pairs(a: list[float], b: list[float]) -> None:
    found = paired_wilcoxon(a, b)
    assert math.isnan(found.p)
    assert (found.pairs, found.least_p) == (0, 1.0)


def test_pairs_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expects pairs, got 2 and 1 values"):
        paired_wilcoxon([1, 2], [1])
    with pytest.raises(ArgumentError, match=r"alternative expects one of .*'both'"):
        paired_wilcoxon([1.0], [1.0], "both")


def test_bonferroni() -> None:
    assert bonferroni([]) == []
    assert bonferroni([0.01, 0.02, 0.5]) == pytest.approx([0.03, 0.06, 1.0])
    assert bonferroni([0.01, NAN, 0.5]) == pytest.approx([0.02, NAN, 1.0], nan_ok=True)


# Intervals


def test_intervals_cover_the_mean() -> None:
    """Of 400 samples of 25 normal values: at 95%, binomial within 5 standard deviations (5.4%).

    The bootstrap itself covers about 93.5% of means of 25 values.
    """
    samples = np.random.default_rng(0).normal(3.0, 2.0, (400, 25))
    found = [bootstrap_interval(values, resamples=499) for values in samples]
    covered = np.mean([low <= 3.0 <= high for low, high in found])
    assert abs(covered - 0.935) < 5 * math.sqrt(0.935 * 0.065 / 400)
    narrow = [bootstrap_interval(values, level=0.5, resamples=499) for values in samples]
    covered = np.mean([low <= 3.0 <= high for low, high in narrow])
    assert abs(covered - 0.5) < 5 * math.sqrt(0.25 / 400)


def test_intervals_repeat_themselves() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=0, resamples=99) != bootstrap_interval(
        values, seed=1, resamples=99
    )
    low, high = bootstrap_interval(values)
    assert 1.0 < low < np.mean(values) < high < 8.0


@pytest.mark.parametrize("values", [[], [1.0], [1.0, NAN], [1.0, math.inf, 2.0]])
def test_no_interval(values: list[float]) -> None:
    assert all(map(math.isnan, bootstrap_interval(values)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25] * 5, (0.25, 0.25)),
        ([1.0, 3.0], (1.0, 3.0)),
        ([1.0, 1.0, 1.0, 1.0 + 2**-52], (1.0, 1.0 + 2**-52)),
        ([0.0, 0.0, 0.0, 0.0, 1.0], (0.0, 1.0)),
    ],
)
def test_intervals_of_few_values(values: list[float], expected: tuple[float, float]) -> None:
    low, high = bootstrap_interval(values)
    assert expected[0] <= low <= high <= expected[1]

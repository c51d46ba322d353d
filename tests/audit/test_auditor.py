"""Bounds from scores: closed forms, published pseudocode written out, and their law over many runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fastclip.audit import CanaryScoreAuditor, bounds
from fastclip.audit.bounds import guessed, most_of_one_run, upper
from fastclip.errors import ArgumentError, ArgumentTypeError

RUNS = 200


def written_out(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The p-value as Steinke et al. 2023 (appendix D) compute it, term by term."""
    q = 1 / (1 + math.exp(-epsilon))
    beta = stats.binom.sf(v - 1, r, q)
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return min(1.0, beta + 2 * m * delta * alpha)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize(("guesses", "right"), [(1, 1), (10, 10), (50, 41), (200, 120), (50, 0)])
def test_the_p_value_of_one_run(guesses: int, right: int, delta: float) -> None:
    for epsilon in (0.0, 0.5, 2.0, 6.0):
        ours = bounds.p_value(300, guesses, right, epsilon, delta)
        assert ours == pytest.approx(written_out(300, guesses, right, epsilon, delta), rel=1e-9)


def test_all_guesses_right_without_delta() -> None:
    """(1 + e^-epsilon)^-r = significance has a solution in closed form."""
    bound = bounds.epsilon_bound(100, 100, 100, 0.05, 0.0)
    assert bound == pytest.approx(-math.log(0.05 ** (-1 / 100) - 1), abs=1e-5)


def test_no_bound_from_nothing() -> None:
    assert bounds.epsilon_bound(100, 100, 50, 0.05, 1e-5) == 0
    assert bounds.mu_bound(100, 100, 50, 0.05) == 0
    scores = np.random.default_rng(0).normal(size=(2, 500))
    auditor = CanaryScoreAuditor(*scores)
    for bound in (auditor.epsilon_one_run, auditor.epsilon_one_run_fdp, auditor.epsilon_from_gdp,
                  auditor.epsilon_clopper_pearson):  # fmt: skip
        assert bound(0.01, 1e-5) == 0


def test_the_shares_of_f_dp_written_out() -> None:
    """Two right guesses of three: the recursion of Mahloujifar et al. 2024 by hand."""
    significance, canaries, mu = 0.4, 3, 0.3
    r2, h2 = significance * 2 / canaries, significance * 1 / canaries
    h1 = max(h2, stats.norm.cdf(stats.norm.ppf(r2) - mu))
    r1 = r2 + 1 / 2 * (h1 - h2)
    h0 = max(h1, stats.norm.cdf(stats.norm.ppf(r1) - mu))
    assert bounds.rules_out(canaries, 3, 2, mu, significance) == (r1 + h0 > 1)
    assert bounds.rules_out(canaries, 3, 2, 0.0, 0.9)
    assert not bounds.rules_out(canaries, 3, 2, 10.0, 0.9)


@pytest.mark.parametrize(("mu", "delta"), [(1.0, 1e-5), (0.1, 1e-6), (5.0, 1e-3)])
def test_epsilon_of_gaussian_dp(mu: float, delta: float) -> None:
    epsilon = bounds.epsilon_of_gdp(mu, delta)
    first, second = stats.norm.cdf([-epsilon / mu + mu / 2, -epsilon / mu - mu / 2])
    assert first - math.exp(epsilon) * second == pytest.approx(delta, rel=1e-6)


def test_epsilon_of_gaussian_dp_at_its_ends() -> None:
    assert bounds.epsilon_of_gdp(0.0, 1e-5) == 0
    assert bounds.epsilon_of_gdp(1e-7, 1e-3) == 0
    assert 1_900 < bounds.epsilon_of_gdp(60.0, 1e-5) < 2_100


def test_upper_bounds_of_rates() -> None:
    """No success in n: 1 - significance^(1/n); all of n: 1; and the binomial law in between."""
    assert upper(np.array([0]), 20, 0.05)[0] == pytest.approx(1 - 0.05 ** (1 / 20))
    assert upper(np.array([20]), 20, 0.05)[0] == 1
    bound = upper(np.array([7]), 20, 0.05)[0]
    assert stats.binom.cdf(7, 20, bound) == pytest.approx(0.05)


def test_rates_of_scores() -> None:
    """In: 1 to 4, out: 0 to 3: every rate can be counted."""
    auditor = CanaryScoreAuditor([1, 2, 3, 4], [0, 1, 2, 3])
    assert auditor.tpr_at_given_fpr(0) == 0.25
    assert auditor.tpr_at_given_fpr(0.25) == 0.5
    assert auditor.tpr_at_given_fpr(0.375) == 0.625  # half of the way to the next threshold
    assert auditor.tpr_at_given_fpr(1) == 1
    assert auditor.attack_auroc() == (10 + 3 / 2) / 16  # 10 pairs in order, 3 ties


def test_the_area_is_the_probability_of_a_higher_score() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40) + 1, rng.integers(0, 9, 30)
    above = (inside[:, None] > outside).mean() + (inside[:, None] == outside).mean() / 2
    assert CanaryScoreAuditor(inside, outside).attack_auroc() == pytest.approx(above)


def test_clopper_pearson_of_scores_that_tell_all() -> None:
    """500 a side of a half: both error rates are 0 of 500, in either direction."""
    inside, outside = np.arange(1000) + 2000.0, np.arange(1000.0)
    rate = 1 - 0.025 ** (1 / 500)
    for auditor in (CanaryScoreAuditor(inside, outside), CanaryScoreAuditor(outside, inside)):
        found = auditor.epsilon_clopper_pearson(0.05, 1e-5)
        assert found == pytest.approx(math.log((1 - rate - 1e-5) / rate))


@pytest.mark.parametrize("name", [
    pytest.param("epsilon_one_run", marks=pytest.mark.slow),  # quick: test_own_run_refusals.py
    "epsilon_one_run_fdp", "epsilon_from_gdp", "epsilon_clopper_pearson",
])  # fmt: skip
def test_a_bound_is_rarely_wrong(name: str) -> None:
    """Scores of a mechanism that is exactly mu-GDP: at 5%, of 200 runs at most 21 may exceed epsilon.

    A binomial law with p = 0.05 exceeds 21 of 200 with probability 5e-4.
    """
    rng = np.random.default_rng(5)
    mu, delta, wrong, found = 1.5, 1e-3, 0, []
    epsilon = bounds.epsilon_of_gdp(mu, delta)
    for _ in range(RUNS):
        inside = rng.random(400) < 0.5
        scores = rng.normal(size=400) + mu * inside
        auditor = CanaryScoreAuditor(scores[inside], scores[~inside])
        found.append(getattr(auditor, name)(0.05, delta))
        wrong += found[-1] > epsilon
    assert wrong <= 21
    assert np.median(found) > 0.05 * epsilon  # and says something


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["epsilon_clopper_pearson", "epsilon_from_gdp"])
def test_scores_in_their_order(name: str) -> None:
    """Of sorted scores every second one would tell of those between them, and bounds be chosen by them.

    There is nothing to find: at 40% no more than 106 of 200 may find something, but once in 10,000.
    """
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(RUNS):
        scores = np.sort(rng.normal(size=(2, 1000)), axis=1)
        found += getattr(CanaryScoreAuditor(*scores), name)(0.4, 1e-9) > 1e-9
    assert found <= stats.binom.ppf(1 - 1e-4, RUNS, 0.4)


@pytest.mark.slow
def test_one_run_of_randomized_response() -> None:
    """The worst case of pure DP: bounds come near epsilon, and exceed it rarely."""
    rng = np.random.default_rng(1)
    epsilon, m, wrong, found = 1.0, 1000, 0, []
    for _ in range(RUNS):
        inside = rng.random(m) < 0.5
        said = inside ^ (rng.random(m) < 1 / (1 + math.exp(epsilon)))
        scores = said + 1e-3 * rng.random(m)
        found.append(
            CanaryScoreAuditor(scores[inside], scores[~inside]).epsilon_one_run(0.05, 1e-9)
        )
        wrong += found[-1] > epsilon
    assert wrong <= 21
    assert np.median(found) > 0.75 * epsilon


def test_the_guesses_are_fixed_by_the_number_of_canaries() -> None:
    assert list(guessed(256)) == [(104, 104), (104, 0), (26, 26), (26, 0)]
    assert list(guessed(40)) == [(16, 16), (16, 0)]
    assert list(guessed(31)) == []
    assert most_of_one_run(31, 0.05, 1e-5) == 0


@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.slow)])
def test_who_knows_every_coin_proves_the_most(count: int) -> None:
    """Whatever the coins, unless fewer fall on one side than are guessed: one set of coins in 370.

    A binomial law with p = 1 / 370 exceeds 3 of 60 with probability 3e-5.
    """
    sets = np.random.default_rng(count).random((60, count)) < 0.5
    found = [CanaryScoreAuditor.of_run(each, each).epsilon_one_run(0.05, 1e-5) for each in sets]
    assert max(found) == most_of_one_run(count, 0.05, 1e-5)
    assert sum(bound < max(found) for bound in found) <= 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("count", "delta"), [(64, 1e-5), (256, 1e-3), (1000, 1e-5)])
def test_the_most_is_of_all_guesses_right(count: int, delta: float) -> None:
    """No smaller number of right guesses proves more."""
    plans = list(guessed(count))
    most = most_of_one_run(count, 0.05, delta)
    for top, bottom in plans:
        guesses = top + bottom
        found = [
            bounds.epsilon_bound(count, guesses, right, 0.05 / len(plans), delta)
            for right in range(guesses // 2, guesses + 1, max(1, guesses // 40))
        ]
        assert max(found) <= most + 1e-5


@pytest.mark.parametrize(("given", "message"), [
    (([], [1.0]), "in_canary_scores expects one score per canary"),
    (([1.0], [[1.0]]), "out_canary_scores expects one score per canary"),
    (([math.nan], [1.0]), "got NaN or inf"),
    (([1.0], [math.inf]), "got NaN or inf"),
])  # fmt: skip
def test_refused_scores(given: tuple, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CanaryScoreAuditor(*given)
    with pytest.raises(ArgumentTypeError, match="expects numbers"):
        CanaryScoreAuditor(["a"], [1.0])

"""What the best attacker can do: closed forms of the Gaussian mechanism, and simulated attacks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fastclip.accounting import RandomAllocation, TruncatedPoisson, epsilon, pld, strongest_attack
from fastclip.accounting.attack import PRIORS, RATES, TradeOff
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.refusal import refused

DELTA = 1e-5
ALPHAS = [1e-5, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9]
RISKCAL: dict[str, Any] = json.loads((Path(__file__).parent / "riskcal.json").read_text())
"""Answers of the package riskcal, with its version and settings."""


def gaussian(alpha: float, mu: float) -> float:
    """Trade-off of the Gaussian mechanism (Dong, Roth and Su 2019)."""
    return norm.cdf(norm.ppf(alpha) + mu)


@pytest.mark.parametrize(
    "entries",
    [
        [(1.0, 1.0, 1)],
        [(0.4, 1.0, 1)],
        [(5.0, 1.0, 1)],
        [(10.0, 1.0, 60), (20.0, 1.0, 100)],
    ],
)
def test_full_batches_in_closed_form(entries: list) -> None:
    mu = math.sqrt(sum(steps / sigma**2 for sigma, _, steps in entries))
    found = strongest_attack(entries, DELTA, ALPHAS)
    assert found.accountant == "pld"
    assert found.mu == pytest.approx(mu, rel=1e-3)
    for alpha, power in found.true_positive_rates.items():
        assert 0 <= power - gaussian(alpha, mu) < 1e-3 * min(1, 10 * gaussian(alpha, mu)) + 1e-6
    assert found.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, abs=1e-3)
    for prior, success in found.reconstruction.items():
        assert success == pytest.approx(gaussian(prior, mu), rel=1e-4)


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0, 20.0])
def test_the_curve_of_one_gaussian_mechanism(sigma: float) -> None:
    """f(a) = Phi(Phi^-1(1 - a) - 1 / sigma), with the same at both ends of the axis."""
    curve = strongest_attack([(sigma, 1.0, 1)]).trade_off
    alphas = np.concatenate([np.geomspace(1e-6, 0.5, 200), 1 - np.geomspace(1e-6, 0.5, 200)])
    missed = norm.cdf(norm.ppf(1 - alphas) - 1 / sigma)
    excess = curve(alphas) - (1 - missed)
    assert (excess >= -1e-12).all()
    assert (excess <= 1e-4 * (1 - missed)).all()


@pytest.mark.parametrize("known", RISKCAL["runs"], ids=lambda known: str(known["history"]))
def test_answers_of_riskcal(known: dict) -> None:
    """Within 0.1 % and 1e-4: both round, riskcal on a mesh of 0.001 for most runs."""
    found = strongest_attack(known["history"], false_positive_rates=known["false_positive_rates"])
    powers = [1 - missed for missed in known["false_negative_rates"]]
    assert list(found.true_positive_rates.values()) == pytest.approx(powers, rel=1e-3, abs=1e-4)
    assert found.advantage == pytest.approx(known["advantage"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("known", RISKCAL["runs"], ids=lambda known: str(known["history"]))
def test_both_accountants_by_distributions_agree(known: dict) -> None:
    """The package's own composition and dp-accounting's, over the whole curve."""
    entries = [tuple(entry) for entry in known["history"]]
    losses = pld.loss_distribution(entries, 0.05, 1e-9)
    grid = np.linspace(0, losses.get_epsilon_for_delta(1e-9), 1000)
    other = TradeOff([*zip(grid, losses.get_delta_for_epsilon(grid), strict=True)])
    alphas = np.geomspace(1e-4, 0.99, 60)
    np.testing.assert_allclose(
        strongest_attack(entries).trade_off(alphas), other(alphas), rtol=2e-3
    )


@pytest.mark.parametrize("candidates", [2, 10, 1000])
@pytest.mark.parametrize("sigma", [0.3, 0.7])
def test_the_best_guess_among_candidates_stays_below(candidates: int, sigma: float) -> None:
    """Orthogonal candidates, equally likely, of one noisy sum: the largest entry is the best guess."""
    rng, runs = np.random.default_rng(candidates), 4000
    seen = rng.normal(scale=sigma, size=(runs, candidates))
    seen[:, 0] += 1
    right = (seen.argmax(1) == 0).mean()
    bound = strongest_attack([(sigma, 1.0, 1)], priors=[1 / candidates]).reconstruction
    assert right - 5 * math.sqrt(right * (1 - right) / runs) <= bound[1 / candidates]
    assert right > 0.5 * bound[1 / candidates]  # so the bound is not empty


def test_reconstruction_is_the_curve_at_the_prior() -> None:
    found = strongest_attack([(1.0, 0.05, 100)], DELTA)
    assert list(found.reconstruction) == list(PRIORS)
    for prior, success in found.reconstruction.items():
        assert prior < success == float(found.trade_off(prior)) < 1
    again = strongest_attack([(1.0, 0.05, 100)], priors=[0.25, 0.02])
    assert list(again.reconstruction) == [0.25, 0.02]
    assert again.true_positive_rates == pytest.approx(found.true_positive_rates, rel=1e-4)


def test_words_round_up() -> None:
    found = strongest_attack([(1.0, 0.05, 100)], DELTA)
    first, *_, third, last = found.sentences("patient")
    power, success = found.true_positive_rates[0.01], found.reconstruction[0.001]
    assert first.startswith(
        "An attacker who knows everything except whether this patient is in the data finds at most "
    )
    assert "% of the patients at 0.1% false alarms, " in first
    said = float(first.split("% at 1%")[0].split()[-1])
    assert power <= said / 100 <= 1.01 * power
    said = float(third.split("% if 1/1000")[0].split()[-1])
    assert success <= said / 100 <= 1.01 * success
    assert "mu = " in last
    assert "at most 100% of" in strongest_attack([(0.0, 0.1, 1)]).sentences()[0]


def mixture_power(alphas: np.ndarray, sigma: float, rate: float) -> np.ndarray:
    """The best test's, of one Poisson-subsampled step: the larger of both directions."""
    at = norm.isf(alphas, scale=sigma)  # a row is in: outputs above a cut
    removed = (1 - rate) * norm.sf(at, scale=sigma) + rate * norm.sf(at - 1, scale=sigma)
    cuts = np.linspace(-12 * sigma, 12 * sigma + 1, 200_001)
    false = (1 - rate) * norm.cdf(cuts, scale=sigma) + rate * norm.cdf(cuts - 1, scale=sigma)
    added = np.interp(alphas, false, norm.cdf(cuts, scale=sigma))
    return np.maximum(removed, added)


def concave_hull(alphas: np.ndarray, powers: np.ndarray, alpha: float) -> float:
    """What a chord between two tests reaches at alpha: an attacker who tosses a coin between them."""
    left, right = alphas <= alpha, alphas > alpha
    x0, y0 = alphas[left][:, None], powers[left][:, None]
    x1, y1 = alphas[right], powers[right]
    return float((y0 + (y1 - y0) * (alpha - x0) / (x1 - x0)).max())


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_one_subsampled_step(sigma: float, rate: float) -> None:
    """The concave hull of both directions, which is what their (epsilon, delta) say together."""
    found = strongest_attack([(sigma, rate, 1)], DELTA, ALPHAS)
    grid = norm.cdf(np.linspace(-5.5, 5.5, 1500))
    best = mixture_power(grid, sigma, rate)
    for alpha, power in found.true_positive_rates.items():
        hull = concave_hull(grid, best, alpha)
        assert hull - 1e-6 <= power <= hull + 1e-3 * min(1, 10 * hull) + 1e-6


def test_the_likelihood_ratio_of_a_run_stays_below() -> None:
    """The best test by Neyman and Pearson, simulated for both neighbors; 6 standard deviations."""
    sigma, rate, steps, runs = 1.0, 0.1, 30, 20_000
    rng = np.random.default_rng(0)

    def ratios(inside: bool) -> np.ndarray:
        x = rng.normal(scale=sigma, size=(runs, steps))
        x += inside * (rng.random((runs, steps)) < rate)
        return np.log1p(rate * np.expm1((x - 0.5) / sigma**2)).sum(1)

    absent, present = ratios(False), ratios(True)
    found = strongest_attack([(sigma, rate, steps)], DELTA)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        power = (present > np.quantile(absent, 1 - alpha)).mean()
        error = 6 * math.sqrt(alpha * (1 - alpha) / runs) * (1 + power / alpha)
        assert power - error <= found.trade_off(alpha)
        assert found.trade_off(alpha) <= power + error + 0.02
    for alpha in np.geomspace(1e-7, 0.99, 300):  # what mu promises
        assert found.trade_off(alpha) <= gaussian(alpha, found.mu) + DELTA + 1e-12


def test_other_accountants_are_looser() -> None:
    entries = [(1.0, 0.05, 100)]
    tight = strongest_attack(entries, DELTA)
    for accountant in ("rdp", "prv"):
        loose = strongest_attack(entries, DELTA, accountant=accountant)
        assert loose.accountant == accountant
        assert loose.mu > tight.mu - 1e-4
        for alpha in RATES:
            assert loose.true_positive_rates[alpha] >= tight.true_positive_rates[alpha] - 1e-6
            assert loose.true_positive_rates[alpha] < 1


def test_the_bound_is_the_envelope_of_its_lines() -> None:
    curve = [
        (0.3, 0.2),
        (1.0, 0.05),
        (1.1, 0.05),
        (2.0, 0.04999),
        (2.0, 0.001),
        (5.0, 1e-9),
    ]
    bound = TradeOff(curve)
    rates = np.linspace(0, 1, 1001)
    least = np.ones_like(rates)
    for spent, delta in curve:
        least = np.minimum(least, delta + math.exp(spent) * rates)
        least = np.minimum(least, 1 - math.exp(-spent) * (1 - delta - rates))
    np.testing.assert_allclose(bound(rates), least, atol=1e-14)
    corners = bound.corners()
    assert (np.diff(corners) > 0).all()


def test_no_step_and_no_noise() -> None:
    nothing = strongest_attack([], DELTA)
    assert nothing.advantage <= 1e-8
    assert nothing.true_positive_rates[0.01] == pytest.approx(0.01, abs=1e-8)
    open_run = strongest_attack([(0.0, 0.1, 1)], DELTA)
    assert (open_run.mu, open_run.advantage) == (math.inf, 1.0)
    assert set(open_run.true_positive_rates.values()) == {1.0}


def test_truncated_draws() -> None:
    cut = TruncatedPoisson(0.05, 200, 12)
    found = strongest_attack([(2.0, cut, 20)], DELTA)
    assert found.mu > strongest_attack([(2.0, 0.05, 20)], DELTA).mu
    assert found.trade_off(1e-12) <= DELTA
    assert epsilon([(2.0, cut, 20)], DELTA, "pld") > 0
    with refused("Use accountant='pld'"):
        strongest_attack([(2.0, cut, 20)], DELTA, accountant="rdp")


def test_random_allocation() -> None:
    """The package's own composition is dp-accounting's, and lower than with full batches."""
    run = [(1.0, RandomAllocation(50), 4)]
    found = strongest_attack(run, DELTA)
    losses = pld.loss_distribution(run, 0.05, 1e-9)
    grid = np.linspace(0, losses.get_epsilon_for_delta(1e-9), 1000)
    other = TradeOff([*zip(grid, losses.get_delta_for_epsilon(grid), strict=True)])
    alphas = np.geomspace(1e-4, 0.99, 60)
    np.testing.assert_allclose(found.trade_off(alphas), other(alphas), rtol=5e-3)
    assert found.mu < 0.9 * strongest_attack([(1.0, 1.0, 4)], DELTA).mu


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"delta": 0.0}, ArgumentError),
        ({"delta": "1e-5"}, ArgumentTypeError),
        ({"false_positive_rates": [0.0]}, ArgumentError),
        ({"false_positive_rates": [0.1, 1.0]}, ArgumentError),
        ({"priors": [1.0]}, ArgumentError),
        ({"priors": [0.5, "0.1"]}, ArgumentTypeError),
        ({"accountant": "gdp"}, ArgumentError),
        ({"accountant": "moments"}, ArgumentError),
    ],
)
def test_refusals(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        strongest_attack(**{"history": [(1.0, 0.1, 3)], "delta": DELTA, **options})

"""Numbers of trials: probabilities, means and samples against Definition 1 of the paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from fastclip.accounting import Poisson, TruncatedNegativeBinomial
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.accounting.runs import cause_and_fix

ETAS = [-0.9, -0.5, 0.0, 0.3, 1.0, 4.0]
GAMMAS = [0.05, 0.3, 0.9]


def tnb_pmf(eta: float, gamma: float, length: int) -> np.ndarray:
    """P[K = k], k = 1.., as the paper writes it."""
    masses, product = [], 1.0
    for k in range(1, length + 1):
        if eta == 0:
            masses.append((1 - gamma) ** k / (k * math.log(1 / gamma)))
            continue
        product *= (k - 1 + eta) / k
        masses.append((1 - gamma) ** k / (gamma**-eta - 1) * product)
    return np.array(masses)


def poisson_pmf(mean: float, length: int) -> np.ndarray:
    return np.array(
        [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(length)]
    )


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("eta", ETAS)
def test_mean_is_the_sum_over_the_pmf(eta: float, gamma: float) -> None:
    masses = tnb_pmf(eta, gamma, 2000)
    assert masses.sum() == pytest.approx(1, abs=1e-10)
    mean = (masses * np.arange(1, 2001)).sum()
    assert TruncatedNegativeBinomial(eta, gamma).mean == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("mean", [1.0001, 1.5, 10, 1e4, 1e9])
@pytest.mark.parametrize("eta", [*ETAS, 1e-12, 200.0])
def test_from_mean_inverts_mean(eta: float, mean: float) -> None:
    drawn = TruncatedNegativeBinomial.from_mean(mean, eta)
    assert drawn.eta == eta
    assert 0 < drawn.gamma < 1
    assert drawn.mean == pytest.approx(mean, rel=1e-9)


def test_geometric_and_logarithmic() -> None:
    assert TruncatedNegativeBinomial.from_mean(8, eta=1).gamma == pytest.approx(1 / 8, rel=1e-12)
    near, at = TruncatedNegativeBinomial(1e-9, 0.05), TruncatedNegativeBinomial(0, 0.05)
    assert at.mean == pytest.approx(19 / math.log(20), rel=1e-12)
    assert near.mean == pytest.approx(at.mean, rel=1e-8)
    assert TruncatedNegativeBinomial.from_mean(8).eta == 0


@pytest.mark.parametrize(
    ("trials", "start", "masses"),
    [
        *(
            (TruncatedNegativeBinomial(eta, gamma), 1, tnb_pmf(eta, gamma, 300))
            for eta in ETAS
            for gamma in (0.1, 0.6)
        ),
        (TruncatedNegativeBinomial(3000.0, 0.7), 1, None),
        (Poisson(1.0), 0, poisson_pmf(1.0, 40)),
        (Poisson(12.5), 0, poisson_pmf(12.5, 100)),
        (Poisson(900.0), 0, poisson_pmf(900.0, 1300)),
    ],
    ids=str,
)
def test_samples_follow_the_pmf(trials: Any, start: int, masses: np.ndarray | None) -> None:
    """Chi-square at level 1e-4, bins of at least 20 expected draws."""
    rng = np.random.default_rng(5)
    if masses is None:  # gamma^-eta overflows: by its negative binomial, where K = 0 never happens
        draws = np.array([trials.sample(rng) for _ in range(300)])
        assert draws.mean() == pytest.approx(trials.mean, abs=4 * draws.std() / math.sqrt(300))
        return
    size = 4000 if trials.mean < 100 else 400
    draws = np.array([trials.sample(rng) for _ in range(size)])
    assert draws.min() >= start
    bins, expected = [], []
    total = 0.0
    for k, mass in enumerate(masses, start):
        total += mass * size
        if total >= 20:
            bins.append(k)
            expected.append(total)
            total = 0.0
    expected[-1] += size - sum(expected)  # whatever lies beyond
    observed = np.bincount(np.searchsorted(bins[:-1], draws), minlength=len(bins))
    assert len(bins) > 1
    assert chisquare(observed, expected).pvalue > 1e-4


def test_samples_are_reproducible_or_unpredictable() -> None:
    trials = TruncatedNegativeBinomial.from_mean(1e4, 1)
    first, second = (trials.sample(np.random.default_rng(1)) for _ in range(2))
    assert first == second
    assert len({trials.sample() for _ in range(4)}) > 1  # equal with probability 1e-12
    assert len({Poisson(1e4).sample() for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: TruncatedNegativeBinomial(-1, 0.5), ArgumentError),
        (lambda: TruncatedNegativeBinomial(math.inf, 0.5), ArgumentError),
        (lambda: TruncatedNegativeBinomial(0, 0), ArgumentError),
        (lambda: TruncatedNegativeBinomial(0, 1), ArgumentError),
        (lambda: TruncatedNegativeBinomial("0", 0.5), ArgumentTypeError),
        (lambda: TruncatedNegativeBinomial.from_mean(1), ArgumentError),
        (lambda: TruncatedNegativeBinomial.from_mean(1 + 1e-16), ArgumentError),
        (lambda: TruncatedNegativeBinomial.from_mean(1 + 1e-15, 4), ArgumentError),
        (lambda: TruncatedNegativeBinomial.from_mean(math.inf), ArgumentError),
        (lambda: TruncatedNegativeBinomial.from_mean(5, -1), ArgumentError),
        (lambda: TruncatedNegativeBinomial.from_mean(1e4, -0.999), ArgumentError),
        (lambda: Poisson(0.99), ArgumentError),
        (lambda: Poisson(math.inf), ArgumentError),
        (lambda: Poisson(3).sample(3), ArgumentTypeError),
    ],
)
def test_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert cause_and_fix(caught.value)

"""Cost of a hyperparameter search: the theorems written out, dp-accounting, exact divergences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from fastclip.accounting import (
    Poisson,
    TruncatedNegativeBinomial,
    history,
    hpo_epsilon,
)
from fastclip.accounting.rdp import ORDERS, run_rdp, to_epsilon
from fastclip.errors import ArgumentError
from tests.accounting.runs import SCHEDULES, STEPS, cause_and_fix, event

DELTA = 1e-5
ENTRIES = history(SCHEDULES["staged"], 1.0, 0.02, STEPS)
WHOLE = [*range(2, 65), 96, 128, 256]
Curve = dict[float, float]


def to_dp(rdp: Curve, delta: float) -> float:
    """Theorem 21 of Balle et al. 2020."""
    found = math.inf
    for a, e in rdp.items():
        spent = e - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a)
        found = min(found, spent)
    return max(found, 0)


def theorem_2(rdp: Curve, eta: float, gamma: float) -> Curve:
    if eta == 0:
        mean = (1 / gamma - 1) / math.log(1 / gamma)
    else:
        mean = eta * (1 - gamma) / (gamma * (1 - gamma**eta))
    tuned = {}
    for a, e in rdp.items():
        best = math.inf
        for second, e_second in rdp.items():
            cost = (1 + eta) * (1 - 1 / second) * e_second
            cost += (1 + eta) * math.log(1 / gamma) / second
            best = min(best, e + cost + math.log(mean) / (a - 1))
        tuned[a] = best
    return tuned


def theorem_6(rdp: Curve, mean: float) -> Curve:
    tuned = {}
    for a, e in rdp.items():
        e_hat = math.log(1 + 1 / (a - 1))
        d_hat = 1.0
        for other, e_other in rdp.items():
            exponent = (other - 1) * (e_other - e_hat + math.log(1 - 1 / other)) - math.log(other)
            if exponent < 0:
                d_hat = min(d_hat, math.exp(exponent))
        tuned[a] = e + mean * d_hat + math.log(mean) / (a - 1)
    return tuned


def gaussian(sigma: float, steps: int) -> Curve:
    """RDP of full-batch Gaussian steps, in closed form."""
    return {float(a): steps * a / (2 * sigma**2) for a in ORDERS}


@pytest.mark.parametrize("sigma", [4.0, 30.0, 300.0])
@pytest.mark.parametrize("mean", [1.2, 10, 200])
@pytest.mark.parametrize("eta", [-0.5, 0.0, 0.5, 1.0])
def test_theorem_2_written_out(eta: float, mean: float, sigma: float) -> None:
    trials = TruncatedNegativeBinomial.from_mean(mean, eta)
    found = hpo_epsilon([(sigma, 1.0, 20)], DELTA, trials)
    base = gaussian(sigma, 20)
    plain = theorem_2(base, eta, trials.gamma)
    assert found.epsilon == pytest.approx(to_dp(plain, DELTA), rel=1e-10, abs=1e-12)
    assert found.base_epsilon == pytest.approx(to_dp(base, DELTA), rel=1e-10)
    assert found.epsilon > found.base_epsilon
    assert to_dp({found.order: plain[found.order]}, DELTA) == pytest.approx(found.epsilon)


@pytest.mark.parametrize("sigma", [4.0, 30.0, 300.0])
@pytest.mark.parametrize("mean", [1, 1.5, 10, 200])
def test_theorem_6_written_out(mean: float, sigma: float) -> None:
    found = hpo_epsilon([(sigma, 1.0, 20)], DELTA, Poisson(mean))
    plain = theorem_6(gaussian(sigma, 20), mean)
    assert found.epsilon == pytest.approx(to_dp(plain, DELTA), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(
    ("trials", "shape"),
    [
        *(
            (TruncatedNegativeBinomial.from_mean(mean, eta), eta)
            for eta in (0.0, 0.4, 1.0, 3.0)
            for mean in (2.0, 30.0)
        ),
        *((Poisson(mean), math.inf) for mean in (1.0, 2.0, 30.0)),
    ],
)
def test_against_dp_accounting(trials: Any, shape: float) -> None:
    found = hpo_epsilon(ENTRIES, DELTA, trials, orders=WHOLE)
    search = RepeatAndSelectDpEvent(event(ENTRIES), trials.mean, shape)
    theirs = RdpAccountant(WHOLE).compose(search).get_epsilon(DELTA)
    assert found.epsilon == pytest.approx(theirs, rel=1e-7)


def best_of_k(trials: Any, p: float) -> np.ndarray:
    """Exact output distribution of the best of K draws from (1 - p, p); no draw comes first.

    P[best <= y] is E[Q(<= y)^K], the generating function of K at the distribution function of Q.
    """

    def generating(x: float) -> float:
        if isinstance(trials, Poisson):
            return math.exp(trials.mean * (x - 1))
        eta, gamma = trials.eta, trials.gamma
        if eta == 0:
            return math.log(1 - (1 - gamma) * x) / math.log(gamma)
        return ((1 - (1 - gamma) * x) ** -eta - 1) / (gamma**-eta - 1)

    return np.diff([0.0, generating(0.0), generating(1 - p), 1.0])


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    held = p > 0
    return math.log((p[held] ** order * q[held] ** (1 - order)).sum()) / (order - 1)


@pytest.mark.parametrize("trials", [
    *(TruncatedNegativeBinomial.from_mean(m, eta) for m in (1.5, 20.0) for eta in (-0.5, 0.0, 1.0)),
    Poisson(1.0), Poisson(3.0), Poisson(20.0),
])  # fmt: skip
@pytest.mark.parametrize("p", [0.01, 0.3, 0.5])
@pytest.mark.parametrize("log_odds", [1e-3, 0.1, 1.0])
def test_bound_holds_for_an_exact_search(trials: Any, p: float, log_odds: float) -> None:
    """Randomized response: the best run's divergence, computed exactly, is within the bound."""
    q = 1 / (1 + (1 / p - 1) * math.exp(log_odds))
    one, other = np.array([1 - p, p]), np.array([1 - q, q])
    orders = np.array(ORDERS[:120])
    rdp = np.array([max(renyi(one, other, a), renyi(other, one, a)) for a in orders])
    tuned = trials.tuned_rdp(rdp, orders)
    best, best_other = best_of_k(trials, p), best_of_k(trials, q)
    assert best.sum() == pytest.approx(1)
    exact = [max(renyi(best, best_other, a), renyi(best_other, best, a)) for a in orders]
    assert (np.array(exact) <= tuned + 1e-12).all()


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, math.inf])
def test_more_trials_cost_more(eta: float) -> None:
    means = [1.01, 1.5, 2, 5, 20, 100, 1000]
    spent = [
        hpo_epsilon(
            ENTRIES,
            DELTA,
            Poisson(m) if math.isinf(eta) else TruncatedNegativeBinomial.from_mean(m, eta),
        ).epsilon
        for m in means
    ]
    assert spent == sorted(spent)
    assert spent[0] > to_epsilon(run_rdp(ENTRIES), ORDERS, DELTA)[0]


def test_continuous_at_the_logarithmic_distribution() -> None:
    spent = {
        eta: hpo_epsilon(ENTRIES, DELTA, TruncatedNegativeBinomial.from_mean(10, eta)).epsilon
        for eta in (-1e-6, -1e-12, 0.0, 1e-12, 1e-6)
    }
    assert spent[-1e-12] == pytest.approx(spent[0.0], rel=1e-9)
    assert spent[1e-12] == pytest.approx(spent[0.0], rel=1e-9)
    assert spent[-1e-6] < spent[0.0] < spent[1e-6] < spent[-1e-6] + 1e-4


def test_the_worst_candidate_counts() -> None:
    trials = TruncatedNegativeBinomial.from_mean(10)
    small = [(2.0, 0.01, 100)]
    alone = hpo_epsilon(ENTRIES, DELTA, trials)
    assert hpo_epsilon(ENTRIES, DELTA, trials, others=[small]) == alone  # small is below everywhere
    assert hpo_epsilon(small, DELTA, trials, others=[ENTRIES]) == alone
    crossing = [(30.0, 1.0, 5)]
    both = hpo_epsilon(ENTRIES, DELTA, trials, others=[crossing])
    assert both.epsilon >= max(alone.epsilon, hpo_epsilon(crossing, DELTA, trials).epsilon)


@pytest.mark.filterwarnings("error")
def test_orders_serve_small_epsilons_without_advice() -> None:
    """Beyond Opacus' grid, which ends at 63 and would warn here."""
    quiet = [(40.0, 0.01, 100)]
    found = hpo_epsilon(quiet, DELTA, TruncatedNegativeBinomial.from_mean(2))
    narrow = hpo_epsilon(quiet, DELTA, TruncatedNegativeBinomial.from_mean(2), orders=range(2, 64))
    assert 0 < found.base_epsilon < 0.5 * narrow.base_epsilon
    assert narrow.order == 63
    assert found.epsilon < narrow.epsilon


def test_no_noise_has_no_bound() -> None:
    assert hpo_epsilon([(0.0, 0.1, 3)], DELTA, Poisson(3)).epsilon == math.inf
    trials = TruncatedNegativeBinomial.from_mean(3)
    assert hpo_epsilon([(0.0, 0.1, 3)], DELTA, trials).epsilon == math.inf


@pytest.mark.parametrize("changed", [{"delta": 0}, {"delta": 1.0}, {"orders": [1, 2]},
                                     {"orders": []}, {"orders": [2, math.inf]}])  # fmt: skip
def test_refused(changed: dict[str, Any]) -> None:
    arguments = {"delta": DELTA, "trials": Poisson(3), "orders": WHOLE, **changed}
    with pytest.raises(ArgumentError, match=rf"{next(iter(changed))} expects") as caught:
        hpo_epsilon(ENTRIES, arguments.pop("delta"), arguments.pop("trials"), **arguments)
    assert cause_and_fix(caught.value)

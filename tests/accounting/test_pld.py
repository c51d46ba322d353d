"""The accountant "pld" against closed forms, dp-accounting and Opacus' PRV; it never rounds down."""

from __future__ import annotations

import json
import math
import sys

import pytest
from dp_accounting.pld import PLDAccountant as Reference
from scipy.optimize import brentq
from scipy.stats import norm

from fastclip import FastPrivacyEngine
from fastclip.accounting import (
    PLDAccountant,
    TruncatedPoisson,
    epsilon,
    find_noise_multiplier,
    history,
)
from fastclip.accounting.pld import rounding
from fastclip.clipping.schedules import StepNoise
from fastclip.core.opacus_names import create_accountant
from fastclip.errors import ArgumentError
from tests.accounting.runs import SCHEDULES, STEPS, event
from tests.refusal import refused

DELTA = 1e-5
CUT = TruncatedPoisson(0.1, 100, 60)


def gaussian_delta(eps: float, mu: float) -> float:
    """Of the Gaussian mechanism (Balle and Wang 2018)."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


def gaussian_epsilon(delta: float, mu: float) -> float:
    return brentq(lambda eps: gaussian_delta(eps, mu) - delta, 0, 500)


def one_step_delta(eps: float, sigma: float, rate: float) -> float:
    """Of one Poisson-subsampled step, the larger of a removed and an added row, for rate < 1."""
    deltas = [0.0]
    grown = (math.expm1(eps) + rate) / rate  # the likelihood ratio of a row that is in
    cut = sigma**2 * math.log(grown) + 0.5
    inside, outside = norm.sf(cut - 1, scale=sigma), norm.sf(cut, scale=sigma)
    deltas.append((1 - rate) * outside + rate * inside - math.exp(eps) * outside)
    grown = (math.expm1(-eps) + rate) / rate
    if grown > 0:
        cut = sigma**2 * math.log(grown) + 0.5
        inside, outside = norm.cdf(cut - 1, scale=sigma), norm.cdf(cut, scale=sigma)
        deltas.append(outside - math.exp(eps) * ((1 - rate) * outside + rate * inside))
    return max(deltas)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("delta", [0.01, 1e-5, 1e-9])
@pytest.mark.parametrize(
    "entries",
    [
        [(1.0, 1.0, 1)],
        [(0.3, 1.0, 1)],
        [(30.0, 1.0, 1000)],
        [(40.0, 1.0, 500), (20.0, 1.0, 300), (40.0, 1.0, 7)],
    ],
)
def test_full_batches_are_the_gaussian_mechanism(entries: list, delta: float) -> None:
    mu = math.sqrt(sum(steps / sigma**2 for sigma, _, steps in entries))
    exact = gaussian_epsilon(delta, mu)
    assert exact * (1 - 1e-9) <= epsilon(entries, delta, "pld") <= 1.002 * exact


@pytest.mark.one_in(8)
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.001, 0.1, 0.6, 0.999])
def test_one_subsampled_step(sigma: float, rate: float, delta: float) -> None:
    if one_step_delta(0.0, sigma, rate) <= delta:
        exact = 0.0
    else:
        exact = brentq(lambda eps: one_step_delta(eps, sigma, rate) - delta, 0, 60)
    assert exact * (1 - 1e-9) <= epsilon([(sigma, rate, 1)], delta, "pld") <= 1.006 * exact


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_against_dp_accounting(name: str) -> None:
    entries = history(SCHEDULES[name], 4.0, 0.05, STEPS)
    theirs = Reference(value_discretization_interval=4e-4).compose(event(entries))
    for order in (entries, entries[::-1]):
        ours = epsilon(order, DELTA, "pld")
        assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(2.0, 0.02, 1000), (4.0, 0.2, 500), (10.0, 0.001, 3000)]
)
@pytest.mark.parametrize("eps_error", [0.02, 0.2])
def test_within_its_stated_error_of_prv(
    sigma: float, rate: float, steps: int, eps_error: float
) -> None:
    """Opacus reports its estimate + its error, the estimate is as good as that; ours is no estimate."""
    entries, error = [(sigma, rate, steps)], 0.002
    theirs = create_accountant("prv")
    theirs.history = entries
    estimate = theirs.get_epsilon(DELTA, eps_error=error) - error
    ours = epsilon(entries, DELTA, "pld", eps_error=eps_error)
    assert estimate - error <= ours <= estimate + error + eps_error
    assert ours == epsilon(entries, DELTA, "prv", eps_error=eps_error)


def test_a_coarser_mesh_rounds_up() -> None:
    found = [
        epsilon([(1.0, 0.01, 4000)], DELTA, "pld", eps_error=error) for error in (0.01, 0.1, 1.0)
    ]
    assert found == sorted(found)
    assert found[-1] - found[0] < 1.0


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(3000.0, 1_000_000, 2e-9), (300.0, 100_000, 1e-6)]
)
def test_rounding_of_a_long_run_is_never_downwards(sigma: float, steps: int, delta: float) -> None:
    """Where a Fourier transform to the T-th power has lost digits; q so near 1 that it is a Gaussian."""
    mu = math.sqrt(steps) / sigma
    entries = [(sigma, 1 - 1e-12, steps)]
    exact = gaussian_epsilon(delta, mu)
    assert exact <= epsilon(entries, delta, "pld") <= 1.002 * exact


def test_a_delta_that_rounding_hides() -> None:
    """From dp-accounting, which composes truncated draws."""
    entries = [(300.0, TruncatedPoisson(0.5, 100, 60), 100_000)]
    with refused("larger delta, or accountant='rdp'"):
        epsilon(entries, 1.9 * rounding(entries), "pld")


def test_an_accountant_of_opacus() -> None:
    accountant = create_accountant("pld")
    assert isinstance(accountant, PLDAccountant)
    assert (len(accountant), accountant.get_epsilon(DELTA)) == (0, 0.0)
    for sigma in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert accountant.get_epsilon(DELTA) == epsilon(accountant.history, DELTA, "pld")
    other = create_accountant("pld")
    other.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert other.history == accountant.history
    with pytest.raises(ValueError, match="mechanism"):
        create_accountant("rdp").load_state_dict(accountant.state_dict())
    accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    assert accountant.get_epsilon(DELTA) == math.inf


def test_an_engine_and_its_noise_multiplier() -> None:
    engine = FastPrivacyEngine(accountant="pld")
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.05)
    assert engine.get_epsilon(DELTA) == epsilon([(1.0, 0.05, 1)], DELTA, "pld")
    coarse = {"accountant": "pld", "eps_error": 0.3}
    for schedule in (SCHEDULES["constant"], StepNoise(STEPS, 2, 0.8)):
        sigma = find_noise_multiplier(
            target_epsilon=2.0, target_delta=DELTA, sample_rate=0.05, steps=STEPS,
            schedule=schedule, epsilon_tolerance=0.05, **coarse,
        )  # fmt: skip
        spent = epsilon(history(schedule, sigma, 0.05, STEPS), DELTA, **coarse)
        assert 1.95 <= spent <= 2.0


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
    for call in (
        lambda: FastPrivacyEngine(accountant="pld"),
        lambda: epsilon([(1.0, 0.1, 1)], DELTA, "pld"),
        lambda: find_noise_multiplier(
            target_epsilon=1, target_delta=DELTA, sample_rate=0.1, steps=5, accountant="pld"
        ),
    ):
        with refused(r"fastclip\[pld\]"):
            call()
    assert epsilon([(1.0, 0.1, 1)], DELTA, "prv") > 0


@pytest.mark.parametrize(
    ("entries", "options", "way_out"),
    [
        ([(1.0, 0.1, 1)], {"eps_error": 0}, "eps_error expects"),
        ([(1.0, 0.1, 1)], {"delta_error": DELTA}, "delta_error expects"),
        ([(0.01, CUT, 10)], {}, "eps_error, or accountant='rdp'"),
        ([(1.0, CUT, 1_000_000)], {}, "eps_error, or accountant='rdp'"),
    ],
)
def test_refusals(entries: list, options: dict, way_out: str) -> None:
    with refused(way_out, ArgumentError):
        epsilon(entries, DELTA, "pld", **options)

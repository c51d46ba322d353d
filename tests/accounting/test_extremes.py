"""The numerical accountant at the ends of its range: a number that is no smaller than the truth."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.optimize import brentq

from fastclip.accounting import epsilon, find_noise_multiplier, numerical, transforms
from fastclip.accounting.transforms import gaussian_epsilon
from fastclip.errors import ArgumentError
from tests.accounting.test_pld import gaussian_epsilon as by_definition
from tests.accounting.test_pld import one_step_delta

NEAR = 1 - 1e-12  # so near 1 that a step is the Gaussian mechanism, by the code for subsampled ones


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"),
    [(300.0, 100_000, 1e-10), (100.0, 10_000, 1e-11), (300.0, 100_000, 1e-12),
     (1000.0, 1_000_000, 1e-12), (1.0, 1, 1e-100), (0.03, 5, 1e-5), (2.0, 3, 1e-290), (2.0, 3, 1e-310)],
)  # fmt: skip
def test_rounding_hides_nothing(sigma: float, steps: int, delta: float) -> None:
    """A plain Fourier transform to the power of the steps would have lost a delta so small."""
    exact = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    assert exact <= epsilon([(sigma, NEAR, steps)], delta, "prv") <= 1.002 * exact


@pytest.mark.parametrize("mu", [1e-6, 0.01, 1.0, 7.0, 20.0])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12])
def test_the_gaussian_mechanism(mu: float, delta: float) -> None:
    exact = by_definition(delta, mu) if math.erf(mu / 8**0.5) > delta else 0.0
    assert exact * (1 - 1e-7) <= gaussian_epsilon(mu, delta) <= exact * (1 + 1e-5) + 1e-11


def test_a_noise_multiplier_is_not_rounded_down() -> None:
    target, delta, steps = 6.9, 1e-11, 10_000
    sigma = find_noise_multiplier(
        target_epsilon=target, target_delta=delta, sample_rate=NEAR, steps=steps, accountant="prv",
        eps_error=0.05, epsilon_tolerance=0.2,
    )  # fmt: skip
    assert gaussian_epsilon(math.sqrt(steps) / sigma, delta) <= target


@pytest.mark.parametrize(
    "entries",
    [
        [(0.05, 0.1, 10)],
        [(0.02, 0.9, 3)],
        [(0.4, 0.1, 10_000)],
        [(1e-3, 0.5, 1)],
        [(1e-9, 0.5, 7)],
        [(1e-100, 0.5, 7)],
        [(1e-200, 0.5, 7)],
        [(1e12, 0.5, 10**6), (5e-3, 1e-300, 10**9)],
        [(1.0, 0.01, 10**7)],
    ],
)
@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_beyond_what_is_promised_it_is_an_upper_bound(entries: list, accountant: str) -> None:
    """At most that of full batches, at least that of fewer steps."""
    found = epsilon(entries, 1e-5, accountant)
    full = [(sigma, 1.0, steps) for sigma, _, steps in entries]
    assert epsilon([(s, q, min(steps, 2)) for s, q, steps in entries], 1e-5) <= found * 1.001
    assert found <= epsilon(full, 1e-5, accountant)


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-11])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 3.0, 1e4])
@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.999])
def test_one_step(sigma: float, rate: float, delta: float) -> None:
    exact = 0.0
    if one_step_delta(0.0, sigma, rate) > delta:
        exact = brentq(lambda eps: one_step_delta(eps, sigma, rate) - delta, 0, 300)
    assert exact - 1e-9 <= epsilon([(sigma, rate, 1)], delta, "prv") <= 1.002 * exact + 2e-5


@pytest.mark.parametrize("share", [0.99, 0.6, 0.1, 1e-3])
@pytest.mark.parametrize(("sigma", "rate"), [(0.2, 1e-6), (0.3, 0.4), (0.7, 1e-5), (4.0, 0.01)])
def test_rare_losses_are_neither_lost_nor_doubled(sigma: float, rate: float, share: float) -> None:
    """Where delta is so small that compositions with a rare loss are told apart from the others."""
    delta = share * numerical._ROUNDING
    exact = brentq(lambda eps: one_step_delta(eps, sigma, rate) - delta, 0, 60, xtol=1e-13)
    assert exact * (1 - 1e-4) <= epsilon([(sigma, rate, 1)], delta) <= 1.005 * exact


@pytest.mark.parametrize("steps", [1, 1000, 100_000])
@pytest.mark.parametrize("mu", [1e-3, 1.0])
def test_many_steps_of_full_batches(mu: float, steps: int) -> None:
    exact = gaussian_epsilon(mu, 1e-5)
    for rate in (1.0, NEAR):
        found = epsilon([(math.sqrt(steps) / mu, rate, steps)], 1e-5, "prv")
        assert exact * (1 - 1e-12) <= found <= 1.002 * exact + 1e-9


def test_nothing_that_a_failing_computation_left_is_stated(monkeypatch: Any) -> None:
    """A NaN is no small number."""
    monkeypatch.setattr(transforms, "irfft", lambda change, length: [math.nan] * length)
    with pytest.raises(ArgumentError, match="The prv accountant failed"):
        epsilon([(1.2345, 0.01, 100)], 1e-5)

"""Shares of a step's noise multiplier: Lemma 3.1 and Theorem 3.2 of Zhao et al. 2025."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.accounting import NoiseLevels, compose, remaining, split
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.accounting.runs import cause_and_fix

COMMON = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SIGMA = st.floats(1e-3, 1e3)
RATIO = st.floats(1e-2, 1e2)
ORDERS = [1.25, 1.5, 2, 3, 5.5, 8, 16, 32, 64, 256, 1024]


def rdp(event: dp.DpEvent, orders: list[float] = ORDERS) -> np.ndarray:
    return RdpAccountant(orders).compose(event).rdp


@COMMON
@given(sigmas=st.lists(SIGMA, min_size=1, max_size=5))
def test_compose_is_the_formula(sigmas: list[float]) -> None:
    plain = sum(sigma**-2 for sigma in sigmas) ** -0.5
    assert compose(*sigmas) == pytest.approx(plain, rel=1e-12)


@COMMON
@given(first=SIGMA, second=SIGMA)
def test_composed_mechanism_has_the_same_rdp(first: float, second: float) -> None:
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(first), dp.GaussianDpEvent(second)])
    one = dp.GaussianDpEvent(compose(first, second))
    np.testing.assert_allclose(rdp(one), rdp(both), rtol=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 10.0])
@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_shares_of_a_poisson_step_cost_the_total(sigma: float, ratio: float) -> None:
    """Theorem 3.2: gradients and counts of one Poisson sample cost what sigma alone costs."""
    levels = split(sigma, ratio)
    both = dp.ComposedDpEvent(
        [dp.GaussianDpEvent(levels.gradients), dp.GaussianDpEvent(levels.counts)]
    )
    whole = [2, 3, 8, 32, 64]
    shared = rdp(dp.PoissonSampledDpEvent(0.02, both), whole)
    alone = rdp(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(sigma)), whole)
    np.testing.assert_allclose(shared, alone, rtol=1e-10)


@COMMON
@given(sigma=SIGMA, ratio=RATIO)
def test_split_and_remaining_are_inverse(sigma: float, ratio: float) -> None:
    total, gradients, counts = split(sigma, ratio)
    assert total == sigma
    assert counts == ratio * gradients
    assert gradients == pytest.approx(sigma * math.sqrt(1 + ratio**-2), rel=1e-12)
    assert compose(gradients, counts) == pytest.approx(sigma, rel=1e-12)
    assert remaining(sigma, counts) == pytest.approx(gradients, rel=1e-10)


@COMMON
@given(sigma=SIGMA, more=st.floats(1.0001, 1e6))
def test_remaining_spends_exactly_the_rest(sigma: float, more: float) -> None:
    gradients = remaining(sigma, sigma * more)
    assert gradients > sigma
    assert compose(gradients, sigma * more) == pytest.approx(sigma, rel=1e-10)


def test_without_counts_or_without_noise() -> None:
    assert split(1.3, None) == NoiseLevels(1.3, 1.3, None)
    assert split(0, None) == NoiseLevels(0, 0, None)
    assert split(0, 10) == NoiseLevels(0, 0, 0)
    assert compose(0, 2) == compose(2, 0.0) == compose(0) == 0
    assert remaining(0, 0) == remaining(0, 5) == 0


@pytest.mark.parametrize("counts", [0, 0.5, 1.0])
def test_counts_that_spent_the_step(counts: float) -> None:
    with pytest.raises(StepError, match="leaves nothing") as caught:
        remaining(1.0, counts)
    assert cause_and_fix(caught.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: compose(), ArgumentError),
        (lambda: compose(1, -1), ArgumentError),
        (lambda: compose(math.inf), ArgumentError),
        (lambda: compose("1"), ArgumentTypeError),
        (lambda: compose(False), ArgumentTypeError),
        (lambda: split(-1, None), ArgumentError),
        (lambda: split(1, 0), ArgumentError),
        (lambda: split(1, math.nan), ArgumentError),
        (lambda: remaining(math.nan, 1), ArgumentError),
        (lambda: remaining(1, -1), ArgumentError),
    ],
)
def test_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert cause_and_fix(caught.value)

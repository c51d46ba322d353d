"""Epsilons warn of nothing that says nothing of them."""

from __future__ import annotations

import warnings

import pytest

from fastclip.accounting import epsilon, find_noise_multiplier


@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_prv_warns_of_nothing(rate: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon([(1.0, rate, 20), (1e-3, rate, 1), (1e9, rate, 10**9)], 1e-5)
        find_noise_multiplier(target_epsilon=10.0, target_delta=1e-5, sample_rate=rate, steps=20)

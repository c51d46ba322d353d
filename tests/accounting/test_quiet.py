"""Epsilons warn of nothing that says nothing of them."""

from __future__ import annotations

import warnings

import pytest

from fastclip.accounting.calibration import _by_opacus
from fastclip.accounting.history import epsilon


@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_prv_warns_of_nothing(rate: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon([(1.0, rate, 20)], 1e-5)
        _by_opacus(10.0, 1e-5, rate, 20, "prv")

"""`engine.accountant.get_epsilon`, which Opacus' scripts call, says what `engine.get_epsilon` says."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
from opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
)

from fastclip import FastPrivacyEngine
from fastclip.accounting.ledger import keep_ledger
from fastclip.core.opacus_names import create_accountant
from fastclip.errors import ArgumentError
from tests.refusal import refused

NAMES = ["prv", "rdp", "gdp", "pld"]
SMALL, TINY = (1.0, 0.01, 1000), (1.0, 0.001, 100_000)


def engine(name: str, *history: Any) -> FastPrivacyEngine:
    if name == "pld":
        pytest.importorskip("dp_accounting")
    found = FastPrivacyEngine(accountant=name)
    found.accountant.history = list(history)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_ordinary_run_has_the_epsilon_of_opacus(name: str) -> None:
    one, theirs = engine(name, SMALL), create_accountant(name)
    theirs.history = [SMALL]
    found = one.accountant.get_epsilon(1e-5)
    assert found == one.accountant.get_epsilon(delta=1e-5) == one.get_epsilon(1e-5)
    said = theirs.get_epsilon(delta=1e-5)  # Opacus' PRV adds its error, at most 0.01 of an estimate
    assert said - 0.02 * (name == "prv") <= found * (1 + 1e-6)
    assert found <= said * (1 + 1e-6)


@pytest.mark.parametrize("name", ["prv", "pld"])
def test_a_delta_that_rounding_would_hide(name: str) -> None:
    one = engine(name, TINY)
    found = one.get_epsilon(1e-12)
    assert found == one.accountant.get_epsilon(delta=1e-12)
    assert one.get_epsilon(1e-11) < found < engine("rdp", TINY).get_epsilon(1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_noise_and_no_steps(name: str) -> None:
    assert engine(name, (0.0, 0.01, 10)).accountant.get_epsilon(1e-5) == math.inf
    assert engine(name).accountant.get_epsilon(1e-5) == 0


@pytest.mark.parametrize("delta", [0.0, 1.5, math.nan])
def test_a_delta_that_is_none(delta: float) -> None:
    with refused("delta"):
        engine("rdp", SMALL).accountant.get_epsilon(delta)


def test_gdp_forgets_no_step() -> None:
    one = engine("gdp", (0.5, 0.01, 1000), (5.0, 0.01, 1))
    with refused("constant", ArgumentError):
        one.accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("kind", [PRVAccountant, RDPAccountant, GaussianAccountant])
def test_options_are_opacus_own(kind: type[IAccountant]) -> None:
    ledger = keep_ledger(kind())
    own = inspect.signature(kind.get_epsilon).parameters
    assert list(inspect.signature(ledger.get_epsilon).parameters) == list(own)[1:]
    rdp = engine("rdp", SMALL).accountant
    few = rdp.get_epsilon(1e-5, [2.0, 3.0])
    assert few == rdp.get_epsilon(1e-5, alphas=[2.0, 3.0]) > rdp.get_epsilon(1e-5)
    prv = engine("prv", SMALL).accountant
    assert prv.get_epsilon(1e-5, eps_error=0.5) > prv.get_epsilon(1e-5)


def test_an_accountant_of_ones_own_is_asked_once() -> None:
    class Own(RDPAccountant):
        asked = 0

        def get_epsilon(self, delta: float, *, extra: float = 0.0) -> float:  # type: ignore[override]
            type(self).asked += 1
            return super().get_epsilon(delta) + extra

    ledger = keep_ledger(Own())
    ledger.step(noise_multiplier=1.0, sample_rate=0.1)
    assert ledger.get_epsilon(1e-5, extra=2.0) == pytest.approx(ledger.get_epsilon(1e-5) + 2)
    assert Own.asked == 2

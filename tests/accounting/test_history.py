"""Planned runs: the history Opacus would record, and epsilons against dp-accounting's."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant, RDPAccountant

from fastclip.accounting import epsilon, history
from fastclip.accounting.epsilon import spent
from fastclip.clipping.schedules import ConstantNoise, NoiseSchedule, StagedNoise, StepNoise
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.accounting.runs import SCHEDULES, STEPS, cause_and_fix, event

DELTA = 1e-5
# At fractional orders dp-accounting gives an upper bound where Opacus' formula is exact.
WHOLE = [*range(2, 65), 128, 256]


@pytest.mark.parametrize("steps", [0, 1, 17, STEPS, STEPS + 25])
@pytest.mark.parametrize("name", SCHEDULES)
def test_history_is_what_an_accountant_records(name: str, steps: int) -> None:
    schedule, sigma, rate = SCHEDULES[name], 1.7, 0.03
    accountant = PRVAccountant()
    for step in range(steps):
        accountant.step(noise_multiplier=sigma * schedule.factor(step), sample_rate=rate)
    assert history(schedule, sigma, rate, steps) == accountant.history


def test_equal_neighbors_merge() -> None:
    class Repeating:
        def factor(self, step: int) -> float:
            return 1.0 if step < 5 else 0.5

        def runs(self, steps: int) -> list[tuple[float, int]]:
            return [(1.0, 2), (1.0, 3), (0.5, steps - 5)]

    assert history(Repeating(), 2.0, 0.1, 9) == [(2.0, 0.1, 5), (1.0, 0.1, 4)]
    assert history(StepNoise(9, 3, decay=1.0), 2.0, 0.1, 9) == [(2.0, 0.1, 9)]


@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize("name", SCHEDULES)
def test_rdp_against_dp_accounting(name: str) -> None:
    entries = history(SCHEDULES[name], 1.4, 0.05, STEPS)
    theirs = RdpAccountant(WHOLE).compose(event(entries)).get_epsilon(DELTA)
    assert epsilon(entries, DELTA, "rdp", alphas=WHOLE) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_rdp_is_opacus_to_the_last_bit_and_known_steps_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rdp = importlib.import_module("fastclip.accounting.rdp")
    compute, computed = rdp.compute_rdp, []
    monkeypatch.setattr(rdp, "compute_rdp", lambda **k: computed.append(k) or compute(**k))
    rdp._one_step.cache_clear()
    book, entries = RDPAccountant(), []
    for name in ("staged", "exponential"):
        for steps in (3, STEPS):
            entries += history(SCHEDULES[name], 0.9, 0.031, steps)
            book.history = entries
            assert epsilon(entries, DELTA, "rdp") == book.get_epsilon(DELTA)
            few = book.get_epsilon(DELTA, alphas=[2.5, 3, 20.0])
            assert epsilon(entries, DELTA, "rdp", alphas=[2.5, 3, 20.0]) == few
    pairs = {(sigma, rate) for sigma, rate, _ in entries}
    assert len(computed) == 2 * len(pairs)


class Overridden(RDPAccountant):
    """Another law under the same name."""

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        return 7.0, 2.0


def test_an_accountant_of_ones_own_is_asked() -> None:
    book = Overridden()
    book.history = [(1.0, 0.1, 5)]
    assert spent(book, DELTA) == 7.0


def test_rdp_on_fractional_orders_is_never_above_dp_accounting() -> None:
    entries = history(SCHEDULES["staged"], 0.8, 0.05, STEPS)
    orders = RDPAccountant.DEFAULT_ALPHAS
    theirs = RdpAccountant(orders).compose(event(entries)).get_epsilon(DELTA)
    ours = epsilon(entries, DELTA, "rdp")
    assert theirs - 1e-2 < ours <= theirs + 1e-9


@pytest.mark.parametrize(
    ("schedule", "sigma", "rate", "steps", "eps_error"),
    [
        (ConstantNoise(), 1.5, 0.2, 20, 0.01),
        (ConstantNoise(), 1.5, 0.2, 20, 0.003),
        (StagedNoise(40), 1.0, 0.05, 40, 0.01),
        (StepNoise(30, 3, 0.8), 2.0, 0.1, 30, 0.01),
    ],
)
def test_prv_against_privacy_loss_distributions(
    schedule: NoiseSchedule, sigma: float, rate: float, steps: int, eps_error: float
) -> None:
    """Never more than eps_error above them, nor below but for what their own mesh adds."""
    entries = history(schedule, sigma, rate, steps)
    tight = PLDAccountant(value_discretization_interval=1e-3)
    theirs = tight.compose(event(entries)).get_epsilon(DELTA)
    ours = epsilon(entries, DELTA, "prv", eps_error=eps_error)
    assert theirs * (1 - 1e-3) < ours < theirs + eps_error


def test_prv_is_the_default_and_below_rdp() -> None:
    entries = history(StepNoise(20, 2), 3.0, 0.05, 20)
    spent = epsilon(entries, DELTA)
    assert spent == epsilon(entries, DELTA, "prv") < epsilon(entries, DELTA, "rdp")


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_order_of_stages_does_not_matter(accountant: str) -> None:
    entries = history(StepNoise(20, 2), 3.0, 0.05, 20)
    forward = epsilon(entries, DELTA, accountant)
    assert epsilon(entries[::-1], DELTA, accountant) == pytest.approx(forward, abs=1e-6)


@pytest.mark.filterwarnings("ignore:Optimal order", "ignore:GDP accounting")
@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_no_step_and_no_noise(accountant: str) -> None:
    assert epsilon([], DELTA, accountant) == 0
    assert epsilon([(0.0, 0.1, 3)], DELTA, accountant) == math.inf
    assert epsilon([(1.0, 0.1, 3), (0.0, 0.1, 1)], DELTA, "rdp") == math.inf


def test_epsilon_is_never_negative() -> None:
    """With a delta that already covers the run, Opacus' PRV returns less than 0."""
    assert epsilon([(5.0, 0.01, 10)], 0.2, "prv") == 0


@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_gdp_composes_constant_noise_only() -> None:
    """Opacus' own would silently charge the last entry alone."""
    with pytest.raises(ArgumentError, match="'prv' or 'rdp'") as caught:
        epsilon([(1.0, 0.01, 50), (2.0, 0.01, 50)], DELTA, "gdp")
    assert cause_and_fix(caught.value)
    halves = epsilon([(1.0, 0.01, 50), (1.0, 0.01, 50)], DELTA, "gdp")
    assert halves == epsilon([(1.0, 0.01, 100)], DELTA, "gdp")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: epsilon([(1.0, 0.1, 1)], 0.0), ArgumentError),
        (lambda: epsilon([(1.0, 0.1, 1)], 1.0), ArgumentError),
        (lambda: epsilon([(1.0, 0.1, 1)], "1e-5"), ArgumentTypeError),
        (lambda: epsilon([(1.0, 0.1, 1)], DELTA, "moments"), ArgumentError),
        (lambda: history(ConstantNoise(), -1.0, 0.1, 1), ArgumentError),
        (lambda: history(ConstantNoise(), math.nan, 0.1, 1), ArgumentError),
        (lambda: history(ConstantNoise(), 1.0, 0.0, 1), ArgumentError),
        (lambda: history(ConstantNoise(), 1.0, 1.1, 1), ArgumentError),
        (lambda: history(ConstantNoise(), 1.0, 0.1, -1), ArgumentError),
        (lambda: history(ConstantNoise(), 1.0, 0.1, 1.5), ArgumentTypeError),
        (lambda: epsilon([(-1.0, 0.1, 1)], DELTA), ArgumentError),
        (lambda: epsilon([(math.nan, 0.1, 1)], DELTA), ArgumentError),
        (lambda: epsilon([(1.0, 0.1, 5), (2.0, 0.1, -5)], DELTA), ArgumentError),
        (lambda: epsilon([(1.0, 1.1, 1)], DELTA, "gdp"), ArgumentError),
        (lambda: epsilon([("1", 0.1, 1)], DELTA), ArgumentTypeError),
    ],
)
def test_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert cause_and_fix(caught.value)

"""Draws cut to a largest batch: dp-accounting called directly, and every small data set written out."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant as Reference
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.stats import norm

from fastclip import FastPrivacyEngine
from fastclip.accounting import (
    TruncatedPoisson,
    epsilon,
    find_noise_multiplier,
    history,
    hpo_epsilon,
)
from fastclip.accounting.ledger import keep_ledger
from fastclip.accounting.pld import loss_distribution
from fastclip.accounting.tuning import Poisson
from fastclip.clipping.schedules import ConstantNoise, StepNoise
from fastclip.core.opacus_names import create_accountant
from fastclip.data.design import TRUNCATED, Releases, SamplingDesign
from fastclip.data.draws import SampledBatches
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.refusal import refused

DELTA = 1e-5
CUT = TruncatedPoisson(0.05, 1000, 64)


def theirs(entries: list[tuple[float, TruncatedPoisson, int]], delta: float = DELTA) -> float:
    accountant = Reference(value_discretization_interval=4e-4)
    for sigma, cut, steps in entries:
        step = dp.TruncatedSubsampledGaussianDpEvent(cut.rows, cut.rate, cut.max_batch_size, sigma)
        accountant.compose(dp.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(delta)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "cut",
    [
        CUT,
        TruncatedPoisson(0.01, 5000, 80),
        TruncatedPoisson(0.3, 10, 2),
        TruncatedPoisson(1.0, 100, 20),
        TruncatedPoisson(0.05, 60, 64),
    ],
)
@pytest.mark.parametrize(("sigma", "steps"), [(2.0, 50), (6.0, 300)])
def test_against_dp_accounting(cut: TruncatedPoisson, sigma: float, steps: int) -> None:
    entries = [(sigma, cut, steps)]
    found = epsilon(entries, DELTA, "pld", eps_error=0.05)
    assert found == pytest.approx(theirs(entries), abs=1e-3)


def test_schedules_and_uncut_steps_compose() -> None:
    other = TruncatedPoisson(0.05, 1000, 70)
    cut = [(3.0, CUT, 20), (2.5, CUT, 20), (3.0, other, 9)]
    found = epsilon(cut, DELTA, "pld", eps_error=0.05)
    assert found == pytest.approx(theirs(cut), abs=1e-3)
    never = TruncatedPoisson(0.1, 50, 50)
    mixed = epsilon([(2.0, never, 10), (2.0, 0.1, 10)], DELTA, "pld")
    assert mixed == pytest.approx(epsilon([(2.0, 0.1, 20)], DELTA, "pld"), abs=1e-3)


def draws(cut: TruncatedPoisson, rows: int) -> list[tuple[float, tuple[int, ...]]]:
    """(probability, kept rows) of one draw of a data set of so many rows."""
    found = []
    for size in range(rows + 1):
        drawn = cut.rate**size * (1 - cut.rate) ** (rows - size)
        kept = min(size, cut.max_batch_size)
        for subset in itertools.combinations(range(rows), size):
            parts = list(itertools.combinations(subset, kept))
            found += [(drawn / len(parts), part) for part in parts]
    return found


def density(cut: TruncatedPoisson, values: tuple[float, ...], x: np.ndarray, sigma: float) -> Any:
    """Of the noisy sum of one draw."""
    total = np.zeros_like(x)
    for mass, kept in draws(cut, len(values)):
        total += mass * norm.pdf(x, loc=sum(values[row] for row in kept), scale=sigma)
    return total


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.one_in(6)
def test_no_data_set_spends_more(rate: float, size: int, at_most: bool) -> None:
    """delta of both directions by integration, for all sums of rows of -1, 0, 1 and one more row."""
    sigma, rows = 1.1, 4
    x = np.linspace(-11, 11, 1101)
    cut = TruncatedPoisson(rate, rows, size, at_most)
    losses = loss_distribution([(sigma, cut, 1)], 0.01, 1e-8)
    tight = 0.0
    for others in range(rows) if at_most else [rows - 1]:
        for values in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), others):
            without, with_row = (density(cut, v, x, sigma) for v in (values, (*values, 1.0)))
            for eps in (0.0, 0.5, 1.5):
                accounted = losses.get_delta_for_epsilon(eps)
                for p, q in ((without, with_row), (with_row, without)):
                    real = np.maximum(p - math.exp(eps) * q, 0).sum() * (x[1] - x[0])
                    assert real <= accounted + 1e-9
                    tight = max(tight, real / accounted)
    assert tight > 0.3  # the integration is of the right thing


def test_an_upper_bound_on_the_rows() -> None:
    """It is worse than every number of rows below, and costs nothing while cuts are rare."""
    sigma, rate, size = 2.0, 0.05, 64

    def spent(rows: int, at_most: bool) -> float:
        entries = [(sigma, TruncatedPoisson(rate, rows, size, at_most), 50)]
        return epsilon(entries, DELTA, "pld", eps_error=0.2)

    bound = spent(1000, True)
    assert max(spent(rows, False) for rows in (10, 64, 65, 300, 700, 900, 999, 1000)) <= bound
    assert spent(600, True) == pytest.approx(spent(600, False), abs=1e-3)
    assert spent(2000, True) > spent(1000, True) > epsilon([(sigma, rate, 50)], DELTA, "pld")


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_other_accountants_refuse(accountant: str) -> None:
    fix = r"max_batch_size=64\. Use accountant='pld'"
    with refused(fix):
        epsilon([(1.0, 0.05, 3), (1.0, CUT, 5)], DELTA, accountant)
    with refused(fix):
        find_noise_multiplier(
            target_epsilon=1, target_delta=DELTA, sample_rate=CUT, steps=5, accountant=accountant
        )
    with refused(fix):
        hpo_epsilon([(1.0, CUT, 5)], DELTA, Poisson(3))
    book = keep_ledger(create_accountant(accountant))
    book.step(noise_multiplier=1.0, sample_rate=0.05)
    with refused(fix):
        book.step(noise_multiplier=1.0, sample_rate=CUT)
    with refused(fix):
        book.join({"name": [(1.0, CUT, 5)]}, book.protected)
    assert book.history == [(1.0, 0.05, 1)]


@pytest.mark.parametrize("accountant", [RDPAccountant, PRVAccountant])
def test_an_accountant_that_does_not_know_it_fails(accountant: type) -> None:
    """Those of plain Opacus, which would otherwise read a rate."""
    for steps in (1, 4):
        book = accountant()
        book.history = [(1.0, CUT, steps)]
        with pytest.raises(TypeError):
            book.get_epsilon(DELTA)


def test_a_noise_multiplier() -> None:
    cut, coarse = TruncatedPoisson(0.05, 600, 40), {"accountant": "pld", "eps_error": 0.3}
    for schedule in (ConstantNoise(), StepNoise(40, 2, 0.8)):
        sigma = find_noise_multiplier(
            target_epsilon=2.0, target_delta=DELTA, sample_rate=cut, epochs=2, schedule=schedule,
            epsilon_tolerance=0.05, **coarse,
        )  # fmt: skip
        entries = history(schedule, sigma, cut, 40)
        assert sum(steps for _, _, steps in entries) == 40
        assert 1.95 <= epsilon(entries, DELTA, **coarse) <= 2.0


def test_steps_are_recorded_apart() -> None:
    """Cut and uncut, other sizes, other data sets: nothing of it is merged."""
    book = keep_ledger(create_accountant("pld"))
    kinds = [0.05, CUT, TruncatedPoisson(0.05, 1000, 65), TruncatedPoisson(0.05, 1001, 64),
             TruncatedPoisson(0.05, 1000, 64, at_most=True), CUT]  # fmt: skip
    for rate in kinds:
        for _ in range(2):
            book.step(noise_multiplier=1.0, sample_rate=rate)
    assert book.history == [(1.0, rate, 2) for rate in kinds]
    assert book.history[0] != (1.0, CUT, 2)


@pytest.mark.parametrize(
    "carried",
    [
        lambda state: json.loads(json.dumps(state)),
        lambda state: pickle.loads(pickle.dumps(state)),
        copy.deepcopy,
    ],
)
@pytest.mark.parametrize("keep", [lambda book: book, keep_ledger])
def test_states_keep_the_cut(keep: Any, carried: Any) -> None:
    book = keep(create_accountant("pld"))
    for rate in (0.05, CUT, CUT):
        book.step(noise_multiplier=1.0, sample_rate=rate)
    other = keep(create_accountant("pld"))
    other.load_state_dict(carried(book.state_dict()))
    assert other.history == book.history == [(1.0, 0.05, 1), (1.0, CUT, 2)]
    other.load_state_dict(carried(book.state_dict()))
    other.step(noise_multiplier=1.0, sample_rate=CUT)
    assert other.history == [(1.0, 0.05, 1), (1.0, CUT, 3)]
    assert pickle.loads(pickle.dumps(other)).history == other.history


def test_branches_of_cut_draws_both_count() -> None:
    trunk = keep_ledger(create_accountant("pld"))
    trunk.step(noise_multiplier=1.0, sample_rate=CUT)
    state = json.loads(json.dumps(trunk.state_dict()))
    left, right = (keep_ledger(create_accountant("pld")) for _ in range(2))
    for branch in (left, right):
        branch.load_state_dict(state)
        branch.step(noise_multiplier=1.0, sample_rate=CUT)
    left.load_state_dict(json.loads(json.dumps(right.state_dict())))
    assert left.history == [(1.0, CUT, 3)]


@pytest.mark.parametrize(
    "rate", [{"rate": 0.1}, {"rate": 2.0, "rows": 5, "max_batch_size": 2}, {"q": 1}, "cut", None]
)
def test_a_state_that_is_damaged(rate: Any) -> None:
    book = keep_ledger(create_accountant("pld"))
    with refused("another checkpoint"):
        book.load_state_dict({"mechanism": "pld", "history": [[1.0, rate, 3]]})
    assert book.history == []


class Step:
    """What an accounting hook reads of Opacus' optimizer."""

    noise_multiplier = 1.0

    def __init__(self, joined: int) -> None:
        self.accumulated_iterations = joined


def test_an_engine_records_a_cut_draw() -> None:
    engine = FastPrivacyEngine(accountant="pld")
    design = SamplingDesign(
        TRUNCATED, CUT.rate, 3.0, 10, CUT.rows, max_batch_size=CUT.max_batch_size
    )
    draws = SampledBatches(independent=True, required=False)
    record = Releases(design, draws, lambda: engine.accountant)
    record(Step(1))
    assert engine.accountant.history == [(1.0, CUT, 1)]
    with refused("after every sampled batch", StepError):
        record(Step(2))
    assert engine.accountant.history == [(1.0, CUT, 1)]
    assert engine.get_epsilon(DELTA) == epsilon([(1.0, CUT, 1)], DELTA, "pld")
    with refused("Use accountant='pld'"):
        engine.accountant = RDPAccountant()
    assert engine.accountant.mechanism() == "pld"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0.0, 10, 2), ArgumentError),
        ((1.1, 10, 2), ArgumentError),
        ((math.nan, 10, 2), ArgumentError),
        (("0.1", 10, 2), ArgumentTypeError),
        ((0.1, 0, 2), ArgumentError),
        ((0.1, 10.0, 2), ArgumentTypeError),
        ((0.1, 10, 0), ArgumentError),
        ((0.1, 10, None), ArgumentTypeError),
        ((0.1, 10, 2, 1), ArgumentTypeError),
    ],
)
def test_values_out_of_range(arguments: tuple, error: type[Exception]) -> None:
    with refused("expects", error) if error is ArgumentError else pytest.raises(error):
        TruncatedPoisson(*arguments)

"""Random allocation: against quadrature, closed forms and bounds of another library, and in a ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

from fastclip.accounting import (
    RandomAllocation,
    TruncatedPoisson,
    allocation,
    epsilon,
    find_noise_multiplier,
    history,
    numerical,
)
from fastclip.accounting.allocation import epoch_law
from fastclip.accounting.ledger import Ledger, keep_ledger
from fastclip.accounting.ledger_file import WriteAheadLog
from fastclip.accounting.numerical import numerical_epsilon
from fastclip.accounting.transforms import gaussian_epsilon
from fastclip.clipping.schedules import ConstantNoise, StepNoise
from fastclip.core.opacus_names import create_accountant
from fastclip.errors import ArgumentError, FastclipError, StepError

# Its "command" entry says how it was made.
REFERENCES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "allocation_references.json").read_text()
)
TAIL = 1e-14


def fresh() -> None:
    for cached in (
        epoch_law,
        numerical._numerical_epsilon,
        numerical._plan,
        numerical._step_on_mesh,
    ):
        cached.cache_clear()


@pytest.fixture
def unknown() -> Any:
    """Nothing is cached before and after a test that changes the computation."""
    fresh()
    yield
    fresh()


def quadrature(sigma: float, steps: int, log_ratio: float, added: bool) -> float:
    """delta of an epoch of 2 or 3 steps: the last R_i by its closed form, the others by trapezoids."""
    spread, ratio = 1 / sigma, math.exp(log_ratio)
    z = np.linspace(-11, 11 + 2 * spread, 12_001 if steps == 2 else 1_201)
    mass = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    other = np.exp(spread * z - spread**2 / 2)
    if steps == 3:
        other, mass = np.add.outer(other, other).ravel(), np.multiply.outer(mass, mass).ravel()
    strike = steps / ratio - other if added else steps * ratio - other
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.log(np.maximum(strike, 0)) / spread + spread / 2
    if added:  # (a / t) E max(strike - R, 0)
        found = np.where(strike > 0, strike * ndtr(far) - ndtr(far - spread), 0) * ratio / steps
    else:  # E max(R - strike, 0) / t
        call = ndtr(spread - far) - np.where(strike > 0, strike, 0) * ndtr(-far)
        found = np.where(strike > 0, call, 1 - strike) / steps
    return float(mass @ found)


def delta_of(law: allocation.Law, eps: float) -> float:
    return law.infinite + float(law.masses @ np.maximum(-np.expm1(eps - law.losses), 0))


EPOCHS = [
    (0.4, 2),  # in three dimensions its quadrature is not exact enough
    *((sigma, steps) for sigma in (0.7, 1.0, 3.0) for steps in (2, 3)),
]


def check_epoch(sigma: float, steps: int) -> None:
    """Never below the truth, for any epsilon and in both directions, and close to it."""
    for added in (False, True):
        law = epoch_law(sigma, steps, TAIL, added)
        for log_ratio in np.linspace(-0.5, 3 / sigma, 8):
            exact = quadrature(sigma, steps, float(log_ratio), added)
            if exact > 1e-11:
                found = delta_of(law, float(log_ratio))
                assert exact * (1 - 1e-9) <= found <= exact * 1.003 + 10 * TAIL


@pytest.mark.parametrize(("sigma", "steps"), EPOCHS)
def test_an_epoch_dominates_its_quadrature(sigma: float, steps: int) -> None:
    check_epoch(sigma, steps)


@pytest.mark.parametrize("mutant", ["down", "size", "once", "level"])
def test_a_wrong_computation_is_noticed(
    mutant: str, monkeypatch: pytest.MonkeyPatch, unknown: None
) -> None:
    term, level = allocation._Term, allocation._Level
    cells, put, keep = term.in_cells, level._put_on_lattice, level._keep

    def down(self: Any, *at: Any) -> Any:  # rounded down, not split with unchanged mean
        low, high = cells(self, *at)
        return low + high, 0 * high

    def size(self: Any, *args: Any, **more: Any) -> None:  # the term with the sample as without it
        put(self, *args, **more)
        self.kinds = [allocation._Kind(*self.kinds[0][:2], self.term.steps)]

    def once(self: Any, *args: Any, **more: Any) -> None:  # the size-biased term twice
        put(self, *args, **more)
        if len(self.kinds) == 2:
            self.kinds = [self.kinds[1]._replace(terms=self.term.steps)]

    def lost(self: Any, numbers: Any, masses: Any) -> None:  # a level is left out
        if self.low > 1:
            keep(self, numbers, masses)

    name, change = {
        "down": ("in_cells", down), "size": ("_put_on_lattice", size),
        "once": ("_put_on_lattice", once), "level": ("_keep", lost),
    }[mutant]  # fmt: skip
    monkeypatch.setattr(term if name == "in_cells" else level, name, change)
    with pytest.raises(AssertionError):
        check_epoch(1.0, 2)


@pytest.mark.parametrize(
    ("sigma", "steps"), [(0.5, 20), (1.0, 100), (1.0, 5000), (4.0, 3000), (50.0, 7)]
)
def test_moments_of_an_epoch(sigma: float, steps: int) -> None:
    """Mass and mean are unchanged under both distributions, and the variance is hardly larger."""
    removed, added = (epoch_law(sigma, steps, 1e-12, way) for way in (False, True))
    assert removed.masses.sum() + removed.infinite == pytest.approx(1, abs=1e-9)
    assert added.masses.sum() + added.infinite == pytest.approx(1, abs=1e-9)
    assert removed.masses @ np.exp(-removed.losses) == pytest.approx(1, abs=1e-9)
    assert 1 - 1e-3 <= added.masses @ np.exp(-added.losses) <= 1 + 1e-9  # large R_i are capped
    ratio = np.expm1(removed.losses) * (removed.losses < 20)  # R - 1, of which E_P = Var_Q
    assert 1 - 1e-4 <= removed.masses @ ratio / (math.expm1(sigma**-2) / steps) <= 1.002


@pytest.mark.parametrize(
    "values", REFERENCES["values"], ids=lambda v: "-".join(map(str, v.values()))
)
def test_between_the_bounds_of_another_library(values: dict[str, Any]) -> None:
    entry = values["sigma"], RandomAllocation(values["steps"], values["times"]), values["epochs"]
    assert values["lower"] <= epsilon([entry], values["delta"]) <= values["upper"]


@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-14])
@pytest.mark.parametrize(("sigma", "steps"), EPOCHS[1:])
def test_epsilon_of_one_epoch(sigma: float, steps: int, delta: float) -> None:
    """Also for deltas that are hidden in the rounding of an untilted transform."""
    found = numerical_epsilon([(sigma, RandomAllocation(steps), 1)], delta)
    exact = max(quadrature(sigma, steps, found, added) for added in (False, True))
    assert exact <= delta * (1 + 1e-6)
    if delta > 1e-12:  # the quadrature itself is exact to about 1e-17
        assert quadrature(sigma, steps, found * (1 - 2e-3), False) >= delta


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1000), (5.0, 10_000), (0.5, 300)])
def test_deltas_below_the_rounding_of_a_transform(sigma: float, steps: int) -> None:
    """A tail of a tilted transform continues the one that is visible without."""
    coarse, fine = (epoch_law(sigma, steps, tail, False) for tail in (1e-11, 1e-17))
    assert fine.infinite < 1e-13 < coarse.infinite
    for eps in np.linspace(0, float(coarse.losses[-1]), 50):
        reached = delta_of(fine, eps)
        if reached > 1e4 * coarse.infinite:
            assert delta_of(coarse, eps) == pytest.approx(reached, rel=1e-3)
    assert (
        np.diff(np.log([delta_of(fine, e) for e in np.linspace(0, fine.losses[-1], 9)])) < 0
    ).all()


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
def test_full_participation_is_a_gaussian_mechanism(delta: float) -> None:
    for times in (1, 4):
        found = epsilon([(2.0, RandomAllocation(times, times), 3)], delta)
        assert found == pytest.approx(gaussian_epsilon(math.sqrt(3 * times) / 2, delta), rel=1e-12)


def test_monotone() -> None:
    def spent(sigma: float = 1.0, steps: int = 50, times: int = 1, epochs: int = 4) -> float:
        return epsilon([(sigma, RandomAllocation(steps, times), epochs)], 1e-6)

    for name, values in {
        "sigma": (8.0, 2.0, 1.0, 0.6, 0.3, 0.1), "steps": (10**5, 3000, 51, 50, 9, 2, 1),
        "times": (1, 2, 3, 10, 50), "epochs": (1, 2, 3, 4, 9, 13, 16, 17, 40),
    }.items():  # fmt: skip
        found = [spent(**{name: value}) for value in values]
        assert found == sorted(found)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 0.24, 0.26, 0.5, 30.0, 1e4, 1e8])
def test_never_more_than_without_amplification(sigma: float) -> None:
    for allocated in (RandomAllocation(20), RandomAllocation(7, 3)):
        full = gaussian_epsilon(math.sqrt(5 * allocated.times) / sigma, 1e-5)
        assert 0 <= epsilon([(sigma, allocated, 5)], 1e-5) <= full


def test_several_times_are_blocks() -> None:
    assert RandomAllocation(100, 4).blocks() == {25: 4}
    assert RandomAllocation(103, 4).blocks() == {25: 1, 26: 3}
    several = epsilon([(1.0, RandomAllocation(103, 4), 2)], 1e-5)
    blocks = [(1.0, RandomAllocation(26), 6), (1.0, RandomAllocation(25), 2)]
    assert several == epsilon(blocks, 1e-5)


def test_with_other_samplings() -> None:
    epochs, steps, full = (1.0, RandomAllocation(50, 2), 2), (1.0, 0.02, 40), (9.0, 1.0, 3)
    found = epsilon([epochs, steps, full], 1e-5)
    assert found == epsilon(
        [full, (1.0, RandomAllocation(50, 2), 1), steps, (*epochs[:2], 1)], 1e-5
    )
    assert found > epsilon([epochs, steps], 1e-5) > max(epsilon([e], 1e-5) for e in (epochs, steps))
    truncated = (1.0, TruncatedPoisson(0.02, 10**6, 10**6), 40)
    assert found == pytest.approx(epsilon([epochs, truncated, full], 1e-5, "pld"), rel=0.01)


@pytest.mark.parametrize("rate", [0.01, RandomAllocation(100), RandomAllocation(30, 2)])
def test_one_more_step_uses_the_same_plan(rate: Any, unknown: None) -> None:
    found = [numerical_epsilon([(1.0, rate, n)], 1e-5) for n in range(33, 49)]
    assert numerical._plan.cache_info().misses == 1
    assert found == sorted(found)


def test_a_plan_for_more_steps_is_tight(monkeypatch: pytest.MonkeyPatch, unknown: None) -> None:
    runs = [[(1.0, RandomAllocation(100), n), (0.8, 0.01, n)] for n in (1, 5, 9, 17, 41, 130)]
    found = [numerical_epsilon(run, delta) for run in runs for delta in (1e-5, 1e-12)]
    fresh()
    monkeypatch.setattr(numerical, "_SEPARATE", 0)
    exact = [numerical_epsilon(run, delta) for run in runs for delta in (1e-5, 1e-12)]
    assert found == pytest.approx(exact, rel=1e-3)


def test_plans_of_whole_epochs() -> None:
    """An epoch has the least noise of its steps, and counts in full."""
    allocated = RandomAllocation(100, 2)
    assert history(ConstantNoise(), 2.0, allocated, 301) == [(2.0, allocated, 4)]
    falling = StepNoise(total_steps=600, stages=3, decay=0.5)
    levels = [falling.level(stage) for stage in range(3)]
    planned = history(falling, 1.0, allocated, 600)
    assert planned == [(level, allocated, 2) for level in levels]
    uneven = StepNoise(total_steps=450, stages=3, decay=0.5)
    assert [entry[2] for entry in history(uneven, 1.0, allocated, 450)] == [1, 2, 2]


def test_calibration() -> None:
    options: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 10}
    sigma = find_noise_multiplier(sample_rate=RandomAllocation(100), **options)
    assert 1.98 <= epsilon([(sigma, RandomAllocation(100), 10)], 1e-5) <= 2
    assert sigma < find_noise_multiplier(sample_rate=0.01, **options)
    with pytest.raises(ArgumentError, match="cannot account for RandomAllocation"):
        find_noise_multiplier(sample_rate=RandomAllocation(100), accountant="rdp", **options)


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_a_ledger_records_epochs(accountant: str, tmp_path: Path) -> None:
    def opened() -> Ledger:
        return keep_ledger(create_accountant(accountant))

    ledger, allocated = opened(), RandomAllocation(100, 3)
    log = WriteAheadLog(tmp_path / "ledger")
    ledger.count(log)
    ledger.keep_in(log)
    for sampling in (allocated, allocated, 0.1, RandomAllocation(100)):
        ledger.step(noise_multiplier=1.5, sample_rate=sampling * 1)
    steps = [(1.5, allocated, 2), (1.5, 0.1, 1), (1.5, RandomAllocation(100), 1)]
    assert ledger.history == steps
    assert ledger.get_epsilon(1e-5) == epsilon(steps, 1e-5)
    log.close()
    resumed, read = opened(), opened()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    read.count(WriteAheadLog(tmp_path / "ledger"))
    assert resumed.history == read.history == steps
    resumed.load_state_dict(ledger.state_dict())  # the same run counts once
    assert resumed.history == steps


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_accountants_without_an_epsilon_raise_an_error(accountant: str) -> None:
    ledger = keep_ledger(create_accountant(accountant))
    with pytest.raises(ArgumentError, match="Use accountant='prv' or 'pld'"):
        ledger.step(noise_multiplier=1.0, sample_rate=RandomAllocation(10))
    assert ledger.history == []
    with pytest.raises(ArgumentError, match="Use accountant='prv' or 'pld'"):
        epsilon([(1.0, RandomAllocation(10), 1)], 1e-5, accountant)


def test_arguments() -> None:
    for wrong in ((0,), (2.5,), (3, 4), (3, 0), (True,), ("3",)):
        with pytest.raises(FastclipError):
            RandomAllocation(*wrong)
    with pytest.raises(StepError, match="joins 2 batches"):
        _ = RandomAllocation(4) * 2
    with pytest.raises(TypeError):
        _ = RandomAllocation(4) * 0.5
    assert {RandomAllocation(4): 1}[RandomAllocation(4, 1)] == 1

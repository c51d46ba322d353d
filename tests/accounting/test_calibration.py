"""The noise multiplier of a budget: Opacus' where both have one accountant, else within tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from opacus.accountants.utils import get_noise_multiplier

from fastclip.accounting import calibration, epsilon, find_noise_multiplier, history
from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    StagedNoise,
    StepNoise,
)
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.accounting.runs import CHANGING, STEPS, cause_and_fix

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order", "ignore:GDP accounting")
DELTA = 1e-5
RATE = 0.02
RUN = {"target_delta": DELTA, "sample_rate": RATE, "steps": STEPS}


@pytest.mark.parametrize(
    ("accountant", "length"),
    [
        ("rdp", {"epochs": 3}),
        ("rdp", {"steps": 41}),
        ("gdp", {"epochs": 3}),
    ],
)
def test_constant_noise_is_opacus(accountant: str, length: dict[str, Any]) -> None:
    """At a tolerance of at most 1 %, to which ours is held."""
    budget = {
        "target_epsilon": 0.8, "target_delta": DELTA, "sample_rate": 0.05, "epsilon_tolerance": 0.008,
        **length,
    }  # fmt: skip
    theirs = get_noise_multiplier(**budget, accountant=accountant)
    assert find_noise_multiplier(**budget, accountant=accountant) == theirs


def test_a_part_of_a_pass_counts_its_steps() -> None:
    """2.55 / 0.05 is 50.99... in floating point, of which Opacus takes 50 steps; a loop takes 51."""
    budget = {
        "target_epsilon": 0.8,
        "target_delta": DELTA,
        "sample_rate": 0.05,
        "accountant": "rdp",
        "epsilon_tolerance": 0.008,
    }
    sigma = find_noise_multiplier(**budget, epochs=2.55)
    assert sigma == get_noise_multiplier(**budget, steps=51)
    assert sigma > get_noise_multiplier(**budget, epochs=2.55)


def test_options_reach_the_accountant() -> None:
    budget = {**RUN, "target_epsilon": 5.0, "accountant": "rdp", "alphas": [16]}
    sigma = find_noise_multiplier(**budget)
    assert sigma == get_noise_multiplier(**budget)
    assert sigma > get_noise_multiplier(**{**budget, "alphas": range(2, 17)})
    staged = find_noise_multiplier(**budget, schedule=StagedNoise(STEPS))
    spent = epsilon(history(StagedNoise(STEPS), staged, RATE, STEPS), DELTA, "rdp", alphas=[16])
    assert 4.99 <= spent <= 5


def test_a_schedule_that_does_not_change_is_opacus() -> None:
    budget = {**RUN, "target_epsilon": 1.5, "accountant": "rdp"}
    flat = StepNoise(STEPS, 3, decay=1.0)
    assert find_noise_multiplier(**budget, schedule=flat) == get_noise_multiplier(**budget)


@pytest.mark.parametrize("target", [0.4, 3.0])
@pytest.mark.parametrize("name", CHANGING)
def test_schedules_reach_the_target(name: str, target: float) -> None:
    check(CHANGING[name], "rdp", target, 0.01)


@pytest.mark.parametrize(
    ("schedule", "target", "tolerance"),
    [
        (StagedNoise(STEPS, 2), 2.0, 0.01),
        (LinearNoise(STEPS, 2), 0.3, 0.01),
        (ExponentialNoise(STEPS, 2, 3.0), 4.0, 0.3),
    ],
)
def test_schedules_reach_the_target_by_prv(schedule: Any, target: float, tolerance: float) -> None:
    check(schedule, "prv", target, tolerance)


def check(schedule: Any, accountant: str, target: float, tolerance: float) -> None:
    sigma = find_noise_multiplier(
        **RUN,
        target_epsilon=target,
        schedule=schedule,
        accountant=accountant,
        epsilon_tolerance=tolerance,
    )
    spent = epsilon(history(schedule, sigma, RATE, STEPS), DELTA, accountant)
    assert target - tolerance <= spent <= target


# Epsilons that an accountant might report for a multiplier.
def wavy(sigma: float) -> float:
    return 10 / sigma + 0.3 * math.sin(40 * sigma)


def broken_below_two(sigma: float) -> float:
    if sigma < 2:
        raise ArgumentError("PRV gave up")
    return 1 / sigma


def jumping(sigma: float) -> float:
    return 5.0 if sigma < 3 else 0.1


@pytest.mark.parametrize(
    ("curve", "target", "within"),
    [(wavy, 2.0, True), (broken_below_two, 0.4, True), (broken_below_two, 3.0, False),
     (jumping, 1.0, False), (lambda sigma: 0.5, 1.0, False), (lambda sigma: 0.5, 0.505, True)],
)  # fmt: skip
def test_the_search_ends_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, curve: Callable[[float], float], target: float, within: bool
) -> None:
    """Whatever the accountant does: not monotone, failing for little noise, not continuous."""
    calls = []

    def fake(entries: list[tuple[float, float, int]], *_: Any, **__: Any) -> float:
        calls.append(entries[-1][0])
        return curve(entries[-1][0])

    monkeypatch.setattr(calibration, "epsilon", fake)
    schedule = StepNoise(STEPS, 3, decay=0.5)
    sigma = find_noise_multiplier(**RUN, target_epsilon=target, schedule=schedule)
    last = sigma * 0.25
    assert curve(last) <= target
    assert len(calls) <= 141
    assert (target - curve(last) <= 0.01) == within
    if curve in (jumping, broken_below_two) and not within:  # then the least noise there is
        assert last == pytest.approx(3.0 if curve is jumping else 2.0, rel=1e-9)


@pytest.mark.parametrize("schedule", [ConstantNoise(), StagedNoise(STEPS)])
def test_a_target_out_of_reach(schedule: Any) -> None:
    """RDP's grid of orders leaves a floor that no noise gets under; PRV has none."""
    budget = {**RUN, "target_epsilon": 1e-4, "schedule": schedule}
    with pytest.raises(
        ArgumentError, match=r"Raise target_epsilon .*use accountant='prv'"
    ) as caught:
        find_noise_multiplier(**budget, accountant="rdp")
    assert cause_and_fix(caught.value)
    sigma = find_noise_multiplier(**budget, accountant="prv")
    assert 0.99e-4 <= epsilon(history(schedule, sigma, RATE, STEPS), DELTA) <= 1e-4


@pytest.mark.parametrize("accountant", ["prv", "gdp"])
@pytest.mark.parametrize("target", [0.001, 0.04, 50.0, 1000.0])
def test_small_and_large_targets(target: float, accountant: str) -> None:
    """The answer spends at least 99 % of the budget, whatever the tolerance is, and never more."""
    budget = {"target_delta": DELTA, "sample_rate": 0.125, "steps": 24}
    sigma = find_noise_multiplier(**budget, target_epsilon=target, accountant=accountant)
    assert 0.99 * target <= epsilon([(sigma, 0.125, 24)], DELTA, accountant) <= target
    if accountant == "prv":  # less noise would not keep the budget by RDP's bound from below
        assert epsilon([(sigma, 0.125, 24)], DELTA, "rdp") >= target


@pytest.mark.parametrize("name", CHANGING)
def test_gdp_refuses_changing_noise(name: str) -> None:
    with pytest.raises(ArgumentError, match="'prv' or 'rdp'") as caught:
        find_noise_multiplier(**RUN, target_epsilon=1.0, schedule=CHANGING[name], accountant="gdp")
    assert cause_and_fix(caught.value)


def test_noise_that_fades_to_nothing() -> None:
    class Fading(ConstantNoise):  # the schedules of the library refuse to be so
        def runs(self, steps: int) -> list[tuple[float, int]]:
            return [(1.0, steps - 1), (0.0, 1)]

    with pytest.raises(ArgumentError, match="falls to 0"):
        find_noise_multiplier(**RUN, target_epsilon=1.0, schedule=Fading())


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"target_epsilon": 0}, ArgumentError),
        ({"target_epsilon": math.inf}, ArgumentError),
        ({"target_epsilon": "1"}, ArgumentTypeError),
        ({"target_delta": 0.0}, ArgumentError),
        ({"target_delta": 1}, ArgumentError),
        ({"sample_rate": 0}, ArgumentError),
        ({"sample_rate": 1.5}, ArgumentError),
        ({"steps": 0}, ArgumentError),
        ({"steps": None}, ArgumentError),
        ({"epochs": 2}, ArgumentError),
        ({"steps": None, "epochs": -1}, ArgumentError),
        ({"epsilon_tolerance": 0}, ArgumentError),
        ({"accountant": "moments"}, ArgumentError),
    ],
)
def test_refused(changed: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        find_noise_multiplier(**{**RUN, "target_epsilon": 1.0, **changed})
    assert cause_and_fix(caught.value)


@pytest.mark.parametrize("near", [1e-3, 0.7, 1.37, 40.0])
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_guess_changes_nothing(accountant: str, near: float) -> None:
    budget = {
        **RUN,
        "target_epsilon": 1.5,
        "accountant": accountant,
        "schedule": StagedNoise(STEPS),
    }
    assert find_noise_multiplier(**budget, near=near) == find_noise_multiplier(**budget)


def test_a_good_guess_saves_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        calibration, "epsilon", lambda *run, **_: asked.append(run) or epsilon(*run)
    )
    budget = {**RUN, "target_epsilon": 1.5, "accountant": "rdp"}
    sigma = find_noise_multiplier(**budget)
    whole = len(asked)
    asked.clear()
    assert find_noise_multiplier(**budget, near=1.02 * sigma) == sigma
    assert len(asked) <= 7 < whole


def test_a_guess_is_a_positive_number() -> None:
    with pytest.raises(ArgumentError, match="near expects"):
        find_noise_multiplier(**RUN, target_epsilon=1.0, near=0.0)

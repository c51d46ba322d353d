"""Calibration of the first step's noise multiplier to the privacy budget of a planned run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.epsilon import (
    check_constant_noise,
    checked,
    epsilon,
    history,
    open_accountant,
)
from fastclip.accounting.rdp import quiet_orders
from fastclip.accounting.steps import History, Rate, check_not_truncated, checked_rate, probability
from fastclip.clipping.schedules import ConstantNoise, NoiseSchedule
from fastclip.core.checks import between, positive, whole
from fastclip.errors import ArgumentError

_CONSTANT = ConstantNoise()
_FIRST, _LARGEST = 20.0, 1e6
"""Start and end of the search for the least multiplier of the run, as in Opacus."""
_HALVINGS = 100
_SHARE = 0.01
"""Largest share of the target by which epsilon may stay below it, for any tolerance."""
_MARGIN, _TRIES, _SLOPE = 0.15, 2, -1.5
"""Of a bracket: its distance in units of the tolerance, attempts per end, and a first guess of the slope
of log epsilon over log sigma."""


def find_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: Rate,
    epochs: float | None = None,
    steps: int | None = None,
    schedule: NoiseSchedule = _CONSTANT,
    accountant: str = "prv",
    epsilon_tolerance: float = 0.01,
    reserved: History = (),
    near: float | None = None,
    **options: Any,
) -> float:
    """Find sigma_1 for which a planned run of `steps` steps spends its privacy budget.

    Formal guarantee: the run with this sigma_1, this schedule and this length is
    (target_epsilon, target_delta)-DP by `accountant`, under Poisson sampling and for the neighbors
    of `fastclip.accounting.epsilon`. A shorter run spends less, and a longer one more. The schedule's
    own planned length is not used.

    Args:
        target_epsilon: epsilon of the budget.
        target_delta: delta of the budget.
        sample_rate: q in (0, 1], which is 1 / len(data_loader) in Opacus, a TruncatedPoisson,
            or a RandomAllocation.
        epochs: length in passes over the data, `steps_of(sample_rate, epochs)` steps. With a
            RandomAllocation in epochs of its t steps.
        steps: length in real steps. Pass either epochs or steps.
        schedule: schedule of the noise multiplier during the run.
        accountant: "prv", "pld" or "rdp", or "gdp" for constant noise.
        epsilon_tolerance: how far below the target epsilon may stay, at most 1 % of the target.
        reserved: (noise multiplier, sample rate, steps) of other releases that the budget has to cover,
            such as counts of the training set. Their noise is fixed.
        near: a guess of sigma_1, which saves evaluations. The result is unchanged as long as the
            accountant's epsilon falls with sigma.
        options: options of the accountant (`eps_error`, `delta_error`; `alphas`).

    Returns:
        sigma_1 with target_epsilon - epsilon_tolerance <= epsilon <= target_epsilon. For constant
        noise and an equal tolerance it equals opacus.accountants.utils.get_noise_multiplier, if both
        find the same epsilons. If epsilon jumps past that interval, the smallest sigma_1 found that
        keeps the budget.

    Raises:
        ArgumentError: for a value out of range, or a target that no multiplier reaches.
    """
    target = positive("target_epsilon", target_epsilon)
    delta = between("target_delta", target_delta, 0, 1)
    tolerance = positive("epsilon_tolerance", epsilon_tolerance)
    unit = history(schedule, 1.0, sample_rate, planned_steps(sample_rate, epochs, steps))
    factors = [factor for factor, _, _ in unit]
    if not min(factors) > 0:
        raise ArgumentError(
            "The schedule's noise falls to 0 during the run, so no noise multiplier reaches "
            "target_epsilon. Choose a schedule that decays more slowly.",
            doc="privacy-budget",
        )
    open_accountant(accountant)
    check_not_truncated(unit, accountant)
    others = checked(reserved)
    check_not_truncated(others, accountant)
    if accountant == "gdp":
        check_constant_noise([*unit, *others])

    def spent(least: float) -> float:
        """Return epsilon at the run's least multiplier, or inf if the accountant fails on it."""
        scaled = [(least * (factor / min(factors)), rate, length) for factor, rate, length in unit]
        try:
            with quiet_orders():
                return epsilon([*scaled, *others], delta, accountant, **options)
        except ArgumentError:
            return math.inf

    if others and not epsilon(others, delta, accountant, **options) < target:
        raise ArgumentError(
            f"The reserved counts alone spend target_epsilon={target:g} or more, and nothing is left "
            "for training. Raise their noise_multiplier, or reserve fewer counts.",
            doc="privacy-budget",
        )
    tolerance = min(tolerance, _SHARE * target)
    if near is not None:
        falling = _Falling(spent, target, tolerance)
        falling.bracket(positive("near", near) * min(factors))
        return _search(falling, target, tolerance, accountant) / min(factors)
    return _search(spent, target, tolerance, accountant) / min(factors)


def steps_of(rate: float, epochs: float = 1) -> int:
    """Return the steps in `epochs` passes at sampling rate q. A pass is 1 / q steps, rounded.

    The samplers and the budgets use the same number. The floor of 1 / q loses a step for some loader
    lengths n, because 1 / (1 / 49) is below 49 in floating point. The ceiling adds one for others.

    Args:
        rate: q, in (0, 1].
        epochs: passes, 0 or more. A fraction of a step counts as a step.
    """
    return in_passes(max(1, round(1 / rate)), epochs)


def in_passes(steps: int, epochs: float) -> int:
    """Return the steps of `epochs` passes of `steps` steps each."""
    return math.ceil(epochs * steps)  # no tolerance: transformers' Trainer rounds the same product


def planned_steps(sample_rate: Rate, epochs: float | None, steps: int | None) -> int:
    """Return the real steps of a run from either epochs or steps.

    Raises:
        ArgumentError: if both or none is given, or if it is not positive.
    """
    if (epochs is None) == (steps is None):
        raise ArgumentError(f"Expected either epochs or steps, got epochs={epochs}, steps={steps}.")
    if steps is not None:
        return whole("steps", steps, 1)
    rate, passes = checked_rate(sample_rate), positive("epochs", epochs)
    if isinstance(rate, RandomAllocation):
        return in_passes(rate.steps, passes)
    return steps_of(probability(rate), passes)


def _search(
    spent: Callable[[float], float], target: float, tolerance: float, accountant: str
) -> float:
    """Bisect as Opacus does. The result was evaluated itself, so `spent` need not be monotone."""
    low, high, reached = 0.0, _FIRST, spent(_FIRST)
    while reached > target:
        if high > _LARGEST:
            raise _unreachable(target, accountant, reached, high)
        low, high = high, 2 * high
        reached = spent(high)
    for _ in range(_HALVINGS):
        if target - reached <= tolerance or high - low <= 1e-12 * high:
            break
        middle = (low + high) / 2
        found = spent(middle)
        if found <= target:
            high, reached = middle, found
        else:
            low = middle
    return high


class _Falling:
    """Epsilon as a falling function of sigma, evaluated only if its earlier values leave a doubt.

    Bisection asks whether epsilon is above the target, within the tolerance, or below both. A value
    above the target answers for all smaller sigma, and one below the tolerance for all larger sigma.

    Args:
        spent: epsilon at a multiplier.
        target: epsilon of the budget.
        tolerance: how far below the target epsilon may stay.
    """

    def __init__(self, spent: Callable[[float], float], target: float, tolerance: float) -> None:
        self._spent, self._target, self._least = spent, target, target - tolerance
        self._small, self._high = 0.0, math.inf  # the largest sigma with epsilon above the target
        self._large, self._low = math.inf, 0.0  # the smallest one with epsilon below the tolerance
        self._points: list[tuple[float, float]] = []  # logarithms of sigma and epsilon

    def __call__(self, sigma: float) -> float:
        """Return epsilon, or that of a known sigma if both are on the same side of the interval."""
        if sigma <= self._small:
            return self._high
        if sigma >= self._large:
            return self._low
        found = self._spent(sigma)
        if found > self._target:
            self._small, self._high = sigma, found
        elif found < self._least:
            self._large, self._low = sigma, found
        if 0 < found < math.inf:
            self._points.append((math.log(sigma), math.log(found)))
        return found

    def bracket(self, guess: float) -> None:
        """Evaluate at a guess, and then just outside of both ends of the interval."""
        margin = _MARGIN * (self._target - self._least)
        self(guess)
        for _ in range(_TRIES):
            if self._points and self._low < self._least - 3 * margin:
                self(self._at(self._least - margin))
        for _ in range(_TRIES):
            if self._points and self._high > self._target + 3 * margin:
                self(self._at(self._target + margin))

    def _at(self, wanted: float) -> float:
        """Return about the sigma of an epsilon, by a power law through the last points."""
        x, y = self._points[-1]
        slope = _SLOPE
        if len(self._points) > 1:
            before, value = self._points[-2]
            slope = (y - value) / (x - before) if x != before else slope
        slope = min(max(slope, -20.0), -0.3)
        return math.exp(x + min(max((math.log(wanted) - y) / slope, -0.7), 0.7))


def _unreachable(target: float, accountant: str, reached: float, sigma: float) -> ArgumentError:
    other = ", or use accountant='prv'" if accountant == "rdp" else ""
    return ArgumentError(
        f"No noise multiplier reaches target_epsilon={target:g} ({accountant!r} still finds "
        f"{reached:.3g} at {sigma:.3g}). Raise target_epsilon or target_delta, or plan fewer "
        f"steps{other}.",
        doc="privacy-budget",
    )

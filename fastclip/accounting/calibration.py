"""The first step's noise multiplier for a privacy budget, over a whole planned run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from opacus.accountants.utils import get_noise_multiplier

from fastclip.accounting.history import (
    Entry,
    epsilon,
    history,
    open_accountant,
    refuse_changing_noise,
)
from fastclip.accounting.rdp import quiet_orders, quiet_prv
from fastclip.accounting.truncation import Rate, checked_rate, probability, refuse_truncated
from fastclip.checks import between, positive, whole
from fastclip.clipping.schedules import ConstantNoise, NoiseSchedule
from fastclip.errors import ArgumentError

_CONSTANT = ConstantNoise()
_DOUBLINGS = 20  # up to a million times the multiplier the search starts at, as in Opacus
_SHRINK = 0.7  # small: PRV's cost explodes when the noise is far below what the target needs
_HALVINGS = 60


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
    **options: Any,
) -> float:
    """sigma_1 for which a planned run of `steps` steps spends its privacy budget.

    Formal guarantee: the run with this sigma_1, this schedule and this length is
    (target_epsilon, target_delta)-DP by `accountant`, under Poisson sampling and for the neighbours
    of `fastclip.accounting.epsilon`. A run that stops early or goes on spends
    less or more; the schedule's own planned length does not enter.

    Args:
        target_epsilon: the budget.
        target_delta: the budget.
        sample_rate: q in (0, 1]; Opacus uses 1 / len(data_loader). Or a TruncatedPoisson.
        epochs: length in passes over the data, `steps_of(sample_rate, epochs)` steps.
        steps: length in real steps; give either.
        schedule: how the multiplier changes during the run.
        accountant: "prv", "pld" or "rdp"; "gdp" for constant noise.
        epsilon_tolerance: how far below the target epsilon may stay.
        options: of the accountant (`eps_error`, `delta_error`; `alphas`).

    Returns:
        sigma_1 with target_epsilon - epsilon_tolerance <= epsilon <= target_epsilon. For constant
        noise it is opacus.accountants.utils.get_noise_multiplier's, unless float64 has rounded that
        one's epsilon down. Where epsilon jumps past that
        interval, the smallest sigma_1 found that keeps the budget.

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
            "the schedule's noise falls to 0 during the run, so that no target_epsilon can be "
            "reached: let it decay more slowly"
        )
    open_accountant(accountant)
    refuse_truncated(unit, accountant)
    if accountant == "gdp":
        refuse_changing_noise(unit)

    def spent(sigma: float) -> float:
        """Epsilon, inf where the accountant gives up: it does so for too little noise."""
        try:
            with quiet_orders():
                return epsilon(_scaled(unit, sigma), delta, accountant, **options)
        except ArgumentError:
            return math.inf

    if len(unit) == 1:
        _, rate, length = unit[0]
        constant = _by_opacus(
            target, delta, rate, length, accountant, epsilon_tolerance=tolerance, **options
        )
        if spent(constant / factors[0]) <= target:
            return constant / factors[0]
    return _search(spent, target, tolerance, start=1 / min(factors))


def steps_of(rate: float, epochs: float = 1) -> int:
    """Steps in `epochs` passes at sampling rate q: a pass is 1 / q steps, to the nearest integer.

    The samplers take exactly as many and budgets are planned for as many. (The floor of 1 / q loses a
    step for some loader lengths n, since 1 / (1 / 49) is below 49; the ceiling adds one for others.)

    Args:
        rate: q, in (0, 1].
        epochs: passes, 0 or more; a fraction of a step counts as a step.
    """
    return in_passes(max(1, round(1 / rate)), epochs)


def in_passes(steps: int, epochs: float) -> int:
    """Steps of `epochs` passes of so many."""
    return math.ceil(epochs * steps)  # no tolerance: transformers' Trainer rounds the same product


def planned_steps(sample_rate: Rate, epochs: float | None, steps: int | None) -> int:
    """Real steps of a run given by exactly one of its lengths.

    Raises:
        ArgumentError: if both or none is given, or it is not positive.
    """
    if (epochs is None) == (steps is None):
        raise ArgumentError(f"give either epochs or steps, got epochs={epochs}, steps={steps}")
    if steps is not None:
        return whole("steps", steps, 1)
    rate = probability(checked_rate(sample_rate))
    return steps_of(rate, positive("epochs", epochs))


def _scaled(unit: list[Entry], sigma: float) -> list[Entry]:
    return [(sigma * factor, rate, length) for factor, rate, length in unit]


def _by_opacus(
    target: float, delta: float, rate: Rate, steps: int, accountant: str, **options: Any
) -> float:
    try:
        with quiet_prv([rate]) if accountant == "prv" else nullcontext():
            return get_noise_multiplier(
                target_epsilon=target,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant=accountant,
                **options,
            )
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        raise _unreachable(target, f"{accountant}: {str(error).rstrip('.')}") from error


def _search(
    spent: Callable[[float], float], target: float, tolerance: float, start: float
) -> float:
    """Smallest known sigma with spent(sigma) <= target, by at most 141 evaluations.

    `spent` need not be monotone: the answer is always a sigma that was evaluated.
    """
    low = high = start
    too_much, reached = math.inf, spent(start)  # epsilon at low, once low < high, and at high
    for _ in range(_DOUBLINGS):
        if reached <= target:
            break
        low, too_much, high = high, reached, 2 * high
        reached = spent(high)
    if reached > target:
        raise _unreachable(target, f"it is still {reached:.3g} at {high:.3g}")
    for _ in range(_HALVINGS):
        if low < high or target - reached <= tolerance:
            break
        low, found = _SHRINK * high, spent(_SHRINK * high)
        if found <= target:
            high, reached = low, found
        else:
            too_much = found
    for attempt in range(_HALVINGS):
        if target - reached <= tolerance:
            break
        candidate = (low + high) / 2
        if attempt % 2 == 0:  # every other one halves, so that no curve can stall the search
            aim = target - tolerance / 2
            candidate = _power_law(low, too_much, high, reached, aim, candidate)
        found = spent(candidate)
        if found <= target:
            high, reached = candidate, found
        else:
            low, too_much = candidate, found
    return high


def _power_law(
    low: float, at_low: float, high: float, at_high: float, aim: float, otherwise: float
) -> float:
    """Where the power law through two points of epsilon takes the value `aim`, between them."""
    if not at_high > 0 or not math.isfinite(at_low) or low == high:
        return otherwise
    exponent = math.log(high / low) / math.log(at_low / at_high)
    return min(max(high * (at_high / aim) ** exponent, low), high)


def _unreachable(target: float, why: str) -> ArgumentError:
    return ArgumentError(
        f"no noise multiplier reaches target_epsilon={target:g} ({why}): raise target_epsilon or "
        "target_delta, plan fewer steps, or give the accountant finer options (eps_error, alphas)"
    )

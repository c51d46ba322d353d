"""From what an attacker achieves to epsilon, within the family of mechanisms that is claimed.

A run that claims a history of subsampled Gaussian steps lets no attacker find more than the share
(1 + delta(0)) / 2 of canaries that are in or out by fair coins, delta(0) being the total variation of
its two worst neighbours. An attacker who finds more refutes the claim, and every claim of more noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from scipy import optimize, special, stats

from fastclip.accounting.pld import loss_distribution
from fastclip.accounting.truncation import Rate, TruncatedPoisson, probability
from fastclip.audit.one_run import epsilon_of_gdp

Step = tuple[float, Rate, int]
"""Noise multiplier, sampling rate (or a draw that is cut), number of steps."""
MESH, _TAIL = 0.02, 1e-9
"""Of losses that are composed: a tight epsilon is at most MESH too large, a bound is lowered by it."""


def advantage(history: Sequence[Step]) -> float:
    """delta(0): the most by which true positives exceed false ones."""
    if all(rate == 1 for _, rate, _ in history):
        return math.erf(_mu(history) / math.sqrt(8))  # 2 Phi(mu / 2) - 1
    return float(_composed(tuple(history), _TAIL).get_delta_for_epsilon(0.0))


def tight_epsilon(history: Sequence[Step], delta: float) -> float:
    """Epsilon of a history at delta: exact at q = 1, else rounded up by its mesh."""
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(_mu(history), delta)
    return float(_composed(tuple(history), delta * 1e-3).get_epsilon_for_delta(delta))


def refuted_epsilon(history: Sequence[Step], right: int, guesses: int, significance: float,
                    delta: float) -> float:  # fmt: skip
    """The largest epsilon of the family, at any noise, that so many right guesses refute.

    Of a mechanism with cut draws it is that of any mechanism: their price is of rows that take each
    other's place, which canaries with entries of their own do not see. Guesses are independent: of
    canaries that share no coordinate of a release whose noise is claimed to be independent from
    coordinate to coordinate. Their rate is bounded below by Clopper and Pearson.

    Args:
        history: claimed; the family has its noise multipliers times any factor.
        right: of the guesses.
        guesses: each about a canary of its own, which was in with probability 1/2.
        significance: probability that the bound is wrong.
        delta: of epsilon.
    """
    rate = _least_rate(right, guesses, significance)
    found = 2 * rate - 1
    if found <= 0:
        return 0.0
    if _cut(history):
        return provable_epsilon(right, guesses, significance, delta)
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(float(2 * special.ndtri(rate)), delta)

    def scaled(log_factor: float) -> list[Step]:
        return [(sigma * math.exp(log_factor), rate, steps) for sigma, rate, steps in history]

    most = 1 - math.prod((1 - probability(rate)) ** steps for _, rate, steps in history)
    if found >= most:
        return math.inf  # no noise at all would let nobody find so many
    low, high = _bracket(lambda x: advantage(scaled(x)) - found)
    if advantage(scaled(low)) <= found:
        return tight_epsilon(scaled(low), delta) - MESH  # at the least
    factor = optimize.brentq(lambda x: advantage(scaled(x)) - found, low, high, xtol=1e-3)
    return tight_epsilon(scaled(float(factor) + 1e-3), delta) - MESH


def provable_epsilon(right: int, guesses: int, significance: float, delta: float) -> float:
    """The largest epsilon that so many right guesses refute, whatever the mechanism.

    (epsilon, delta)-DP bounds the total variation of neighbours by (e^epsilon - 1 + 2 delta) /
    (e^epsilon + 1). What is assumed is only that guesses are independent.
    """
    found = 2 * _least_rate(right, guesses, significance) - 1
    if found <= delta:
        return 0.0
    return math.inf if found >= 1 else math.log((1 + found - 2 * delta) / (1 - found))


def by_steps(history: Sequence[Step]) -> list[tuple[float, Rate]]:
    """(sigma, q) of each recorded step."""
    return [(sigma, rate) for sigma, rate, steps in history for _ in range(steps)]


def power(history: Sequence[Step], guesses: int, level: float) -> float:
    """Probability that a run with half of the noise that it records is refuted by its guesses."""
    halved = [(sigma / 2, rate, steps) for sigma, rate, steps in history]
    needed = stats.binom.isf(level, guesses, (1 + advantage(history)) / 2)
    return float(stats.binom.sf(needed, guesses, (1 + advantage(halved)) / 2))


def p_of_guesses(history: Sequence[Step], right: int, guesses: int) -> float:
    """Probability of so many right guesses, if the claim holds."""
    return float(special.bdtrc(right - 1, guesses, (1 + advantage(history)) / 2)) if right else 1.0


def _bracket(above: Callable[[float], float]) -> tuple[float, float]:
    """Factors with too little and too much noise, in logarithms; no less than a fifth of the noise."""
    low, high = 0.0, 0.0
    while above(low) < 0 and low > -1.5:
        low -= 0.25
    while above(high) > 0:
        high += 0.25
    return low, high


def _mu(history: Sequence[Step]) -> float:
    """Full batches are one Gaussian mechanism."""
    return math.sqrt(sum(steps / sigma**2 for sigma, _, steps in history))


def p_of_so_few(history: Sequence[Step], right: int, guesses: int) -> float:
    """Probability of no more right guesses, if the claim holds and the attack is the best one."""
    if _cut(history):
        return 1.0  # it is not
    return float(special.bdtr(right, guesses, (1 + advantage(history)) / 2))


def _cut(history: Sequence[Step]) -> bool:
    return any(isinstance(rate, TruncatedPoisson) for _, rate, _ in history)


@lru_cache
def _composed(history: tuple[Step, ...], tail: float) -> Any:
    return loss_distribution(list(history), MESH, tail)


def _least_rate(right: int, guesses: int, significance: float) -> float:
    """Lower bound of Clopper and Pearson."""
    return float(special.betaincinv(right, guesses - right + 1, significance)) if right else 0.0

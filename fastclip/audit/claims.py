"""From what an attacker achieves to epsilon, within the family of mechanisms that is claimed.

A run that claims a history of subsampled Gaussian steps lets no attacker find more than the share
(1 + delta(0)) / 2 of canaries that are in or out by fair coins, delta(0) being the total variation of
its two worst neighbours. An attacker who finds more refutes the claim, and every claim of more noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy import optimize, special

from fastclip.accounting.pld import loss_distribution
from fastclip.audit.one_run import epsilon_of_gdp

Step = tuple[float, float, int]
"""Noise multiplier, sampling rate, number of steps."""
_ERROR, _TAIL = 0.02, 1e-9
"""Of losses that are composed to look for a bound, which is lowered by it."""


def advantage(history: Sequence[Step]) -> float:
    """delta(0): the most by which true positives exceed false ones."""
    if all(rate == 1 for _, rate, _ in history):
        return math.erf(_mu(history) / math.sqrt(8))  # 2 Phi(mu / 2) - 1
    return float(loss_distribution(history, _ERROR, _TAIL).get_delta_for_epsilon(0.0))


def tight_epsilon(history: Sequence[Step], delta: float) -> float:
    """Epsilon of a history at delta: exact at q = 1, else rounded up by its mesh."""
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(_mu(history), delta)
    return float(loss_distribution(history, _ERROR, delta * 1e-3).get_epsilon_for_delta(delta))


def refuted_epsilon(history: Sequence[Step], right: int, guesses: int, significance: float,
                    delta: float) -> float:  # fmt: skip
    """The largest epsilon of the family, at any noise, that so many right guesses refute.

    Guesses are independent: of canaries that share no coordinate of a release whose noise is claimed to
    be independent from coordinate to coordinate. Their rate is bounded below by Clopper and Pearson.

    Args:
        history: claimed; the family has its noise multipliers times any factor.
        right: of the guesses.
        guesses: each about a canary of its own, which was in with probability 1/2.
        significance: probability that the bound is wrong.
        delta: of epsilon.
    """
    rate = float(special.betaincinv(right, guesses - right + 1, significance)) if right else 0.0
    found = 2 * rate - 1
    if found <= 0:
        return 0.0
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(float(2 * special.ndtri(rate)), delta)

    def scaled(log_factor: float) -> list[Step]:
        return [(sigma * math.exp(log_factor), rate, steps) for sigma, rate, steps in history]

    most = 1 - math.prod((1 - rate) ** steps for _, rate, steps in history)
    if found >= most:
        return math.inf  # no noise at all would let nobody find so many
    low, high = _bracket(lambda x: advantage(scaled(x)) - found)
    if advantage(scaled(low)) <= found:
        return tight_epsilon(scaled(low), delta) - _ERROR  # at the least
    factor = optimize.brentq(lambda x: advantage(scaled(x)) - found, low, high, xtol=1e-3)
    return tight_epsilon(scaled(float(factor) + 1e-3), delta) - _ERROR


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

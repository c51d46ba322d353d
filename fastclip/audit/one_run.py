"""P-values of guesses about canaries that went through one run, each put in by a fair coin of its own.

Guesses of one run may depend on each other in any way; the bounds hold all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

MOST = 200.0
"""Epsilons, and mus, that are looked for."""


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Probability of so many right guesses, if the run is (epsilon, delta)-DP for each canary.

    Steinke, Nasr and Jagielski 2023 ("Privacy Auditing with One (1) Training Run"), Theorem 5.2: with
    W ~ Binomial(guesses, 1 / (1 + e^-epsilon)), beta = P[W >= right] and alpha = max over i >= 1 of
    P[right > W >= right - i] / i, it is at most beta + 2 m delta alpha.
    """
    law = stats.binom(guesses, special.expit(epsilon))
    beta = float(law.sf(right - 1))
    if delta == 0 or right == 0:
        return min(1.0, beta)
    i = np.arange(1, right + 1)
    alpha = float(np.max((law.sf(right - i - 1) - beta) / i, initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_bound(
    canaries: int, guesses: int, right: int, significance: float, delta: float
) -> float:
    """The largest epsilon that so many right guesses rule out; 0 if none."""
    return _largest(
        lambda epsilon: p_value(canaries, guesses, right, epsilon, delta) <= significance
    )


def rules_out(canaries: int, guesses: int, right: int, mu: float, significance: float) -> bool:
    """Whether so many right guesses are too many for a run that is mu-GDP for each canary.

    Mahloujifar, Melis and Chaudhuri 2024 ("Auditing f-Differential Privacy in One Run"), Algorithm 3
    with abstentions: shares r of right and h of wrong guesses are followed down from `right`.
    """
    r = significance * right / canaries
    h = significance * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        # Of right guesses with probability r, these many would be wrong under the other coin.
        wrong = max(h, float(special.ndtr(special.ndtri(r) - mu)))
        if wrong == h:
            break  # nothing changes from here on
        r = min(1.0, r + i / (guesses - i) * (wrong - h))
        h = wrong
    return r + h > guesses / canaries


def mu_bound(canaries: int, guesses: int, right: int, significance: float) -> float:
    """The largest mu of Gaussian DP that so many right guesses rule out; 0 if none."""
    return _largest(lambda mu: rules_out(canaries, guesses, right, mu, significance))


def epsilon_of_gdp(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at delta (Dong, Roth and Su 2022, Corollary 2.13); 0 at mu = 0."""
    if mu == 0 or delta >= 1 or _log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    most = 1.0
    while _log_delta(most, mu) > math.log(delta):
        most *= 2
    return float(optimize.brentq(lambda e: _log_delta(e, mu) - math.log(delta), 0.0, most))


def _log_delta(epsilon: float, mu: float) -> float:
    first = special.log_ndtr(-epsilon / mu + mu / 2)
    second = epsilon + special.log_ndtr(-epsilon / mu - mu / 2)
    return float(first + np.log1p(-np.exp(second - first))) if second < first else -math.inf


def _largest(ruled_out: Callable[[float], bool]) -> float:
    """The largest value up to which everything is ruled out, from below."""
    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while ruled_out(high):
        if high >= MOST:
            return high
        low, high = high, 2 * high
    while high - low > 1e-6 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low

"""Privacy cost of a hyperparameter search, by the distribution of its number of trials."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from scipy.optimize import brentq

from fastclip.accounting.rdp import ORDERS, checked_orders, run_rdp, to_epsilon
from fastclip.accounting.steps import History
from fastclip.core.checks import between, keep, positive
from fastclip.errors import ArgumentError, ArgumentTypeError

# -------------------------------------------------------------------------------------------------
# Distributions of the number of trials of a private hyperparameter search, and their privacy costs.
#
# A search draws K once, in secret. It makes K runs, each with new hyperparameters from a fixed
# distribution, and releases only the best run. Theorems 2 and 6 of Papernot & Steinke 2022
# (arXiv 2110.03620) give the cost. `hpo_epsilon` lists their assumptions.


_MOST_LOG = 690.0  # exp(-690) is still a normal number, and so is its inverse


class Trials(Protocol):
    """Protocol of a distribution of the number K of trials."""

    @property
    def mean(self) -> float:
        """E[K], the expected number of runs."""

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw one K, which must stay secret."""

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Return the RDP of the released best run from that of one run, both [order]."""


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """K >= 1 with P[K = k] proportional to (1 - gamma)^k * binom(k + eta - 1, k).

    eta = 1 is the geometric distribution, eta -> 0 the logarithmic one. For one mean, a smaller eta
    has a lower privacy cost and a larger variance. Many searches then make a single run.

    Args:
        eta: shape, > -1.
        gamma: in (0, 1). Smaller values mean more trials.

    Source: Definition 1 of Papernot & Steinke 2022.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        keep(self, eta=between("eta", self.eta, -1, math.inf))
        keep(self, gamma=between("gamma", self.gamma, 0, 1))

    @classmethod
    def from_mean(cls, mean: float, eta: float = 0.0) -> TruncatedNegativeBinomial:
        """Return the distribution of shape `eta` with `mean` > 1 expected trials.

        Raises:
            ArgumentError: for a value out of range, or a mean that no representable gamma has.
        """
        between("mean", mean, 1, math.inf)
        between("eta", eta, -1, math.inf)
        if not _log_mean(eta, _MOST_LOG) > math.log(mean):
            raise ArgumentError(
                f"mean={mean:g} needs a gamma below the smallest floating-point number for "
                f"eta={eta:g}. Raise eta."
            )

        def excess(log_inverse: float) -> float:
            return _log_mean(eta, log_inverse) - math.log(mean)

        least = 1e-15
        if excess(least) > 0:
            raise ArgumentError(f"mean expects a number above 1, got {mean!r} (too close to 1).")
        return cls(eta, math.exp(-brentq(excess, least, _MOST_LOG, xtol=1e-300, rtol=1e-15)))

    @property
    def mean(self) -> float:
        """E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)); eta = 0: (1/gamma - 1)/log(1/gamma)."""
        return math.exp(_log_mean(self.eta, -math.log(self.gamma)))

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw one K, exactly distributed up to float64 rounding of its probabilities.

        Args:
            rng: generator for a reproducible K. The default is the entropy of the operating system,
                because a K that can be guessed voids the guarantee.
        """
        log_inverse = -math.log(self.gamma)
        stay = 1 - self.gamma
        log_first = math.log(stay / log_inverse) - _log_expm1_over(self.eta * log_inverse)
        return _walk(_uniform(rng), 1, log_first, lambda k: stay * (k + self.eta) / (k + 1))

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Return the RDP of the best run by Theorem 2, from that of one run at each order o > 1.

        It is e + (1 + eta) min_l [(1 - 1/l) e_l + log(1/gamma)/l] + log(E[K]) / (o - 1). The second
        order l is free, and the same best l is used for every o.
        """
        grid = checked_orders(orders)
        second = (1 - 1 / grid) * rdp - math.log(self.gamma) / grid
        return rdp + (1 + self.eta) * second.min() + math.log(self.mean) / (grid - 1)


@dataclass(frozen=True)
class Poisson:
    """K of a Poisson distribution, with a smaller variance than any truncated negative binomial.

    K = 0 means that no run is made. The release must then not depend on the data (for example an
    untrained model). Drawing K again until it is positive is another distribution, to which the
    theorem does not apply.

    Args:
        mean: expected number of trials mu, at least 1. Below 1 the theorem's bound can be negative,
            which no mechanism attains.
    """

    mean: float

    def __post_init__(self) -> None:
        if positive("mean", self.mean) < 1:
            raise ArgumentError(f"mean expects at least 1 expected trial, got {self.mean!r}.")

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw one K, 0 included, exactly distributed up to float64 rounding. `rng` is as above."""
        return _walk(_uniform(rng), 0, -self.mean, lambda k: self.mean / (k + 1))

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Return the RDP of Theorem 6, e + mu * d + log(mu) / (o - 1), at each order o > 1.

        d is a delta at which one run is (log(o / (o - 1)), d)-DP, here from the run's own RDP.
        """
        # K = 0 is covered: with E = exp((o-1) e) and M = mu exp((o-1) mu d), the exact moment of
        # the search is at most 1 + M (E - 1). This is at most the theorem's M E because M >= 1.
        grid = checked_orders(orders)
        # log delta of one run at each outer order (rows), from the RDP at each order (columns)
        gap = rdp + np.log1p(-1 / grid) + np.log1p(-1 / grid)[:, None]
        log_delta = ((grid - 1) * gap - np.log(grid)).min(axis=1)
        delta = np.exp(np.minimum(log_delta, 0))
        return rdp + self.mean * delta + math.log(self.mean) / (grid - 1)


def _log_mean(eta: float, log_inverse: float) -> float:
    """Return log E[K] of a truncated negative binomial, with `log_inverse` = log(1/gamma)."""
    # E[K] = (1 - gamma)/gamma * eta/(1 - gamma^eta), in forms that keep their digits at eta = 0
    # and at gamma = 1.
    odds = math.log(-math.expm1(-log_inverse)) + log_inverse
    return odds - math.log(log_inverse) - _log_expm1_over(-eta * log_inverse)


def _log_expm1_over(x: float) -> float:
    """Return log((exp(x) - 1) / x), which is 0 at x = 0."""
    if x == 0:
        return 0.0
    return max(x, 0.0) + math.log(-math.expm1(-abs(x)) / abs(x))


def _uniform(rng: np.random.Generator | None) -> float:
    if rng is None:
        return random.SystemRandom().random()
    if not isinstance(rng, np.random.Generator):
        raise ArgumentTypeError(
            f"rng expects a numpy.random.Generator or None, got {type(rng).__name__}."
        )
    return float(rng.random())


def _walk(uniform: float, start: int, log_first: float, ratio: Callable[[int], float]) -> int:
    """Return the k whose interval of the distribution function holds `uniform`.

    Args:
        uniform: in [0, 1).
        start: the least k, of log probability `log_first`.
        ratio: P[k + 1] / P[k].
    """
    k = start
    while log_first < -_MOST_LOG and ratio(k) > 1:  # the skipped mass is below 1e-290 in all
        log_first += math.log(ratio(k))
        k += 1
    mass, least = math.exp(log_first), math.exp(-_MOST_LOG)
    while uniform >= mass and (mass > least or ratio(k) > 1):
        uniform -= mass
        mass *= ratio(k)
        k += 1
    return k


# -------------------------------------------------------------------------------------------------


class TunedEpsilon(NamedTuple):
    """Privacy of a hyperparameter search.

    epsilon is that of the released best run, found at Renyi order `order`. base_epsilon is that of one
    run alone, by RDP on the same orders. If `order` is at an end of the grid, a wider grid may give a
    smaller epsilon, but the given one holds as well.
    """

    epsilon: float
    order: float
    base_epsilon: float


def hpo_epsilon(
    history: History,
    delta: float,
    trials: Trials,
    *,
    orders: Sequence[float] = ORDERS,
    others: Sequence[History] = (),
) -> TunedEpsilon:
    """Return epsilon of the best of K runs for a random K.

    Formal guarantee (Papernot & Steinke 2022, Theorem 2 for a truncated negative binomial K,
    Theorem 6 for a Poisson K): the released run is (epsilon, delta)-DP, under Poisson sampling and
    for the neighbors of `fastclip.accounting.epsilon`, provided that
    - every run's output, its score included, has at most the RDP of `history`. The score is
      computed on public data, or noisily with its own cost as a further entry of the history;
    - a run's hyperparameters are drawn independently, with replacement, from a distribution that is
      fixed before the search and depends neither on the data nor on other runs. Grid search, Bayesian
      optimization and early stopping of the search are excluded;
    - K comes from `trials`, independent of the data. It is drawn once and never revealed, also not
      through logs, files or the time the search took;
    - the best run by score is released, with ties broken by a fixed rule, and nothing of other runs.

    Args:
        history: (noise multiplier, sample rate, steps) of one run.
        delta: in (0, 1), for the whole search.
        trials: distribution of K.
        orders: Renyi orders above 1 to optimize over, for the bound's own order and its second one.
        others: histories of further candidates with other noise, rates or lengths, for example a tuned
            batch size. At each order the worst candidate counts.

    Returns:
        epsilon, its order, and the epsilon of one run.

    Raises:
        ArgumentError: for a delta or orders out of range.
    """
    delta = between("delta", delta, 0, 1)
    base = np.max([run_rdp(candidate, orders) for candidate in (history, *others)], axis=0)
    tuned = trials.tuned_rdp(base, orders)
    base_epsilon, _ = to_epsilon(base, orders, delta)
    return TunedEpsilon(*to_epsilon(tuned, orders, delta), base_epsilon)

"""What a differentially private hyperparameter search costs, by the law of its number of trials."""

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
# Distributions of the number of trials of a private hyperparameter search, and what each costs.
#
# A search draws K once, secretly; makes K runs, each with hyperparameters drawn afresh from a fixed
# distribution; and releases the best run only. What that costs is in Theorems 2 and 6 of Papernot &
# Steinke 2022 (arXiv 2110.03620); `hpo_epsilon` says what they assume.


_MOST_LOG = 690.0  # exp(-690) is still a normal number, and so is its inverse


class Trials(Protocol):
    """A distribution of the number K of trials."""

    @property
    def mean(self) -> float:
        """E[K], the expected number of runs."""

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """One K; keep it secret."""

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """RDP of the released best run, from that of one run, both [order]."""


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """K >= 1 with P[K = k] proportional to (1 - gamma)^k * binom(k + eta - 1, k).

    eta = 1 is the geometric distribution, eta -> 0 the logarithmic one. For one mean, a smaller eta
    costs less privacy and varies more: many searches then make a single run.

    Args:
        eta: shape, > -1.
        gamma: in (0, 1); smaller means more trials.

    Source: Definition 1 of Papernot & Steinke 2022.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        keep(self, eta=between("eta", self.eta, -1, math.inf))
        keep(self, gamma=between("gamma", self.gamma, 0, 1))

    @classmethod
    def from_mean(cls, mean: float, eta: float = 0.0) -> TruncatedNegativeBinomial:
        """The distribution of shape `eta` whose expected number of trials is `mean` > 1.

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
        """One K, exactly distributed up to float64 rounding of its probabilities.

        Args:
            rng: for a reproducible K; by default the entropy of the operating system, because a K
                that can be guessed voids the guarantee.
        """
        log_inverse = -math.log(self.gamma)
        stay = 1 - self.gamma
        log_first = math.log(stay / log_inverse) - _log_expm1_over(self.eta * log_inverse)
        return _walk(_uniform(rng), 1, log_first, lambda k: stay * (k + self.eta) / (k + 1))

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Theorem 2: one run is (o, rdp)-RDP at each order o > 1; so is the best run with these.

        e + (1 + eta) min_l [(1 - 1/l) e_l + log(1/gamma)/l] + log(E[K]) / (o - 1), where the
        second order l is free and the same best one serves every o.
        """
        grid = checked_orders(orders)
        second = (1 - 1 / grid) * rdp - math.log(self.gamma) / grid
        return rdp + (1 + self.eta) * second.min() + math.log(self.mean) / (grid - 1)


@dataclass(frozen=True)
class Poisson:
    """K of a Poisson distribution: less spread than any truncated negative binomial.

    K = 0 means that no run is made: what is then released must not depend on the data (an
    untrained model, say). Drawing K again until it is positive is another distribution, to which
    the theorem does not apply.

    Args:
        mean: expected number of trials mu, at least 1: below, the theorem's bound can fall under
            zero, which no mechanism attains.
    """

    mean: float

    def __post_init__(self) -> None:
        if positive("mean", self.mean) < 1:
            raise ArgumentError(f"mean expects at least 1 expected trial, got {self.mean!r}.")

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """One K, 0 included, exactly distributed up to float64 rounding; `rng` as above."""
        return _walk(_uniform(rng), 0, -self.mean, lambda k: self.mean / (k + 1))

    def tuned_rdp(self, rdp: np.ndarray, orders: Sequence[float]) -> np.ndarray:
        """Theorem 6: e + mu * d + log(mu) / (o - 1) at each order o > 1.

        d is a delta at which one run is (log(o / (o - 1)), d)-DP; here from the run's own RDP.
        """
        # K = 0 is covered: with E = exp((o-1) e) and M = mu exp((o-1) mu d), the exact moment of
        # the search is at most 1 + M (E - 1), which is at most the theorem's M E since M >= 1.
        grid = checked_orders(orders)
        # log delta of one run at each outer order (rows), from the RDP at each order (columns)
        gap = rdp + np.log1p(-1 / grid) + np.log1p(-1 / grid)[:, None]
        log_delta = ((grid - 1) * gap - np.log(grid)).min(axis=1)
        delta = np.exp(np.minimum(log_delta, 0))
        return rdp + self.mean * delta + math.log(self.mean) / (grid - 1)


def _log_mean(eta: float, log_inverse: float) -> float:
    """log E[K] of a truncated negative binomial, `log_inverse` = log(1/gamma)."""
    # E[K] = (1 - gamma)/gamma * eta/(1 - gamma^eta), in forms that keep their digits at eta = 0
    # and at gamma = 1.
    odds = math.log(-math.expm1(-log_inverse)) + log_inverse
    return odds - math.log(log_inverse) - _log_expm1_over(-eta * log_inverse)


def _log_expm1_over(x: float) -> float:
    """log((exp(x) - 1) / x), which is 0 at x = 0."""
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
    """The k whose interval of the distribution function holds `uniform`.

    Args:
        uniform: in [0, 1).
        start: the least k, of log probability `log_first`.
        ratio: P[k + 1] / P[k].
    """
    k = start
    while log_first < -_MOST_LOG and ratio(k) > 1:  # all of it together is less than 1e-290
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

    epsilon is that of the released best run, found at Renyi order `order`; base_epsilon that of one
    run alone, by RDP on the same orders. At an end of the orders a wider grid may find a smaller
    epsilon; the one given holds all the same.
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
    """Epsilon of the best of K runs, K random.

    Formal guarantee (Papernot & Steinke 2022, Theorem 2 for a truncated negative binomial K,
    Theorem 6 for a Poisson K): the released run is (epsilon, delta)-DP, under Poisson sampling and
    for the neighbors of `fastclip.accounting.epsilon`, provided that
    - every run's output, its score included, has at most the RDP of `history`: the score is
      computed on public data, or noisily with its own cost as a further entry of the history;
    - a run's hyperparameters are drawn independently, with replacement, from a distribution fixed
      before the search, that looks neither at the data nor at other runs: no grid search, no
      Bayesian optimisation, no early stopping of the search;
    - K comes from `trials`, independent of the data, is drawn once and never revealed: neither
      itself, nor through logs, files or the time the search took;
    - the best by score is released, ties broken by a fixed rule, and nothing of any other run.

    Args:
        history: (noise multiplier, sample rate, steps) of one run.
        delta: in (0, 1), for the whole search.
        trials: distribution of K.
        orders: Renyi orders above 1 to optimise over, both the bound's own and its second one.
        others: histories of further candidates that need other noise, rates or lengths (a tuned
            batch size, say); at each order the worst candidate counts.

    Returns:
        epsilon, the order it was found at, and the epsilon of one run.

    Raises:
        ArgumentError: for a delta or orders out of range.
    """
    delta = between("delta", delta, 0, 1)
    base = np.max([run_rdp(candidate, orders) for candidate in (history, *others)], axis=0)
    tuned = trials.tuned_rdp(base, orders)
    base_epsilon, _ = to_epsilon(base, orders, delta)
    return TunedEpsilon(*to_epsilon(tuned, orders, delta), base_epsilon)

"""Lower bounds on epsilon from scores of canaries, and p-values of guesses about one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize, special, stats
from torch import Tensor

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.pld import loss_distribution
from fastclip.accounting.steps import Rate, TruncatedPoisson, probability
from fastclip.core.checks import between
from fastclip.errors import ArgumentError, ArgumentTypeError

# -------------------------------------------------------------------------------------------------
# P-values of guesses about canaries of one run, each included by its own fair coin.
#
# The guesses of one run may depend on each other in any way. The bounds still hold.


MOST = 200.0
"""Largest epsilon, and mu, that is searched for."""


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Probability of at least `right` right guesses if the run is (epsilon, delta)-DP per canary.

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
    """The largest epsilon that `right` right guesses rule out; 0 if none."""
    return _largest(
        lambda epsilon: p_value(canaries, guesses, right, epsilon, delta) <= significance
    )


def rules_out(canaries: int, guesses: int, right: int, mu: float, significance: float) -> bool:
    """Whether `right` right guesses are too many for a run that is mu-GDP for each canary.

    Mahloujifar, Melis and Chaudhuri 2024 ("Auditing f-Differential Privacy in One Run"), Algorithm 3
    with abstentions: shares r of right and h of wrong guesses are followed down from `right`.
    """
    r = significance * right / canaries
    h = significance * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        # Under the other coin, this share of the right guesses (probability r) would be wrong.
        wrong = max(h, float(special.ndtr(special.ndtri(r) - mu)))
        if wrong == h:
            break  # nothing changes from here on
        r = min(1.0, r + i / (guesses - i) * (wrong - h))
        h = wrong
    return r + h > guesses / canaries


def mu_bound(canaries: int, guesses: int, right: int, significance: float) -> float:
    """The largest mu of Gaussian DP that `right` right guesses rule out; 0 if none."""
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
    """The largest value up to which all values are ruled out, rounded down."""
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


# -------------------------------------------------------------------------------------------------


FEWEST = 16
"""Fewest guesses for which a bound is computed."""


class CanaryScoreAuditor:
    """Computes lower bounds on epsilon from scores of canaries.

    A higher score means that a canary was in the data set. For `epsilon_one_run` and
    `epsilon_one_run_fdp`, all scores are of one run, which includes each canary by its own fair coin.
    For `epsilon_clopper_pearson` and `epsilon_from_gdp`, each score is of its own run, so scores are
    independent.

    Formal guarantee: if a run is (epsilon, delta)-DP, a bound at `significance` exceeds epsilon with at
    most that probability. The guessed canaries are fixed without the coins: the number of canaries
    alone fixes the numbers of guesses, and another part of the scores fixes the thresholds. Tests of
    several numbers share the significance. Ties are broken by coins of the operating system, so bounds
    from equal scores differ between auditors. In `of_run` the numbers of the canaries break ties.

    Args:
        in_canary_scores: [a] numbers, for the canaries that were in.
        out_canary_scores: [b] numbers, for the canaries that were out.

    Raises:
        ArgumentError, ArgumentTypeError: the scores are empty, of other shapes, or NaN.
    """

    def __init__(self, in_canary_scores: Any, out_canary_scores: Any) -> None:
        self.inside = _scores("in_canary_scores", in_canary_scores)
        self.outside = _scores("out_canary_scores", out_canary_scores)
        both = np.concatenate([self.inside, self.outside])
        coins = np.random.default_rng().random(len(both))
        self._ranked = np.arange(len(both))[np.lexsort((coins, both))] < len(self.inside)
        """Which canaries are in, from the lowest score to the highest."""

    @classmethod
    def of_run(cls, scores: Any, inside: Any) -> CanaryScoreAuditor:
        """Makes an auditor for one run, which breaks ties by the numbers of the canaries.

        Args:
            scores: [n] numbers.
            inside: [n] bools, the coins.

        Raises:
            ArgumentError, ArgumentTypeError: as the class, or if the lengths differ.
        """
        given, coins = finite("scores", scores), np.asarray(inside, dtype=bool)
        if given.shape != coins.shape:
            raise ArgumentError(
                f"scores expects one score per canary, [{len(coins)}], got shape {given.shape}.",
                doc="audits",
            )
        found = cls(given[coins], given[~coins])
        places = np.random.default_rng(0).random(len(given))
        found._ranked = coins[np.lexsort((places, given))]
        return found

    def tpr_at_given_fpr(self, fpr: float) -> float:
        """The largest true positive rate at a false positive rate of at most `fpr`.

        It is an estimate without a confidence interval. Between two thresholds one is drawn at random.
        """
        if fpr != 0:
            fpr = between("fpr", fpr, 0, 1, closed=True)
        false, true = self._curve()
        at = int(np.searchsorted(false, fpr, side="right")) - 1
        if at == len(false) - 1:
            return float(true[at])
        share = (fpr - false[at]) / (false[at + 1] - false[at])
        return float(true[at] + share * (true[at + 1] - true[at]))

    def attack_auroc(self) -> float:
        """Probability that a canary that is in scores above one that is out; ties count half."""
        false, true = self._curve()
        return float(np.sum((false[1:] - false[:-1]) * (true[1:] + true[:-1]) / 2))

    def epsilon_clopper_pearson(self, significance: float, delta: float = 0.0) -> float:
        """Lower bound from true and false positive rates of independent scores.

        Half of the scores choose the threshold and its direction, and the other half are counted. Both
        error rates have Clopper-Pearson upper bounds, at half the significance each. Then epsilon is
        at least log((1 - fnr - delta) / fpr). (Jagielski, Ullman and Oprea 2020; Nasr et al. 2021.)

        Args:
            significance: probability that the bound is wrong, in (0, 0.5).
            delta: of the claim, in [0, 1).
        """
        significance = between("significance", significance, 0, 0.5) / 2
        delta = _delta(delta)

        def ratio(false: np.ndarray, missed: np.ndarray) -> np.ndarray:
            return np.log(np.maximum(1 - missed - delta, 0.0)) - np.log(false)

        return max(0.0, self._counted(ratio, significance))

    def epsilon_from_gdp(self, significance: float, delta: float) -> float:
        """Lower bound from independent scores, for a claim of Gaussian DP (Nasr et al. 2023).

        The threshold is chosen as in `epsilon_clopper_pearson`; mu is at least
        z(1 - fpr) - z(fnr), and epsilon is that of mu-GDP at delta.
        """
        significance = between("significance", significance, 0, 0.5) / 2
        delta = between("delta", delta, 0, 1)
        mu = self._counted(
            lambda false, missed: -special.ndtri(false) - special.ndtri(missed), significance
        )
        return epsilon_of_gdp(max(0.0, mu), delta)

    def epsilon_one_run(self, significance: float, delta: float) -> float:
        """Lower bound from one run, of any mechanism (Steinke, Nasr and Jagielski 2023)."""
        significance = between("significance", significance, 0, 0.5)
        delta, canaries = _delta(delta), self._canaries
        return self._best(
            significance,
            lambda guesses, right, share: epsilon_bound(canaries, guesses, right, share, delta),
        )

    def epsilon_one_run_fdp(self, significance: float, delta: float) -> float:
        """Lower bound from one run, for a claim of Gaussian DP (Mahloujifar et al. 2024)."""
        significance = between("significance", significance, 0, 0.5)
        delta, canaries = between("delta", delta, 0, 1), self._canaries
        mu = self._best(
            significance,
            lambda guesses, right, share: mu_bound(canaries, guesses, right, share),
        )
        return epsilon_of_gdp(mu, delta)

    def _counted(
        self, bound: Callable[[np.ndarray, np.ndarray], np.ndarray], significance: float
    ) -> float:
        """The bound on one half of the scores, at the best threshold of the other half."""
        best, chosen = -math.inf, None
        for sign in (1, -1):  # low scores may reveal more
            inside, outside = sign * self.inside[::2], sign * self.outside[::2]
            thresholds = np.unique(np.concatenate([inside, outside]))
            thresholds = np.append((thresholds[1:] + thresholds[:-1]) / 2, thresholds[-1])
            with np.errstate(divide="ignore", invalid="ignore"):
                found = bound(*_errors(inside, outside, thresholds, significance))
            at = int(np.nanargmax(found))
            if found[at] > best:
                best, chosen = found[at], (sign, thresholds[at : at + 1])
        if chosen is None or not (len(self.inside) > 1 and len(self.outside) > 1):
            return 0.0
        sign, threshold = chosen
        rest = sign * self.inside[1::2], sign * self.outside[1::2]
        with np.errstate(divide="ignore"):
            return float(bound(*_errors(*rest, threshold, significance))[0])

    @property
    def _canaries(self) -> int:
        return len(self.inside) + len(self.outside)

    def _best(self, significance: float, bound: Callable[[int, int, float], float]) -> float:
        """The best bound over the plans of guesses."""
        plans = list(guessed(self._canaries))
        inside, found = self._ranked, [0.0]
        for top, bottom in plans:
            right = int(inside[len(inside) - top :].sum()) + int((~inside[:bottom]).sum())
            found.append(bound(top + bottom, right, significance / len(plans)))
        return max(found)

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """False and true positive rates at every threshold, both from 0 to 1."""
        thresholds = np.unique(np.concatenate([self.inside, self.outside]))[::-1]
        rates = []
        for scores in (self.outside, self.inside):
            ordered = np.sort(scores)
            above = len(scores) - np.searchsorted(ordered, thresholds, side="left")
            rates.append(np.concatenate([[0.0], above / len(scores)]))
        return rates[0], rates[1]


def guessed(canaries: int) -> Iterator[tuple[int, int]]:
    """(number of highest scores guessed to be in, number of lowest guessed out), without the coins.

    The largest number is 1.5 sqrt(n) less than a half. At least so many of n fair coins fall on either
    side (three standard deviations, 99.7%), so an attacker who knows every coin guesses none wrong.
    """
    half = canaries // 2
    top = max(half - math.ceil(1.5 * math.sqrt(canaries)), min(half, FEWEST))
    while top >= FEWEST:
        yield top, top
        yield top, 0
        top //= 4


def most_of_one_run(canaries: int, significance: float, delta: float) -> float:
    """The bound of `epsilon_one_run` if all guesses are right."""
    plans = [sum(plan) for plan in guessed(canaries)]
    share = significance / max(1, len(plans))
    bounds = [epsilon_bound(canaries, all_, all_, share, delta) for all_ in plans]
    return max([0.0, *bounds])


def finite(name: str, given: Any) -> np.ndarray:
    """Converts scores to float64, [n].

    Raises:
        ArgumentError, ArgumentTypeError: they are empty, of other shapes, not finite, or not numbers.
    """
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        if array.dtype.kind not in "biuf" and array.size:
            raise TypeError(array.dtype)
        scores = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} expects numbers, got {type(given).__name__}.") from error
    if scores.ndim != 1 or not len(scores):
        raise ArgumentError(f"{name} expects one score per canary, [n], got shape {scores.shape}.")
    if not np.isfinite(scores).all():
        raise ArgumentError(
            f"{name} expects finite numbers, got NaN or inf. Give canaries that cannot be scored a "
            "constant score.",
            doc="audits",
        )
    return scores


def _scores(name: str, given: Any) -> np.ndarray:
    # Two halves of ordered scores would depend on each other.
    return np.random.default_rng(0).permutation(finite(name, given))


def _delta(delta: float) -> float:
    return 0.0 if delta == 0 else between("delta", delta, 0, 1)


def upper(successes: np.ndarray, trials: int, significance: float) -> np.ndarray:
    """Clopper-Pearson upper bounds on a rate; 1 if nothing failed."""
    left = np.maximum(trials - successes, 1)
    bounds = special.betaincinv(successes + 1, left, 1 - significance)
    return np.where(successes < trials, bounds, 1.0)


def _errors(
    inside: np.ndarray, outside: np.ndarray, thresholds: np.ndarray, significance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of the false positive and the false negative rates at thresholds."""
    missed = np.searchsorted(np.sort(inside), thresholds, side="left")
    false = len(outside) - np.searchsorted(np.sort(outside), thresholds, side="left")
    return upper(false, len(outside), significance), upper(missed, len(inside), significance)


# -------------------------------------------------------------------------------------------------
# From an attacker's success rate to epsilon, within the claimed family of mechanisms.
#
# If a run has the claimed history of subsampled Gaussian steps, no attacker finds more than the share
# (1 + delta(0)) / 2 of canaries that are in or out by fair coins. Here delta(0) is the total variation
# of its two worst neighbors. An attacker who finds more refutes the claim, and every claim of more
# noise.


Step = tuple[float, Rate, int]
"""Noise multiplier, sampling rate (or truncated Poisson sampling), number of steps."""
MESH, _TAIL = 0.02, 1e-9
"""Mesh of composed privacy losses. A tight epsilon is at most MESH too large; bounds subtract it."""


def advantage(history: Sequence[Step]) -> float:
    """delta(0), the largest excess of the true positive rate over the false positive rate."""
    if all(rate == 1 for _, rate, _ in history):
        return math.erf(_mu(history) / math.sqrt(8))  # 2 Phi(mu / 2) - 1
    return float(_composed(tuple(history), _TAIL).get_delta_for_epsilon(0.0))


def tight_epsilon(history: Sequence[Step], delta: float) -> float:
    """Epsilon of a history at delta: exact at q = 1, otherwise rounded up by its mesh."""
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(_mu(history), delta)
    return float(_composed(tuple(history), delta * 1e-3).get_epsilon_for_delta(delta))


def refuted_epsilon(history: Sequence[Step], right: int, guesses: int, significance: float,
                    delta: float) -> float:  # fmt: skip
    """The largest epsilon of the family, at any noise level, that `right` right guesses refute.

    For truncated Poisson sampling the bound is that of any mechanism. Its privacy cost is about samples
    that replace each other, which canaries with their own entries cannot see. Guesses are independent:
    the canaries share no coordinate of a release whose noise is claimed to be independent between
    coordinates. Clopper and Pearson bound the rate of right guesses from below.

    Args:
        history: the claimed steps; the family has their noise multipliers times any factor.
        right: number of right guesses.
        guesses: number of guesses, each about its own canary, which was in with probability 1/2.
        significance: probability that the bound is wrong.
        delta: delta of epsilon.
    """
    rate = _least_rate(right, guesses, significance)
    found = 2 * rate - 1
    if found <= 0:
        return 0.0
    if _truncated(history):
        return provable_epsilon(right, guesses, significance, delta)
    if all(rate == 1 for _, rate, _ in history):
        return epsilon_of_gdp(float(2 * special.ndtri(rate)), delta)

    def scaled(log_factor: float) -> list[Step]:
        return [(sigma * math.exp(log_factor), rate, steps) for sigma, rate, steps in history]

    most = 1 - math.prod((1 - _participates(rate)) ** steps for _, rate, steps in history)
    if found >= most:
        return math.inf  # even without noise no attacker could find so many
    low, high = _bracket(lambda x: advantage(scaled(x)) - found)
    if advantage(scaled(low)) <= found:
        return tight_epsilon(scaled(low), delta) - MESH  # at the least
    factor = optimize.brentq(lambda x: advantage(scaled(x)) - found, low, high, xtol=1e-3)
    return tight_epsilon(scaled(float(factor) + 1e-3), delta) - MESH


def provable_epsilon(right: int, guesses: int, significance: float, delta: float) -> float:
    """The largest epsilon that `right` right guesses refute, for any mechanism.

    (epsilon, delta)-DP bounds the total variation of neighbors by (e^epsilon - 1 + 2 delta) /
    (e^epsilon + 1). The only assumption is that guesses are independent.
    """
    found = 2 * _least_rate(right, guesses, significance) - 1
    if found <= delta:
        return 0.0
    return math.inf if found >= 1 else math.log((1 + found - 2 * delta) / (1 - found))


def by_steps(history: Sequence[Step]) -> list[tuple[float, Rate]]:
    """(sigma, q) of each recorded step. One entry of a random allocation records a whole pass."""
    return [
        (sigma, rate) for sigma, rate, steps in history
        for _ in range(steps * (rate.steps if isinstance(rate, RandomAllocation) else 1))
    ]  # fmt: skip


def power(history: Sequence[Step], guesses: int, level: float) -> float:
    """Probability that the guesses refute a run with half of its recorded noise."""
    halved = [(sigma / 2, rate, steps) for sigma, rate, steps in history]
    needed = stats.binom.isf(level, guesses, (1 + advantage(history)) / 2)
    return float(stats.binom.sf(needed, guesses, (1 + advantage(halved)) / 2))


def p_of_guesses(history: Sequence[Step], right: int, guesses: int) -> float:
    """Probability of at least `right` right guesses if the claim holds."""
    return float(special.bdtrc(right - 1, guesses, (1 + advantage(history)) / 2)) if right else 1.0


def _bracket(above: Callable[[float], float]) -> tuple[float, float]:
    """Logarithms of factors with too little and too much noise, at least a fifth of the noise."""
    low, high = 0.0, 0.0
    while above(low) < 0 and low > -1.5:
        low -= 0.25
    while above(high) > 0:
        high += 0.25
    return low, high


def _mu(history: Sequence[Step]) -> float:
    """mu of full batches, which compose to one Gaussian mechanism."""
    return math.sqrt(sum(steps / sigma**2 for sigma, _, steps in history))


def p_of_so_few(history: Sequence[Step], right: int, guesses: int) -> float:
    """Probability of at most `right` right guesses if the claim holds and the attack is optimal."""
    if _truncated(history):
        return 1.0  # the attack is not optimal
    return float(special.bdtr(right, guesses, (1 + advantage(history)) / 2))


def _participates(rate: Rate) -> float:
    """Probability that a sample is in a batch of a step, or of an epoch of a random allocation."""
    return 1.0 if isinstance(rate, RandomAllocation) else probability(rate)


def _truncated(history: Sequence[Step]) -> bool:
    return any(isinstance(rate, TruncatedPoisson) for _, rate, _ in history)


@lru_cache
def _composed(history: tuple[Step, ...], tail: float) -> Any:
    return loss_distribution(list(history), MESH, tail)


def _least_rate(right: int, guesses: int, significance: float) -> float:
    """Clopper-Pearson lower bound on the rate of right guesses."""
    return float(special.betaincinv(right, guesses - right + 1, significance)) if right else 0.0

"""Lower bounds on epsilon from the scores of canaries that were in and canaries that were out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import special
from torch import Tensor

from fastclip.audit import one_run
from fastclip.checks import between
from fastclip.errors import ArgumentError, ArgumentTypeError

FEWEST = 16
"""Guesses below which no bound is looked for."""


class CanaryScoreAuditor:
    """What scores of canaries prove about a run.

    A higher score says that a canary was in. In one run every canary is put in by a fair coin of its own
    (for `epsilon_one_run` and `epsilon_one_run_fdp`), or every score comes from a run of its own (for
    `epsilon_clopper_pearson` and `epsilon_from_gdp`, whose scores are independent).

    Formal guarantee: of a run that is (epsilon, delta)-DP, a bound at `significance` exceeds epsilon
    with at most that probability. Which canaries are guessed is fixed before the coins are looked at
    (numbers of guesses by the number of canaries alone, thresholds by another part of the scores), and
    tests of several numbers share the significance. Ties are broken by coins of the operating system, so
    that bounds of equal scores differ from auditor to auditor, or, in `of_run`, by the numbers of the
    canaries.

    Args:
        in_canary_scores: [a] numbers, of the canaries that were in.
        out_canary_scores: [b] numbers, of those that were out.

    Raises:
        ArgumentError, ArgumentTypeError: scores that are empty, of other shapes, or NaN.
    """

    def __init__(self, in_canary_scores: Any, out_canary_scores: Any) -> None:
        self.inside = _scores("in_canary_scores", in_canary_scores)
        self.outside = _scores("out_canary_scores", out_canary_scores)
        both = np.concatenate([self.inside, self.outside])
        coins = np.random.default_rng().random(len(both))
        self._ranked = np.arange(len(both))[np.lexsort((coins, both))] < len(self.inside)
        """Which are in, from the lowest score to the highest."""

    @classmethod
    def of_run(cls, scores: Any, inside: Any) -> CanaryScoreAuditor:
        """Of the canaries of one run, by their numbers, which break ties the same way every time.

        Args:
            scores: [n] numbers. inside: [n] bools, the coins.

        Raises:
            ArgumentError, ArgumentTypeError: as the class, or for other lengths.
        """
        given, coins = finite("scores", scores), np.asarray(inside, dtype=bool)
        if given.shape != coins.shape:
            raise ArgumentError(f"scores expects one a canary, [{len(coins)}], got {given.shape}")
        found = cls(given[coins], given[~coins])
        places = np.random.default_rng(0).random(len(given))
        found._ranked = coins[np.lexsort((places, given))]
        return found

    def tpr_at_given_fpr(self, fpr: float) -> float:
        """Largest share of canaries in that is found where at most `fpr` of those out are.

        An estimate without a confidence interval; between two thresholds one is drawn at random.
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
        """Probability that a canary in scores above one that is out, ties counting half."""
        false, true = self._curve()
        return float(np.sum((false[1:] - false[:-1]) * (true[1:] + true[:-1]) / 2))

    def epsilon_clopper_pearson(self, significance: float, delta: float = 0.0) -> float:
        """Lower bound from true and false positive rates of independent scores.

        Every other score chooses the threshold and its direction, the others are counted: with upper
        bounds of Clopper and Pearson for both error rates, at half the significance each, epsilon is
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
        return one_run.epsilon_of_gdp(max(0.0, mu), delta)

    def epsilon_one_run(self, significance: float, delta: float) -> float:
        """Lower bound from one run, of any mechanism (Steinke, Nasr and Jagielski 2023)."""
        significance = between("significance", significance, 0, 0.5)
        delta, canaries = _delta(delta), self._canaries
        return self._best(
            significance,
            lambda guesses, right, share: one_run.epsilon_bound(
                canaries, guesses, right, share, delta
            ),
        )

    def epsilon_one_run_fdp(self, significance: float, delta: float) -> float:
        """Lower bound from one run, for a claim of Gaussian DP (Mahloujifar et al. 2024)."""
        significance = between("significance", significance, 0, 0.5)
        delta, canaries = between("delta", delta, 0, 1), self._canaries
        mu = self._best(
            significance,
            lambda guesses, right, share: one_run.mu_bound(canaries, guesses, right, share),
        )
        return one_run.epsilon_of_gdp(mu, delta)

    def _counted(
        self, bound: Callable[[np.ndarray, np.ndarray], np.ndarray], significance: float
    ) -> float:
        """The bound on one half of the scores, at the threshold that is best on the other half."""
        best, chosen = -math.inf, None
        for sign in (1, -1):  # low scores may tell more
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
    """(highest scores that are guessed to be in, lowest that are guessed to be out); of no coin.

    The most is 1.5 sqrt(n) less than a half: of n fair coins so many fall on either side (three standard
    deviations, 99.7%), so that whoever knows every coin guesses none wrong.
    """
    half = canaries // 2
    top = max(half - math.ceil(1.5 * math.sqrt(canaries)), min(half, FEWEST))
    while top >= FEWEST:
        yield top, top
        yield top, 0
        top //= 4


def most_of_one_run(canaries: int, significance: float, delta: float) -> float:
    """What `epsilon_one_run` proves where all guesses are right."""
    plans = [sum(plan) for plan in guessed(canaries)]
    share = significance / max(1, len(plans))
    bounds = [one_run.epsilon_bound(canaries, all_, all_, share, delta) for all_ in plans]
    return max([0.0, *bounds])


def finite(name: str, given: Any) -> np.ndarray:
    """Scores as float64, [n].

    Raises:
        ArgumentError, ArgumentTypeError: empty, of other shapes, NaN, infinite, or no numbers.
    """
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        if array.dtype.kind not in "biuf" and array.size:
            raise TypeError(array.dtype)
        scores = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} expects numbers, got {type(given).__name__}") from error
    if scores.ndim != 1 or not len(scores):
        raise ArgumentError(f"{name} expects one score a canary, [n], got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ArgumentError(
            f"{name} expects finite numbers, got NaN or inf: give canaries that could not be scored a "
            "constant"
        )
    return scores


def _scores(name: str, given: Any) -> np.ndarray:
    # Halves of scores that came in an order of their own would tell of each other.
    return np.random.default_rng(0).permutation(finite(name, given))


def _delta(delta: float) -> float:
    return 0.0 if delta == 0 else between("delta", delta, 0, 1)


def upper(successes: np.ndarray, trials: int, significance: float) -> np.ndarray:
    """Upper bounds of Clopper and Pearson on a rate; 1 where nothing failed."""
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

"""The papers' claims, judged on results of one's own.

A claim compares two strategies by one score of a run, the runs of a seed with each other. It **holds**
if the 95% bootstrap interval of the mean difference lies wholly on the claimed side of zero and p of
the paired Wilcoxon test is at most 1/16, **does not hold** if the interval lies wholly on the other
side and p is as small, and is **not decided** else; fewer than five pairs of runs decide nothing, nor
do the others where a run diverged. The interval alone would decide too often: of five pairs it leaves
zero out for one sample in seven without any difference. Five pairs have p = 1/16 only where all of them
lie on one side. Beside it stands p corrected by Bonferroni for all that was judged, as the papers have
it; a remark says where so few seeds cannot make that small, whatever the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from bench.papers.scores import (
    accuracy,
    final,
    inequality,
    loss_gap,
    of,
    worst_accuracy,
)
from bench.papers.strategies import NON_PRIVATE
from fastclip.fairness.statistics import bonferroni, bootstrap_interval, paired_wilcoxon

SIGNIFICANT = 0.05
PAIRS, DECIDES = 5, 1 / 16
"""Pairs that decide, and the p that does: that of five which all lie on one side."""
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
COLUMNS = (
    *("claim", "paper", "experiment", "synthetic", "epsilon", "seeds", "difference", "low", "high"),
    *("p", "p_corrected", "verdict", "remark"),
)
"""Of the table of verdicts."""


@dataclass(frozen=True)
class Claim:
    """That `strategy` has a better score than `baseline`.

    Attributes:
        name: as in tables.
        paper: where it is claimed.
        text: what is claimed, in a sentence.
        score: of the final rows of one experiment at one epsilon, those without privacy among them:
            each run's score by strategy and seed.
        better: 1 if the claimed difference of scores, strategy - baseline, is above zero; -1 below.
        lowest_epsilon: claimed for the lowest epsilon of an experiment alone.
    """

    name: str
    paper: str
    text: str
    strategy: str
    baseline: str
    score: Callable[[pd.DataFrame], pd.Series]
    better: int
    lowest_epsilon: bool = False

    def pairs(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Scores of both by seed, NaN where a run has none.

        Args:
            frame: final rows of one experiment at one epsilon, and those without privacy.

        Returns:
            A row a seed, a column each: strategy, baseline.
        """
        score = self.score(frame)
        return pd.DataFrame({name: of(score, name) for name in (self.strategy, self.baseline)})


@dataclass(frozen=True)
class Verdict:
    """What an experiment says of a claim, by the rule of this module.

    Attributes:
        seeds: pairs of runs that were compared; 0 where the claim was skipped, as the remark says.
        difference: mean over seeds of strategy - baseline, in the units of the score.
        interval: of that mean, bootstrap, 95%.
        p, p_corrected: paired Wilcoxon, two-sided; after Bonferroni over all verdicts that have pairs.
        differing, least_p: pairs that are not equal, and the least p that so many can give.
        synthetic: on made-up data, of which the paper claims nothing.
    """

    claim: Claim
    experiment: str
    epsilon: float
    synthetic: bool
    seeds: int = 0
    difference: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))
    p: float = float("nan")
    p_corrected: float = float("nan")
    verdict: str = UNDECIDED
    remark: str = ""
    differing: int = 0
    least_p: float = float("nan")


CLAIMS = (
    *(
        Claim(
            name=f"SoftAdaClip: smaller loss gap than {baseline}",
            paper="Soleymani et al., Table 3",
            text="Groups' losses differ less, averaged over protected attributes.",
            strategy="soft_ada_clip",
            baseline=baseline,
            score=loss_gap,
            better=-1,
        )
        for baseline in ("dp_sgd", "adaptive")
    ),
    *(
        Claim(
            name=f"bounded adaptive clipping: better worst accuracy than {baseline}",
            paper="Zhao et al. 2025, Tables 5 and 6",
            text="The worst class, or the worse-off group of tabular data, is predicted better.",
            strategy="bounded_adaptive",
            baseline=baseline,
            score=worst_accuracy,
            better=1,
        )
        for baseline in ("unbounded_adaptive", "normalized_dp_sgd")
    ),
    Claim(
        name="DPSGD-F: more equal cost than dp_sgd",
        paper="Xu et al. 2020, Tables 3 and 5",
        text="What privacy costs in accuracy differs less between groups.",
        strategy="dpsgd_f",
        baseline="dp_sgd",
        score=inequality,
        better=-1,
    ),
    *(
        Claim(
            name=f"SAD-DPSGD: better accuracy than {baseline}",
            paper="SAD-DPSGD, Table 2",
            text="Accuracy is better at the smallest privacy budget.",
            strategy="sad_dpsgd",
            baseline=baseline,
            score=accuracy,
            better=1,
            lowest_epsilon=True,
        )
        for baseline in ("dp_sgd", "auto_s", "auto_l")
    ),
)


def judge(frame: pd.DataFrame) -> list[Verdict]:
    """Every claim, on every experiment at every epsilon.

    Args:
        frame: results, a row a number, with COLUMNS of scores.py; epsilon is the target, NaN
            without privacy.

    Returns:
        A verdict each, by experiment, epsilon and claim; those without any pair of runs say why.

    Raises:
        ArgumentError: as `final`.
    """
    verdicts = []
    for experiment, runs in final(frame).groupby("experiment", sort=False):
        epsilons = np.sort(runs.epsilon.dropna().unique())
        for epsilon in epsilons:
            at = runs[(runs.epsilon == epsilon) | (runs.strategy == NON_PRIVATE)]
            for claim in CLAIMS:
                if epsilon == epsilons[0] or not claim.lowest_epsilon:
                    synthetic = bool(at.synthetic.any())
                    verdicts.append(
                        _judge(Verdict(claim, str(experiment), float(epsilon), synthetic), at)
                    )
    judged = [verdict for verdict in verdicts if verdict.seeds]
    corrected = iter(bonferroni([verdict.p for verdict in judged]))
    return [_corrected(one, next(corrected), len(judged)) if one.seeds else one for one in verdicts]


def _judge(verdict: Verdict, frame: pd.DataFrame) -> Verdict:
    """The verdict on rows of its experiment and epsilon, not yet corrected."""
    claim = verdict.claim
    needed = [claim.strategy, claim.baseline, *([NON_PRIVATE] if claim.score is inequality else [])]
    missing = [name for name in needed if name not in set(frame.strategy)]
    if missing:
        return replace(verdict, remark=f"Skipped: there are no runs of {' and '.join(missing)}.")
    pairs = claim.pairs(frame)
    whole = pairs[np.isfinite(pairs).all(axis=1)]
    if whole.empty:
        return replace(verdict, remark="Skipped: no seed has a score of both strategies.")
    ran = set.intersection(
        *(set(frame.seed[frame.strategy == name]) for name in (claim.strategy, claim.baseline))
    )
    left = pairs.index.difference(whole.index)
    away = ", ".join(str(seed) for seed in left if seed in ran)
    alone = ", ".join(str(seed) for seed in left if seed not in ran)
    remarks = [f"Without a pair of scores: seed {alone}."] if alone else []
    if away:  # the seeds that are left were chosen by their results
        remarks.append(f"Nothing is decided without what diverged: seed {away}.")
    ours, theirs = whole[claim.strategy], whole[claim.baseline]
    difference = ours - theirs
    low, high = bootstrap_interval(difference.tolist())
    test = paired_wilcoxon(ours.tolist(), theirs.tolist())
    return replace(
        verdict,
        seeds=len(whole),
        difference=float(difference.mean()),
        interval=(low, high),
        p=test.p,
        verdict=(
            UNDECIDED
            if away or len(whole) < PAIRS or test.p > DECIDES
            else _word(low, high, claim.better)
        ),
        remark=" ".join(remarks),
        differing=test.pairs,
        least_p=test.least_p,
    )


def _word(low: float, high: float, better: int) -> str:
    """Where the interval lies; NaN lies nowhere."""
    if low > 0 or high < 0:
        return HOLDS if (low > 0) == (better > 0) else FAILS
    return UNDECIDED


def _corrected(verdict: Verdict, p: float, judged: int) -> Verdict:
    """With p after the correction, and whether any difference could have made it small."""
    least = min(1.0, verdict.least_p * judged)
    remark = verdict.remark
    if least >= SIGNIFICANT:
        few = (
            f"{verdict.differing} pairs that differ cannot reach p < {SIGNIFICANT}: {verdict.least_p:g} "
            f"at least, {least:g} after Bonferroni's factor of {judged}."
        )
        remark = f"{remark} {few}".strip()
    return replace(verdict, p_corrected=p, remark=remark)


def table(verdicts: list[Verdict]) -> pd.DataFrame:
    """Verdicts, a row each; of none the columns alone."""
    rows = [
        (
            *(
                one.claim.name,
                one.claim.paper,
                one.experiment,
                one.synthetic,
                one.epsilon,
                one.seeds,
            ),
            *(one.difference, *one.interval, one.p, one.p_corrected, one.verdict, one.remark),
        )
        for one in verdicts
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))

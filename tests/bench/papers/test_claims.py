"""Verdicts on made-up results, of which it is known what they show."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from bench.papers.claims import CLAIMS, judge, table
from tests.bench.papers.results import run

SEEDS = range(5)
SPREAD = (0.0, 0.01, -0.02, 0.03, -0.01)  # of seeds, the same for every strategy
JITTER = (0.004, -0.003, 0.001, 0.002, -0.001)  # of a strategy's own
SOFT, SOFT_ADAPTIVE, BOUNDED, BOUNDED_CONSTANT, EQUAL, SAD, SAD_S, SAD_L = (
    claim.name for claim in CLAIMS
)
STRATEGIES = {
    SOFT: ("soft_ada_clip", "dp_sgd"),
    SOFT_ADAPTIVE: ("soft_ada_clip", "adaptive"),
    BOUNDED: ("bounded_adaptive", "unbounded_adaptive"),
    BOUNDED_CONSTANT: ("bounded_adaptive", "normalized_dp_sgd"),
    EQUAL: ("dpsgd_f", "dp_sgd"),
    SAD: ("sad_dpsgd", "dp_sgd"),
    SAD_S: ("sad_dpsgd", "auto_s"),
    SAD_L: ("sad_dpsgd", "auto_l"),
}
SMALLER = {SOFT, SOFT_ADAPTIVE, EQUAL}
"""Claims of which the smaller score is the better."""


def numbers(score: float) -> dict[tuple[str, str, str], float]:
    """A run whose every score is `score`; up to 0.5 that of costs, too, against BASE without privacy."""
    return {
        ("all", "all", "accuracy"): score,
        ("sex", "female", "accuracy"): 1.0 if score > 0.5 else 1 - score,
        ("sex", "male", "accuracy"): score if score > 0.5 else 1.0,
        ("sex", "female", "loss_mean"): 10.0,
        ("sex", "male", "loss_mean"): 10.0 + score,
        ("class", "0", "accuracy"): 0.2,
        ("class", "1", "accuracy"): 0.3,
    }


BASE = numbers(0.0)


def results(name: str, ours: float, theirs: float, *, seeds=SEEDS, **kwargs) -> pd.DataFrame:
    """Runs of a claim's strategies whose scores have these means."""
    strategy, baseline = STRATEGIES[name]
    frames = [run("non_private", seed, BASE, epsilon=None, **kwargs) for seed in seeds]
    for seed in seeds:
        common = SPREAD[seed % 5]
        frames.append(run(strategy, seed, numbers(ours + common + JITTER[seed % 5]), **kwargs))
        frames.append(run(baseline, seed, numbers(theirs + common), **kwargs))
    return pd.concat(frames)


def verdict_on(name: str, frame: pd.DataFrame):
    (found,) = [one for one in judge(frame) if one.claim.name == name]
    return found


def levels(name: str, better: float) -> tuple[float, float]:
    """Scores of both strategies, ours better by so much."""
    middle = 0.2 if name == EQUAL else 0.7
    half = (-better if name in SMALLER else better) / 2
    return middle + half, middle - half


def test_claims_compare_what_their_names_say():
    assert {claim.name: (claim.strategy, claim.baseline) for claim in CLAIMS} == STRATEGIES


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("better", "word"), [(0.1, "holds"), (-0.1, "does not hold"), (0.0, "not decided")]
)
def test_verdict(name, better, word):
    ours, theirs = levels(name, better)
    found = verdict_on(name, results(name, ours, theirs))
    assert found.verdict == word
    assert found.seeds == 5
    assert found.difference == pytest.approx(ours - theirs + sum(JITTER) / 5)
    assert found.interval[0] <= found.difference <= found.interval[1]


def test_p_is_corrected_for_all_that_was_judged():
    ours, theirs = levels(SOFT, 0.1)
    frame = results(SOFT, ours, theirs)
    alone = verdict_on(SOFT, frame)
    assert (alone.p, alone.p_corrected) == (0.0625, 0.0625)  # 2 / 2^5
    assert alone.remark == (
        "5 pairs that differ cannot reach p < 0.05: 0.0625 at least, 0.0625 after Bonferroni's "
        "factor of 1."
    )
    other = results(BOUNDED, 0.7, 0.6, experiment="another")
    both = [one for one in judge(pd.concat([frame, other])) if one.seeds]
    assert [(one.claim.name, one.p) for one in both] == [(SOFT, 0.0625), (BOUNDED, 0.0625)]
    assert [one.p_corrected for one in both] == [0.125, 0.125]
    assert both[0].remark.endswith("0.125 after Bonferroni's factor of 2.")


def test_enough_seeds_need_no_remark():
    found = verdict_on(SOFT, results(SOFT, 0.6, 0.7, seeds=range(6)))
    assert found.p_corrected == 0.03125
    assert found.remark == ""


def test_one_seed_decides_nothing():
    found = verdict_on(SOFT, results(SOFT, 0.1, 0.9, seeds=[0]))
    assert found.verdict == "not decided"
    assert found.seeds == 1
    assert found.difference == pytest.approx(-0.8 + JITTER[0])
    assert all(math.isnan(end) for end in found.interval)
    assert found.p == 1


@pytest.mark.parametrize(
    ("name", "left_out", "told"),
    [
        (BOUNDED, ["unbounded_adaptive"], "unbounded_adaptive"),
        (BOUNDED, ["bounded_adaptive"], "bounded_adaptive"),
        (EQUAL, ["non_private"], "non_private"),
        (EQUAL, ["dp_sgd", "non_private"], "dp_sgd and non_private"),
    ],
)
def test_a_claim_without_runs_is_skipped(name, left_out, told):
    frame = results(name, 0.3, 0.2)
    found = verdict_on(name, frame[~frame.strategy.isin(left_out)])
    assert found.remark == f"Skipped: there are no runs of {told}."
    assert (found.seeds, found.verdict) == (0, "not decided")
    assert math.isnan(found.p_corrected)


def test_a_group_without_rows_skips_the_claim():
    frame = results(SOFT, 0.6, 0.7)
    frame.loc[frame.group == "male", "value"] = math.nan
    found = verdict_on(SOFT, frame)
    assert found.remark == "Skipped: no seed has a score of both strategies."
    assert found.seeds == 0


def test_pairs_are_matched_by_seed():
    """Seeds differ far more than strategies do: only runs of the same seed show it."""
    seeds = {0: 1.0, 1: 5.0, 2: 9.0, 3: 3.0, 4: 7.0}
    frames = [run("dp_sgd", seed, numbers(gap + 0.1)) for seed, gap in seeds.items()]
    frames += [run("soft_ada_clip", seed, numbers(seeds[seed])) for seed in (3, 0, 4, 2, 1)]
    found = verdict_on(SOFT, pd.concat(frames))
    assert found.verdict == "holds"
    assert found.interval == pytest.approx((-0.1, -0.1))


def test_seeds_of_one_strategy_alone_are_left_out():
    frame = results(SOFT, 0.6, 0.7)
    frame = frame[(frame.strategy != "dp_sgd") | (frame.seed < 3)]
    found = verdict_on(SOFT, frame)
    assert found.seeds == 3
    assert found.remark.startswith("Without a pair of scores: seed 3, 4. 3 pairs that differ")


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_seed_that_diverged_decides_nothing(lost: float):
    """Four seeds that hold were else chosen by their results."""
    frame = results(SOFT, 0.6, 0.7)
    assert verdict_on(SOFT, frame).verdict == "holds"
    frame.loc[(frame.strategy == "soft_ada_clip") & (frame.seed == 2), "value"] = lost
    found = verdict_on(SOFT, frame)
    assert (found.verdict, found.seeds) == ("not decided", 4)
    assert found.remark.startswith("Nothing is decided without what diverged: seed 2.")


@pytest.mark.parametrize("seeds", [2, 4, 5])
def test_few_pairs_decide_nothing(seeds: int):
    """Two of two lie on one side by chance every other time."""
    frame = results(SOFT, 0.6, 0.7)
    found = verdict_on(SOFT, frame[frame.seed < seeds])
    assert found.interval[1] < 0
    assert found.verdict == ("holds" if seeds == 5 else "not decided")


@pytest.mark.parametrize(("last", "verdict"), [(-0.02, "holds"), (0.002, "not decided")])
def test_five_pairs_decide_if_they_agree(last: float, verdict: str):
    """With one pair on the other side the interval may leave zero out, and does so often by chance."""
    frames = []
    for seed, difference in enumerate((-0.1, -0.09, -0.11, -0.1, last)):
        frames.append(run("dp_sgd", seed, numbers(0.7)))
        frames.append(run("soft_ada_clip", seed, numbers(0.7 + difference)))
    found = verdict_on(SOFT, pd.concat(frames))
    assert found.interval[1] < 0
    assert found.verdict == verdict


def test_runs_of_another_epsilon_or_experiment_are_no_pair():
    frame = pd.concat(
        [
            results(SOFT, 0.6, 0.7),
            run("dp_sgd", 0, numbers(0.1), epsilon=8.0),
            run("soft_ada_clip", 0, numbers(0.1), epsilon=3.0, experiment="another"),
        ]
    )
    found = [one for one in judge(frame) if one.claim.name == SOFT]
    assert [(one.experiment, one.epsilon, one.seeds) for one in found] == [
        ("made-up", 3.0, 5),
        ("made-up", 8.0, 0),
        ("another", 3.0, 0),
    ]


def test_sad_dpsgd_is_judged_at_the_lowest_epsilon():
    numbered = [
        run(strategy, seed, numbers(0.5), epsilon=epsilon)
        for strategy in ("sad_dpsgd", "dp_sgd")
        for seed in SEEDS
        for epsilon in (8.0, 3.0, 16.0)
    ]
    found = [one for one in judge(pd.concat(numbered)) if one.claim.name == SAD]
    assert [one.epsilon for one in found] == [3.0]
    assert found[0].verdict == "not decided"  # equal everywhere
    assert found[0].interval == (0, 0)


def test_results_without_private_runs_have_no_verdicts():
    verdicts = judge(run("non_private", 0, BASE, epsilon=None))
    assert verdicts == []
    assert table(verdicts).columns.equals(table(judge(results(SOFT, 0.6, 0.7))).columns)


@pytest.mark.parametrize("synthetic", [False, True])
def test_table_has_a_row_for_each_verdict(synthetic):
    verdicts = judge(results(SOFT, 0.6, 0.7).assign(synthetic=synthetic))
    frame = table(verdicts)
    assert len(frame) == len(verdicts) == len(CLAIMS)
    assert (frame.synthetic == synthetic).all()
    row = frame[frame.claim == SOFT].iloc[0]
    assert (row.experiment, row.epsilon, row.seeds, row.verdict) == ("made-up", 3.0, 5, "holds")
    assert row.low < row.difference < row.high < 0
    assert frame[frame.seeds == 0].remark.str.startswith("Skipped: ").all()

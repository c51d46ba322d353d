"""One page of everything that was run: one section per experiment, with the papers' numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from bench.papers import claims, figures, tables
from bench.papers.beside import beside
from bench.papers.scores import final
from bench.papers.store import Store
from bench.papers.strategies import NON_PRIVATE
from bench.papers.tables import labelled
from fastclip.errors import ArgumentError
from fastclip.fairness import Page

SHOWN = 3.0
"""The budget of pictures of one; else the nearest that was run."""


def write_report(store: Store) -> list[Path]:
    """Write report.html, report.md and its pictures into the folder of results.

    Raises:
        ArgumentError: where nothing was run yet.
    """
    frame, about = store.merge(), store.about()
    if frame.empty:
        raise ArgumentError(
            f"{store.folder} holds no results; make some with `python -m bench.papers run`"
        )
    page = Page("What clipping does to subgroups: the papers' experiments")
    _introduction(page, frame)
    _claims(page, frame)
    for name in dict.fromkeys(frame["experiment"]):
        _experiment(page, name, frame[frame["experiment"] == name], about.get(name, {}))
    _origin(page, about)
    return page.write(store.folder / "report.html")


def _introduction(page: Page, frame: pd.DataFrame) -> None:
    seeds = frame.groupby(["experiment", "strategy", "epsilon"], dropna=False)["seed"].nunique()
    page.text(
        f"{frame['run'].nunique()} runs of {frame['experiment'].nunique()} experiments, "
        f"{seeds.min()} to {seeds.max()} seeds each. A number is the mean of the seeds. Brackets hold "
        "its 95% bootstrap interval. Seeds change the initial weights, the sampling and the noise, and "
        "never the split."
    )
    page.note(
        "seeds of these runs are published, and noise follows from seeds. Nothing here is therefore a "
        "private release, whatever epsilon is. Nor are the non-private runs used for comparison. Marks "
        "show what could be published from a run if no one could repeat its noise.", "caution",
    )  # fmt: skip
    page.note(
        "thresholds, noise multipliers and epsilon follow from the private runs alone.", "private"
    )
    page.note(
        "accuracies and losses are of test samples, which the training's epsilon does not cover. "
        "Choosing a strategy or a setting by them is a search with its own privacy cost.", "held out",
    )  # fmt: skip
    page.note(
        "norms of gradients and shares of clipped samples are of training samples.", "not private"
    )
    made_up = list(dict.fromkeys(frame[frame["synthetic"].astype(bool)]["experiment"]))
    if made_up:
        page.note(
            f"generated samples in: {', '.join(made_up)}. They say nothing about people.",
            "synthetic",
        )


def _claims(page: Page, frame: pd.DataFrame) -> None:
    """What the papers claim, and whether it holds here."""
    real = frame[~frame["synthetic"].astype(bool)]
    verdicts = claims.judge(real) if len(real) else []
    page.heading("The papers' claims")
    page.text(
        "A claim holds in an experiment at a budget if the 95% interval of the paired difference of "
        "the seeds lies on the claimed side of 0 and p is at most 1/16. It does not hold if the "
        "interval lies on the other side and p is as small. Otherwise it is not decided, and fewer "
        "than five pairs decide nothing. p is from Wilcoxon's signed-rank test. For five pairs it is "
        "0.0625 if all of them lie on one side, which happens by chance once in 16. Multiplied by the "
        "number of lines of the table (Bonferroni), five pairs never reach p < 0.05. One verdict "
        "alone therefore proves little. Compare how many agree."
    )
    judged = [verdict for verdict in verdicts if verdict.seeds]
    skipped = {verdict.claim.name for verdict in verdicts} - {one.claim.name for one in judged}
    if judged:
        page.table(_summary(judged), "In short: at which epsilon each claim holds")
        for claim in dict.fromkeys(one.claim for one in judged):
            of = [one for one in judged if one.claim == claim]
            side = "above" if claim.better > 0 else "below"
            page.table(_verdicts(of), f"{claim.name} ({claim.paper}): difference {side} 0")
    if skipped or not judged:
        page.text(
            f"Not judged, because runs are missing: {', '.join(sorted(skipped)) or 'all claims'}."
        )


def _summary(verdicts: list[claims.Verdict]) -> pd.DataFrame:
    """A row for each claim, a column for each experiment."""
    rows: dict[str, dict[str, str]] = {}
    for one in verdicts:
        same = [v for v in verdicts if (v.claim, v.experiment) == (one.claim, one.experiment)]
        by_word = {
            word: ", ".join(labelled(v.epsilon) for v in same if v.verdict == word)
            for word in (claims.HOLDS, claims.FAILS, claims.UNDECIDED)
        }
        cell = "; ".join(f"{word} at {where}" for word, where in by_word.items() if where)
        rows.setdefault(one.claim.name, {"claim": one.claim.name})[one.experiment] = cell
    return pd.DataFrame(list(rows.values())).fillna("")


def _verdicts(verdicts: list[claims.Verdict]) -> pd.DataFrame:
    """Their numbers."""
    return pd.DataFrame([
        {
            "experiment": one.experiment, "epsilon": labelled(one.epsilon),
            "verdict": one.verdict, "difference": f"{one.difference:+.3g}",
            "95% interval": f"[{one.interval[0]:.3g}, {one.interval[1]:.3g}]",
            "pairs": one.seeds, "p": one.p, "p, corrected": one.p_corrected,
        }
        for one in verdicts
    ])  # fmt: skip


def _experiment(page: Page, name: str, frame: pd.DataFrame, about: dict[str, Any]) -> None:
    synthetic = bool(frame["synthetic"].iloc[0])
    page.heading(f"{name}: {about.get('title', name)}" + " (synthetic data)" * synthetic)
    if synthetic:
        page.note("every number of this section comes from generated samples.", "synthetic")
    page.text(f"Settings: {about.get('paper', 'not recorded')}. {_settings(about.get('settings'))}")
    if about.get("notes"):
        page.items(about["notes"])
    page.table(
        tables.overall(frame), f"{name}: on test samples; loss gaps are of mean losses per sample"
    )
    budgets = sorted(e for e in frame["epsilon"].dropna().unique())
    if not budgets:
        return
    shown = min(budgets, key=lambda e: abs(math.log(e / SHOWN)))
    if len(budgets) > 1:
        page.figure(
            figures.over_epsilon(frame), f"{name}: means of the seeds with 95% intervals",
            "Lines of macro and worst-class accuracy over epsilon for each strategy.",
        )  # fmt: skip
    attributes = _attributes(frame)
    for attribute in attributes:
        page.figure(
            figures.groups(frame, attribute, budgets),
            f"{name}: accuracy by {attribute}; thin lines are 95% intervals",
            f"Dots of the accuracy of each group of {attribute}, one line per strategy.",
        )
        page.table(tables.by_group(frame, attribute), f"{name}: accuracy by {attribute}")
    moving = figures.thresholds(frame, shown)
    if moving is not None:
        page.figure(
            moving, f"{name}: thresholds at epsilon {shown:g}, first seed",
            "Lines of the clipping threshold over the steps for each strategy and group.",
        )  # fmt: skip
    for attribute in attributes:
        page.figure(
            figures.norms(frame, attribute, shown),
            f"{name}: norms by {attribute} at epsilon {shown:g}, last tenth of the run; after "
            "clipping a normalized strategy's are at most 1",
            f"Dots of mean gradient norms of each group of {attribute} before and after clipping.",
        )
        page.figure(
            figures.clipped(frame, attribute, shown),
            f"{name}: share of samples clipped, by {attribute}, at epsilon {shown:g}",
            f"Dots of the share of each group of {attribute} that was clipped, early and late.",
        )
    if frame["seed"].nunique() > 1:
        page.table(
            tables.comparisons(frame),
            f"{name}: loss gaps compared with dp_sgd and adaptive, pairs of seed and attribute",
        )
    numbers = beside(frame, name)
    if len(numbers):
        summed = "; losses are of 256 samples" * bool(
            numbers["measure"].str.startswith("loss").any()
        )
        page.table(numbers, f"{name}: the paper's numbers, and ours at the nearest budget{summed}")


def _settings(told: dict[str, Any] | None) -> str:
    """Of the private runs, in a sentence; about.json has all of them."""
    if told is None:
        return ""
    of = told["private"]
    return (
        f"{of['optimizer']}, learning rate {of['lr']:.3g}, {of['epochs']} epochs of {of['batch_size']} "
        f"samples per batch, {of['steps']} steps; C_0 {told['max_grad_norm']:g}, "
        f"delta {told['delta']:g}; {told['model'].split(',')[0]}."
    )


def _attributes(frame: pd.DataFrame) -> list[str]:
    """Protected attributes; classes only where there is no other."""
    found = final(frame)["attribute"].drop_duplicates().tolist()
    others = [name for name in found if name not in ("all", "run", "class")]
    return others or ["class"]


def _origin(page: Page, about: dict[str, Any]) -> None:
    page.heading("Where this comes from")
    page.text(
        f"Runs named {NON_PRIVATE} have neither clipping nor noise. Splits are fixed. Their SHA-256 "
        "sums are in about.json. Every measured value is in results.csv.gz."
    )
    page.items([
        f"{name}: {made['command']} ({made['machine']['processor']}, {made['machine']['cores']} cores, "
        f"{made['date']}, torch {made['versions']['torch']}, fastclip {made['versions']['fastclip']})"
        for name, told in about.items() for made in told["made"]
    ])  # fmt: skip

"""The papers' numbers beside ours, in columns of their own: the same measure at the nearest budget."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from bench.papers import published
from bench.papers.scores import final
from bench.papers.strategies import NON_PRIVATE
from bench.papers.tables import chosen, gaps, interval, labelled

NAMES = {
    "below median": "below 38", "median and above": "38 and above",
    "gender": "sex",
}  # fmt: skip
"""What papers call groups that are ours by another name (of Adult)."""
IMPACT = "privacy_impact"
BATCH = 256
"""Rows over which SoftAdaClip's tables sum losses; see `scores.gaps`."""


class Setting(NamedTuple):
    """Rows of a paper's tables that belong to an experiment."""

    paper: str
    data: str
    model: str | None = None
    setting: str | None = None


SETTINGS = {
    "adult-xu": Setting("dpsgd_f", "adult", setting="unbalanced"),
    "adult-xu-balanced": Setting("dpsgd_f", "adult", setting="balanced"),
    "dutch-xu": Setting("dpsgd_f", "dutch", setting="balanced"),
    "dutch-xu-unbalanced": Setting("dpsgd_f", "dutch", setting="unbalanced"),
    "mnist-xu": Setting("dpsgd_f", "mnist", setting="unbalanced"),
    "mnist-esipova": Setting("dpsgd_f", "mnist", setting="unbalanced"),
    "mnist-small": Setting("bounded", "mnist"),
    "adult-zhao": Setting("bounded", "adult"),
    "dutch-zhao": Setting("bounded", "dutch"),
    "mnist-zhao": Setting("bounded", "mnist"),
    "fashion-zhao": Setting("bounded", "fashion_mnist"),
    "income-simple": Setting("softadaclip", "adult", "simple", "C=0.1"),
    "income-simple-0.05": Setting("softadaclip", "adult", "simple", "C=0.05"),
    "income-simple-0.01": Setting("softadaclip", "adult", "simple", "C=0.01"),
    "income-complex": Setting("softadaclip", "adult", "complex", "C=0.1"),
    "eicu": Setting("softadaclip", "eicu"),
    "mimic": Setting("softadaclip", "mimic"),
    "ham10000-sad": Setting("sad_dpsgd", "ham10000"),
}
MEASURES = (
    "accuracy", "macro_accuracy", "worst_class_accuracy", "loss_sum", "loss_gap", IMPACT,
)  # fmt: skip
"""Measures of papers that we measure alike."""


def beside(frame: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """A row for each number of the paper that has one of ours; empty where there is none.

    Args:
        frame: results of this experiment.

    Returns:
        Columns table, page, strategy, attribute, group, measure; the paper's epsilon and number; our
        epsilon (the nearest that was run) and mean with 95% interval.
    """
    setting = SETTINGS.get(experiment)
    if setting is None:
        return pd.DataFrame()
    theirs = published.load(setting.paper)
    theirs = theirs[(theirs["data"] == setting.data) & theirs["measure"].isin(MEASURES)]
    theirs = theirs[theirs["part"].isin(("test", ""))]
    for column in ("model", "setting"):
        wanted = getattr(setting, column)
        if wanted is not None:
            theirs = theirs[theirs[column] == wanted]
    ours = _measured(frame)
    rows = []
    for number in theirs.to_dict("records"):
        attribute, group = (NAMES.get(number[key], number[key]) for key in ("attribute", "group"))
        strategy = number["strategy"] or NON_PRIVATE
        of = ours[(ours["attribute"] == attribute) & (ours["group"] == group)]
        of = of[(of["measure"] == number["measure"]) & (of["strategy"] == strategy)]
        if of.empty:
            continue
        budget = _nearest(of["epsilon"].unique().tolist(), number["epsilon"])
        values = chosen(of, strategy, budget)["value"].tolist()
        error = "" if math.isnan(number["error"]) else f" ± {number['error']:g}"
        page = number["page"]
        rows.append({
            "table": f"{number['table']}", "page": number["section"] if pd.isna(page) else f"{page}",
            "strategy": strategy, "attribute": attribute, "group": group,
            "measure": number["measure"].replace("_", " "),
            "paper's epsilon": labelled(number["epsilon"]), "paper": f"{number['value']:g}{error}",
            "our epsilon": labelled(budget), "ours": interval(values),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Our ends of runs: losses of a batch's rows, their gaps, costs of privacy (Delta_k)."""
    of = final(frame)
    losses = of[of["measure"] == "loss_mean"].assign(measure="loss_sum")
    gap = gaps(frame).assign(group="all", measure="loss_gap")
    sums = pd.concat([losses, gap], ignore_index=True)
    sums["value"] *= BATCH
    return pd.concat([of[of["measure"] != "loss_sum"], sums, impacts(of)], ignore_index=True)


def impacts(of: pd.DataFrame) -> pd.DataFrame:
    """Delta_k: accuracy of each group minus that of the run without privacy of the same seed.

    Xu et al. 2020, Definition 6.
    """
    accuracy = of[(of["measure"] == "accuracy") & (of["attribute"] != "run")]
    plain = accuracy[accuracy["strategy"] == NON_PRIVATE]
    keys = ["seed", "attribute", "group"]
    both = accuracy[accuracy["strategy"] != NON_PRIVATE].merge(
        plain[[*keys, "value"]], on=keys, suffixes=("", "_plain")
    )
    return both.assign(value=both["value"] - both["value_plain"], measure=IMPACT).drop(
        columns="value_plain"
    )


def _nearest(ours: list[float], theirs: float) -> float:
    """The budget that was run nearest to theirs, in logarithms."""
    known = [epsilon for epsilon in ours if not math.isnan(epsilon)]
    if math.isnan(theirs) or not known:
        return math.nan if not known else known[0]
    return min(known, key=lambda epsilon: abs(math.log(epsilon / theirs)))

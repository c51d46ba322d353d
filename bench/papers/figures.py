"""Pictures of a report from tidy results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from bench.papers.scores import final
from bench.papers.tables import chosen, pairs
from fastclip.fairness.report import Line, dots, lines
from fastclip.fairness.statistics import bootstrap_interval

TRAINING = "training"


def over_epsilon(frame: pd.DataFrame) -> Figure:
    """Macro and worst-class accuracy over the budget, means of the seeds with 95% intervals."""
    of = final(frame)
    of = of[(of["attribute"] == "all") & of["epsilon"].notna()]
    panels = {}
    for title, measure in (
        ("Macro accuracy", "macro_accuracy"), ("Worst class", "worst_class_accuracy")
    ):  # fmt: skip
        of_measure = of[of["measure"] == measure]
        panels[title] = {
            strategy: _line(of_measure[of_measure["strategy"] == strategy], "epsilon")
            for strategy in dict.fromkeys(name for name, _ in pairs(of_measure))
        }
    return lines(panels, "epsilon", "accuracy on test rows", share=True, xlog=True)


def groups(frame: pd.DataFrame, attribute: str, epsilons: Sequence[float]) -> Figure:
    """Accuracy of each group by strategy, a panel for each budget."""
    of = final(frame)
    of = of[(of["attribute"] == attribute) & (of["measure"] == "accuracy")]
    panels = {
        f"epsilon {epsilon:g}": {
            strategy: _by_group(chosen(of, strategy, budget))
            for strategy, budget in pairs(of)
            if math.isnan(budget) or budget == epsilon
        }
        for epsilon in epsilons
    }
    return dots(panels, "accuracy on test rows", share=True)


def thresholds(frame: pd.DataFrame, epsilon: float) -> Figure | None:
    """C_t, or C_k by group, over the steps of the first seed; None where none moves."""
    of = frame[(frame["part"] == TRAINING) & (frame["measure"] == "threshold")]
    of = of[(of["epsilon"] == epsilon) & (of["seed"] == of["seed"].min())]
    shared, grouped = {}, {}
    for strategy, _ in pairs(of):
        mine = of[of["strategy"] == strategy]
        names = list(dict.fromkeys(mine["group"]))
        if (attribute := mine["attribute"].iloc[0]) == "layer":
            continue
        for name in names:
            line = mine[mine["group"] == name].sort_values("step")
            values = Line(line["step"].tolist(), line["value"].tolist())
            if len(names) == 1:
                shared[strategy] = values
            else:
                grouped[f"{attribute} {name}"] = values
    panels = {"Threshold": shared}
    if grouped:
        panels["Thresholds by group, dpsgd_f"] = grouped
    moves = any(len(set(line.y)) > 1 for of_panel in panels.values() for line in of_panel.values())
    return lines(panels, "step", "clipping threshold", log=True) if moves else None


def norms(frame: pd.DataFrame, attribute: str, epsilon: float) -> Figure:
    """Mean norm of rows' gradients by group in the last tenth of a run, before and after clipping."""
    panels = {}
    for title, measure in (("Before clipping", "norm_before"), ("After clipping", "norm_after")):
        panels[title] = _last_period(frame, attribute, measure, epsilon)
    return dots(panels, "mean norm of a row's gradient", log=True)


def clipped(frame: pd.DataFrame, attribute: str, epsilon: float) -> Figure:
    """Share of each group's rows that were clipped, early and late in a run."""
    panels = {
        "First tenth of the run": _last_period(frame, attribute, "clipped", epsilon, first=True),
        "Last tenth of the run": _last_period(frame, attribute, "clipped", epsilon),
    }
    return dots(panels, "rows above their threshold", share=True)


def _last_period(
    frame: pd.DataFrame, attribute: str, measure: str, epsilon: float, first: bool = False
) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By strategy and group, of the last (or first) period of each run."""
    of = frame[(frame["part"] == TRAINING) & (frame["measure"] == measure)]
    of = of[(of["attribute"] == attribute) & (of["epsilon"] == epsilon)]
    end = of.groupby("run")["step"].transform("min" if first else "max")
    of = of[of["step"] == end].dropna(subset="value")
    return {strategy: _by_group(chosen(of, strategy, epsilon)) for strategy, _ in pairs(of)}


def _by_group(frame: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Mean of the seeds and its interval for each group that has rows."""
    found = {}
    for group in dict.fromkeys(frame["group"]):
        values = frame[frame["group"] == group]["value"].dropna().tolist()
        if values:
            found[group] = (fmean(values), *bootstrap_interval(values))
    return found


def _line(frame: pd.DataFrame, over: str) -> Line:
    """Means of the seeds over a column, with their intervals."""
    x = sorted(frame[over].unique())
    values = [frame[frame[over] == place]["value"].dropna().tolist() for place in x]
    means = [fmean(of) if of else math.nan for of in values]
    return Line(x, means, [bootstrap_interval(of) for of in values])

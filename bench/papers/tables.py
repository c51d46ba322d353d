"""Numbers of a report from tidy results: ends of runs, means with intervals, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd

from bench.papers import scores
from bench.papers.scores import final
from bench.papers.strategies import NON_PRIVATE, STRATEGIES
from fastclip.fairness.statistics import bonferroni, bootstrap_interval, paired_wilcoxon

ORDER = {name: place for place, name in enumerate((NON_PRIVATE, *STRATEGIES))}
OVERALL = ("accuracy", "macro_accuracy", "worst_class_accuracy")


def labelled(epsilon: float) -> str:
    """A budget as tables show it."""
    return "-" if math.isnan(epsilon) else f"{epsilon:g}"


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean of the seeds and its 95% bootstrap interval; of what ran away, only how many."""
    away = sum(not math.isfinite(value) for value in values)
    if away == len(values):
        return "no rows" if all(math.isnan(value) for value in values) else "diverged"
    if away:  # the others' mean would hide it
        return f"{away} of {len(values)} diverged"
    low, high = bootstrap_interval(values)
    mean, *ends = (number(value, digits) for value in (fmean(values), low, high))
    return mean if math.isnan(low) else f"{mean} [{', '.join(ends)}]"


def number(value: float, digits: int) -> str:
    """With so many decimals; what has run away, by its power of ten."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.1e}"


def gaps(frame: pd.DataFrame) -> pd.DataFrame:
    """`scores.gaps` of every budget: a row for each strategy, budget, seed and attribute."""
    of = final(frame)
    tables = []
    for epsilon in of["epsilon"].drop_duplicates():
        at = of[of["epsilon"].isna() if math.isnan(epsilon) else of["epsilon"] == epsilon]
        tables.append(scores.gaps(at).stack().rename("value").reset_index().assign(epsilon=epsilon))
    return pd.concat(tables, ignore_index=True)


def overall(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy, macro accuracy, worst class and loss gaps by strategy and budget."""
    of = final(frame)
    of = of[of["attribute"] == "all"]
    gap = gaps(frame)
    spent = frame[(frame["attribute"] == "run") & (frame["measure"] == "epsilon")]
    rows = []
    for strategy, epsilon in pairs(frame):
        mine = chosen(of, strategy, epsilon)
        row: dict[str, object] = {"strategy": strategy, "epsilon": labelled(epsilon)}
        used = chosen(spent, strategy, epsilon)["value"]
        row["spent"] = f"{used.max():.2f}" if len(used) else "-"
        row["seeds"] = mine["seed"].nunique()
        for measure in OVERALL:
            row[measure.replace("_", " ")] = interval(
                mine[mine["measure"] == measure]["value"].tolist()
            )
        for attribute in dict.fromkeys(gap["attribute"]):
            values = chosen(gap[gap["attribute"] == attribute], strategy, epsilon)["value"]
            row[f"loss gap, {attribute}"] = interval(values.tolist())
        rows.append(row)
    return pd.DataFrame(rows)


def by_group(frame: pd.DataFrame, attribute: str, measure: str = "accuracy") -> pd.DataFrame:
    """A measure of each group of an attribute by strategy and budget."""
    of = final(frame)
    of = of[(of["attribute"] == attribute) & (of["measure"] == measure)]
    groups = list(dict.fromkeys(of["group"]))
    rows = []
    for strategy, epsilon in pairs(of):
        mine = chosen(of, strategy, epsilon)
        cells = {g: interval(mine[mine["group"] == g]["value"].tolist()) for g in groups}
        rows.append({"strategy": strategy, "epsilon": labelled(epsilon), **cells})
    return pd.DataFrame(rows)


def comparisons(
    frame: pd.DataFrame, against: Sequence[str] = ("dp_sgd", "adaptive")
) -> pd.DataFrame:
    """Loss gaps of each strategy beside others', paired by seed and attribute (SoftAdaClip, 5.1).

    Wilcoxon's signed-rank test, two-sided; p values are multiplied by their number (Bonferroni).
    """
    gap = gaps(frame)
    rows = []
    for epsilon in sorted({e for _, e in pairs(gap) if not math.isnan(e)}):
        at = gap[gap["epsilon"] == epsilon]
        wide = at.pivot_table(index=["seed", "attribute"], columns="strategy", values="value")
        for other in against:
            for strategy in wide.columns:
                both = wide[[strategy, other]].dropna() if other in wide else wide[:0]
                if strategy == other or strategy in against[: against.index(other)] or both.empty:
                    continue
                test = paired_wilcoxon(both[strategy].to_numpy(), both[other].to_numpy())
                rows.append({
                    "epsilon": labelled(epsilon), "strategy": strategy, "beside": other,
                    "pairs": len(both),
                    "change of the gap": number((both[strategy] - both[other]).mean(), 3),
                    "p": test.p, "least p": test.least_p,
                })  # fmt: skip
    table = pd.DataFrame(rows)
    if len(table):
        table["p, corrected"] = bonferroni(table["p"].tolist())
    return table


def pairs(frame: pd.DataFrame) -> list[tuple[str, float]]:
    """(strategy, epsilon) of a frame, in the order of tables."""
    found = frame[["strategy", "epsilon"]].drop_duplicates().itertuples(index=False, name=None)
    return sorted(found, key=lambda pair: (_number(pair[1]), ORDER.get(pair[0], len(ORDER))))


def chosen(frame: pd.DataFrame, strategy: str, epsilon: float) -> pd.DataFrame:
    """Rows of a strategy and budget."""
    budget = frame["epsilon"].isna() if math.isnan(epsilon) else frame["epsilon"] == epsilon
    return frame[(frame["strategy"] == strategy) & budget]


def _number(epsilon: float) -> float:
    return -1.0 if math.isnan(epsilon) else epsilon

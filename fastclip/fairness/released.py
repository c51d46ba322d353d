"""Rates by group from noisy counts: what may be published of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastclip.counts import CountQuery, NoisyCounts
from fastclip.fairness.given import ALL

_TWO_CLASSES = ("selected", "positive", "true positive")


def query_of(
    attributes: Mapping[str, Sequence[str]], classes: int, *, data: Any, noise_multiplier: float,
    unit: str, per_group: int,
) -> CountQuery:  # fmt: skip
    """One query for all attributes, in each of which a unit has one group.

    Args:
        attributes: names of the groups of each, at least one attribute. classes: their number; with two,
            predictions and labels of class 1 are counted, too. The rest: as of CountQuery.
    """
    names = [
        f"{attribute}: {group}" for attribute, groups in attributes.items() for group in groups
    ]
    measures = ("correct", "rows", *(_TWO_CLASSES if classes == 2 else ()))
    return CountQuery(
        data, names, noise_multiplier, unit, measures=measures, per_group=per_group,
        groups_per_unit=len(attributes), disjoint=False,
    )  # fmt: skip


def counted(
    query: CountQuery, attributes: Mapping[str, Sequence[str]], groups: Mapping[str, np.ndarray],
    predictions: np.ndarray, labels: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
    """What `engine.count` takes: the groups of each sample, [n, groups], and its measures, each [n]."""
    members = [groups[name][:, None] == np.arange(len(of)) for name, of in attributes.items()]
    found = {
        "correct": predictions == labels, "selected": predictions == 1, "positive": labels == 1,
        "true positive": (predictions == 1) & (labels == 1),
    }  # fmt: skip
    wanted = {name: value for name, value in found.items() if name in query.measures}
    return np.concatenate(members, 1), wanted


def rows_of(
    answer: NoisyCounts, attributes: Mapping[str, Sequence[str]]
) -> list[tuple[str, str, str, float]]:
    """(attribute, group, measure, value) of an answer; everybody is the sum over the first attribute."""
    found, rates, start = [], answer.rates(), 0
    for attribute, names in attributes.items():
        for group, number in zip(names, range(start, start + len(names)), strict=True):
            rate = rates[answer.query.groups[number]]
            values = _measured(answer.query.measures, answer.counts[number].tolist())
            values |= {"accuracy_low": rate.low, "accuracy_high": rate.high}
            found += [(attribute, group, measure, value) for measure, value in values.items()]
        if not start:
            everybody = answer.counts[: len(names)].sum(0).tolist()
            values = _measured(answer.query.measures, everybody)
            found += [(ALL, ALL, measure, value) for measure, value in values.items()]
        start += len(names)
    return found


def _measured(measures: Sequence[str], counts: Sequence[float]) -> dict[str, float]:
    of = dict(zip(measures, counts, strict=True))
    found = {"rows": of["rows"], "accuracy": _share(of["correct"], of["rows"])}
    if "selected" in of:
        false, negative = of["selected"] - of["true positive"], of["rows"] - of["positive"]
        found |= {
            "selection_rate": _share(of["selected"], of["rows"]),
            "true_positive_rate": _share(of["true positive"], of["positive"]),
            "false_positive_rate": _share(false, negative),
        }
    return found


def _share(of: float, among: float) -> float:
    return min(max(of / among, 0.0), 1.0) if among > 0 else math.nan

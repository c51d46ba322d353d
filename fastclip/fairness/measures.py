"""Measures of one evaluation, by group: fairlearn's MetricFrame over rows' losses and predictions.

Rows of one group, label and prediction are counted first and measured as one with that weight: the
measures see nothing else of a row but its loss, whose sum is kept, and MetricFrame takes milliseconds a
thousand rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
from sklearn.metrics import accuracy_score

from fastclip.fairness.given import ALL, CLASS

Metric = Callable[..., float]


def _rows(labels: Any, predictions: Any, weights: Any) -> float:
    return float(np.sum(weights))


def _loss_sum(labels: Any, predictions: Any, losses: Any) -> float:
    return float(np.sum(losses))


def _loss_mean(labels: Any, predictions: Any, losses: Any, weights: Any) -> float:
    return float(np.sum(losses) / np.sum(weights))


def _rate(rate: Metric, among: int | None) -> Metric:
    """fairlearn's rate of class 1; NaN, not 0, where no row has the label that it is a share of."""

    def found(labels: Any, predictions: Any, sample_weight: Any) -> float:
        if among is not None and among not in np.asarray(labels):
            return float("nan")
        return float(rate(labels, predictions, pos_label=1, sample_weight=sample_weight))

    return found


def metrics(classes: int) -> dict[str, Metric]:
    """Names of the measures and their functions.

    Args:
        classes: their number; with two, rates of class 1 as the positive one are measured, too.
    """
    found: dict[str, Metric] = {
        "rows": _rows, "accuracy": accuracy_score, "loss_sum": _loss_sum, "loss_mean": _loss_mean,
    }  # fmt: skip
    if classes == 2:
        found |= {
            "selection_rate": _rate(selection_rate, None),
            "true_positive_rate": _rate(true_positive_rate, 1),
            "false_positive_rate": _rate(false_positive_rate, 0),
        }
    return found


def evaluation(
    *, losses: np.ndarray, predictions: np.ndarray, labels: np.ndarray,
    groups: Mapping[str, np.ndarray], attributes: Mapping[str, Sequence[str]],
    classes: Sequence[str],
) -> pd.DataFrame:  # fmt: skip
    """All measures, a row each: columns attribute, group, measure, value.

    Args:
        losses: of rows, [n], float.
        predictions: class numbers, [n].
        labels: class numbers, [n].
        groups: of each attribute, the group of every row, [n].
        attributes: names of the groups, by their number.
        classes: names of the classes.

    Returns:
        Measures of everybody (attribute "all"), of each group and of each class; those of a group
        without rows are NaN, its number of rows 0. Of everybody also `macro_accuracy`, the mean of
        the classes' accuracies, and `worst_class_accuracy`, over classes that have rows.
    """
    every = {ALL: (ALL,), **attributes, CLASS: tuple(classes)}
    members = {ALL: np.zeros(len(labels), np.int64), **groups, CLASS: labels}
    tables = [
        _by_group(name, names, members[name], losses, predictions, labels, len(classes))
        for name, names in every.items()
    ]
    found = pd.concat(tables, ignore_index=True)
    of_class = found[(found["attribute"] == CLASS) & (found["measure"] == "accuracy")]["value"]
    known = of_class.dropna()
    means = {
        "macro_accuracy": known.mean() if len(known) else np.nan,
        "worst_class_accuracy": known.min() if len(known) else np.nan,
    }
    overall = pd.DataFrame(
        {"attribute": ALL, "group": ALL, "measure": list(means), "value": list(means.values())}
    )
    return pd.concat([found, overall], ignore_index=True)


def _by_group(
    attribute: str, names: Sequence[str], members: np.ndarray, losses: np.ndarray,
    predictions: np.ndarray, labels: np.ndarray, classes: int,
) -> pd.DataFrame:  # fmt: skip
    """The measures of each group of one attribute."""
    functions = metrics(classes)
    empty = {name: 0.0 if name == "rows" else np.nan for name in functions}
    values = {number: dict(empty) for number in range(len(names))}
    if len(labels):
        cells, cell = np.unique(
            np.stack([members, labels, predictions]), axis=1, return_inverse=True
        )
        weights = np.bincount(cell.ravel())
        sums = np.bincount(cell.ravel(), weights=losses)  # what is not finite stays so
        by_weight = {name: {"sample_weight": weights} for name in functions}
        frame = MetricFrame(
            metrics=functions, y_true=cells[1], y_pred=cells[2],
            sensitive_features=pd.Series(cells[0]),  # an array of one cell would lose its dimension
            sample_params={
                **by_weight, "rows": {"weights": weights}, "loss_sum": {"losses": sums},
                "loss_mean": {"losses": sums, "weights": weights},
            },
        )  # fmt: skip
        for number, row in frame.by_group.iterrows():
            values[int(number)] = {name: float(row[name]) for name in functions}
    return pd.DataFrame(
        [
            {"attribute": attribute, "group": names[number], "measure": measure, "value": value}
            for number, of_group in values.items() for measure, value in of_group.items()
        ]
    )  # fmt: skip

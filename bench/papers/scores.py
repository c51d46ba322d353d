"""What claims compare runs by: one score a run, from the rows of its last step."""

from __future__ import annotations

from typing import TypeVar

import pandas as pd

from bench.papers.strategies import NON_PRIVATE
from fastclip.errors import ArgumentError

Frame = TypeVar("Frame", pd.Series, pd.DataFrame)

RUN = ["experiment", "strategy", "epsilon", "seed"]
NUMBER = ["attribute", "group", "measure"]
COLUMNS = [*RUN, *NUMBER, "synthetic", "part", "step", "value"]
WHOLE, CLASS, UNKNOWN = "all", "class", "unknown"  # of attributes, and of rows that say no group


def final(frame: pd.DataFrame, part: str = "test") -> pd.DataFrame:
    """Rows of each run's last step.

    Raises:
        ArgumentError: a column is missing, or a run has two values of a number.
    """
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise ArgumentError(
            f"results need columns {', '.join(COLUMNS)}; {', '.join(missing)} missing"
        )
    frame = frame[frame.part == part]
    steps = frame.groupby(RUN, dropna=False).step.transform("max")
    frame = frame[frame.step == steps]
    twice = frame[frame.duplicated([*RUN, *NUMBER])]
    if len(twice):
        names = ", ".join(f"{name} {twice[name].iloc[0]}" for name in [*RUN, *NUMBER])
        raise ArgumentError(f"a run has one value of a number at its last step; two of {names}")
    return frame


def of(score: Frame, strategy: str) -> Frame:
    """Scores of a strategy, by seed."""
    return score[score.index.get_level_values("strategy") == strategy].droplevel("strategy")


def _groups(frame: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A number of the groups between which an experiment asks for fairness, by strategy and seed.

    Classes are groups where there are more than two of them, or nothing else. Rows whose group is
    unknown are no group.
    """
    frame = frame[
        (frame.measure == measure) & (frame.attribute != WHOLE) & (frame.group != UNKNOWN)
    ]
    classes = frame.attribute == CLASS
    if not classes.all() and frame[classes].group.nunique() <= 2:
        frame = frame[~classes]
    return frame.pivot(index=["strategy", "seed"], columns=["attribute", "group"], values="value")


def _spread(groups: pd.DataFrame) -> pd.DataFrame:
    """Largest difference of two groups, a column an attribute; NaN where a group has no rows."""
    by_attribute = groups.T.groupby(level="attribute")
    spread = by_attribute.max() - by_attribute.min()
    return spread.where(by_attribute.count() >= 2).T


def gaps(frame: pd.DataFrame) -> pd.DataFrame:
    """|L_1 - L_2| of the groups of each attribute, L the mean loss of a row; a column an attribute.

    Of more than two groups the largest difference. Soleymani et al. (Section 5) define L as a sum;
    what their tables print is the sum over a batch of 256 rows, whatever the size of a group (its
    Section 5.2 quotes the same numbers divided by 256), and sums of groups of unequal size would differ
    by their sizes alone.
    """
    return _spread(_groups(frame, "loss_mean"))


def loss_gap(frame: pd.DataFrame) -> pd.Series:
    """`gaps`, averaged over attributes (Soleymani et al., appendix B.1)."""
    return gaps(frame).mean(axis=1)


def worst_accuracy(frame: pd.DataFrame) -> pd.Series:
    """Accuracy of the worst class, or of the worse-off group where classes are not what is protected.

    Zhao et al. 2025, Section 4.1: classes of images, sexes of tabular data.
    """
    groups = _groups(frame, "accuracy")
    if CLASS not in groups.columns.get_level_values("attribute"):
        return groups.min(axis=1)
    frame = frame[frame.measure == "worst_class_accuracy"]
    return frame.set_index(["strategy", "seed"]).value


def inequality(frame: pd.DataFrame) -> pd.Series:
    """max |Delta_k - Delta_l| over the groups of an attribute, the largest of all attributes.

    Delta_k is the accuracy of group k less that without privacy at the same seed (Xu et al. 2020,
    Definition 6 and Section 6.1).
    """
    groups = _groups(frame, "accuracy")
    base = of(groups, NON_PRIVATE).reindex(groups.index.get_level_values("seed"))
    return _spread(groups - base.to_numpy()).max(axis=1)


def accuracy(frame: pd.DataFrame) -> pd.Series:
    """Accuracy on all rows."""
    frame = frame[(frame.measure == "accuracy") & (frame.attribute == WHOLE)]
    return frame.set_index(["strategy", "seed"]).value

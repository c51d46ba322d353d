"""Records what training does to subgroups, as one tidy table: a measured value a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fastclip.counts import NoisyCounts
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness.given import (
    ALL,
    CLASS,
    LAYER,
    attributes_of,
    check_numbers,
    check_rows,
    chosen,
    names_of,
)
from fastclip.fairness.measures import evaluation
from fastclip.fairness.observed import Observed
from fastclip.fairness.released import counted, query_of, rows_of

COLUMNS = ("step", "epsilon", "part", "attribute", "group", "measure", "value", "private")
TRAINING = "training"
"""The part of what was measured in training steps."""


class FairnessRecorder:
    """Evaluations by group, and norms by group of the steps between them.

    Examples:
        >>> recorder = FairnessRecorder({"sex": ("female", "male")}, ("no", "yes"))
        >>> for x, y, sex in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     recorder.observe(optimizer, {"sex": sex})
        ...     optimizer.step()
        >>> recorder.close_period(step)
        >>> recorder.frame()

    Args:
        attributes: names of the groups of each attribute, by their number.
        classes: names of the classes, by their number.
        protected: the attribute whose groups `engine.set_groups` gets, for strategies of groups.

    Guarantee: that of `release` for what it writes; else none. Evaluations and norms look at rows
    without noise; the column `private` is True for what follows from the private run alone (thresholds,
    noise, epsilon) and from noisy counts. What is observed changes nothing of the training.
    """

    def __init__(
        self, attributes: Mapping[str, Sequence[str]], classes: Sequence[str],
        protected: str | None = None,
    ) -> None:  # fmt: skip
        self.classes = names_of("the classes", classes)
        self.attributes = attributes_of(attributes, self.classes)
        if protected is not None and protected not in self.attributes:
            raise ArgumentError(
                f"protected expects one of the attributes {tuple(self.attributes)}, got {protected!r}"
            )
        self._observed = Observed(self.attributes, protected)
        self._rows: list[dict[str, Any]] = []

    def evaluate(
        self, step: int, *, losses: Tensor, predictions: Tensor, labels: Tensor,
        groups: Mapping[str, Tensor], part: str = "test", epsilon: float | None = None,
    ) -> None:  # fmt: skip
        """Measure one part of the data.

        Args:
            step: real steps so far.
            losses: of the rows, [n], each of its row alone.
            predictions: int64 [n].
            labels: int64 [n].
            groups: of each attribute, the group of every row, int64 [n].
            part: "test", "validation", "train" or a name of your own.
            epsilon: spent so far.
        """
        if any(row["part"] == part and row["private"] for row in self._rows if part != TRAINING):
            raise ArgumentError(
                f"evaluate got part={part!r}, of which this table holds noisy counts that may be "
                "published. Give it another name"
            )
        if part == TRAINING:
            raise ArgumentError(
                f"evaluate expects another name than {TRAINING!r}, which is that of observed steps, "
                "for part; rows that trained are 'train'"
            )
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
            raise ArgumentTypeError(f"evaluate expects losses as a tensor of floats, got {got}")
        rows, given = losses.numel(), chosen("evaluate", groups, self.attributes)
        check_rows("evaluate", "losses", losses, rows)
        classes = _numbers("labels", labels, rows, len(self.classes))
        found = _numbers("predictions", predictions, rows, len(self.classes))
        members = {
            name: _numbers(name, of_rows, rows, len(self.attributes[name]))
            for name, of_rows in given.items()
        }
        if CLASS in members and (members[CLASS] != classes).any():
            raise ArgumentError(f"evaluate expects the groups of {CLASS!r} to be the labels")
        table = evaluation(
            losses=_array(losses.double()), predictions=found, labels=classes, groups=members,
            attributes=self.attributes, classes=self.classes,
        )  # fmt: skip
        for row in table.to_dict("records"):
            self._note(step, part, epsilon=epsilon, **row)

    def release(
        self, step: int, engine: Any, *, data: Any, noise_multiplier: float, predictions: Tensor,
        labels: Tensor, groups: Mapping[str, Tensor], unit: str, unit_ids: Any = None,
        per_group: int = 1, part: str = "released",
    ) -> NoisyCounts:  # fmt: skip
        """Measure one part of the data by one noisy count query, which may be published.

        Formal guarantee: as of `engine.count`; what is written is post-processing of its answer. A unit
        counts in one group of each attribute (in as many groups as there are attributes, those where it
        has most samples).

        Args:
            step: real steps so far.
            engine: whose ledger pays.
            data, noise_multiplier, unit, per_group: as of `fastclip.counts.CountQuery`.
            unit_ids: of each sample, [n], where unit is "unit".
            part: a name that no evaluation without noise has. The rest: as of `evaluate`.

        Returns:
            The answer. The table gets rows, accuracy and its 95 % interval by group (`accuracy_low`,
            `accuracy_high`), and with two classes the rates of class 1.

        Raises:
            ArgumentError, ArgumentTypeError: as `evaluate` and `engine.count`; nothing is spent.
            StepError: it cannot be recorded.
        """
        if not self.attributes:
            raise ArgumentError(
                "release needs groups. Give FairnessRecorder at least one attribute"
            )
        if part == TRAINING or any(
            row["part"] == part and not row["private"] for row in self._rows
        ):
            raise ArgumentError(
                f"release got part={part!r}, of which this table holds figures without noise. Give it "
                "another name"
            )
        rows, given = len(labels), chosen("release", groups, self.attributes)
        classes = _numbers("labels", labels, rows, len(self.classes))
        found = _numbers("predictions", predictions, rows, len(self.classes))
        members = {
            name: _numbers(name, of_rows, rows, len(self.attributes[name]))
            for name, of_rows in given.items()
        }
        query = query_of(
            self.attributes, len(self.classes), data=data, noise_multiplier=noise_multiplier, unit=unit,
            per_group=per_group,
        )  # fmt: skip
        masks, measures = counted(query, self.attributes, members, found, classes)
        answer: NoisyCounts = engine.count(
            query, groups=masks, measures=measures, unit_ids=unit_ids
        )
        for attribute, group, measure, value in rows_of(answer, self.attributes):
            self._note(step, part, attribute, group, measure, value, private=True)
        return answer

    def observe(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """Norms of the last backward pass, before its `optimizer.step()`; see `Observed.add`."""
        self._observed.add(optimizer, groups)

    def close_period(self, step: int) -> None:
        """Write what was observed since the last call: rows, mean norms, share clipped, by group.

        A row whose gradient is not finite contributes nothing: it counts as clipped, with norms of 0.
        """
        for attribute, measures in self._observed.read().items():
            for measure, values in measures.items():
                for group, value in zip(self.attributes[attribute], values, strict=True):
                    self._note(step, TRAINING, attribute, group, measure, value)

    def thresholds(self, step: int, optimizer: Any) -> None:
        """Write thresholds, weights of groups and sensitivity of the last step; the next one's noise.

        To be called after `optimizer.step()`, which pays for them. Thresholds of groups are told by
        the groups of `protected`; of layers, by their number. They are private where their counts
        had noise.

        Raises:
            ArgumentError: before the step that pays for thresholds of this very batch's counts.
        """
        keeper = optimizer.keeper
        policy = keeper.clipping.strategy.threshold
        if policy.same_step and keeper.clipping.current is not keeper.clipping.paid:
            raise ArgumentError(
                f"thresholds of {type(policy).__name__} follow from this batch's counts, which "
                "optimizer.step() pays for: call thresholds() after it"
            )
        counted = policy.count_noise_ratio is not None
        private = not (counted and float(optimizer.noise_multiplier) == 0)
        values = optimizer.threshold.detach().cpu().reshape(-1).tolist()
        protected = self._observed.groups_of(keeper.clipping.strategy)
        attribute, names = LAYER, tuple(str(number) for number in range(len(values)))
        if len(values) == 1:
            attribute, names = ALL, (ALL,)
        elif protected is not None:
            attribute, names = protected, self.attributes[protected]
        for name, value in zip(names, values, strict=True):
            self._note(step, TRAINING, attribute, name, "threshold", value, private=private)
        if protected is not None and (weights := optimizer.group_weights) is not None:
            for name, value in zip(self.attributes[protected], weights.tolist(), strict=True):
                self._note(step, TRAINING, protected, name, "weight", value, private=private)
        others = {
            "sensitivity": float(optimizer.sensitivity),
            "noise_multiplier": float(optimizer.noise_multiplier),
        }
        for measure, value in others.items():
            self._note(step, TRAINING, ALL, ALL, measure, value, private=private)

    def frame(self) -> pd.DataFrame:
        """All that was written, one value a row: `COLUMNS`."""
        return pd.DataFrame(self._rows, columns=list(COLUMNS))

    def to_tensorboard(self, writer: Any) -> None:
        """Write every value as a scalar of a torch.utils.tensorboard.SummaryWriter.

        Tags are (not )private/part/attribute/group/measure.
        """
        for row in self._rows:
            words = (row["part"], row["attribute"], row["group"], row["measure"])
            tag = "/".join(("private" if row["private"] else "not private", *words))
            writer.add_scalar(tag, row["value"], row["step"])

    def state_dict(self) -> dict[str, Any]:
        """Everything, in types that torch.load(weights_only=True) reads. NOT private."""
        return {"rows": [dict(row) for row in self._rows], "observed": self._observed.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._observed.load(state["observed"])
        self._rows = [dict(row) for row in state["rows"]]

    def _note(
        self, step: int, part: str, attribute: str, group: str, measure: str, value: float,
        epsilon: float | None = None, private: bool = False,
    ) -> None:  # fmt: skip
        spent = None if epsilon is None else float(epsilon)
        told = (int(step), spent, part, attribute, group, measure, float(value), private)
        self._rows.append(dict(zip(COLUMNS, told, strict=True)))


def _numbers(name: str, values: Any, rows: int, count: int) -> np.ndarray:
    check_numbers("evaluate", name, values, rows, count, wait=True)
    return _array(values.to(torch.int64))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().to(torch.device("cpu")).numpy()

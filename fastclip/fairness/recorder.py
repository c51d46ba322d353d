"""Records what training does to subgroups, as one tidy table: a measured value a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fastclip.errors import ArgumentError
from fastclip.fairness.measures import ALL, CLASS, evaluation
from fastclip.fairness.observed import Observed

COLUMNS = ("step", "epsilon", "part", "attribute", "group", "measure", "value", "private")
TRAINING = "training"
"""The part of what was measured in training steps."""


class FairnessRecorder:
    """Evaluations by group, and norms by group of the steps between them.

    Example:
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

    Guarantee: none. Evaluations and norms look at rows without noise; the column `private` is True
    for what follows from the private run alone (thresholds, noise, epsilon). What is observed changes
    nothing of the training.
    """

    def __init__(
        self, attributes: Mapping[str, Sequence[str]], classes: Sequence[str],
        protected: str | None = None,
    ) -> None:  # fmt: skip
        self.attributes = {name: tuple(groups) for name, groups in attributes.items()}
        self.classes = tuple(classes)
        own = {CLASS: self.classes, ALL: (ALL,)}
        for name, groups in self.attributes.items():
            if name in own and groups != own[name]:
                raise ArgumentError(f"FairnessRecorder measures {name!r} itself; name it otherwise")
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
            losses: of the rows, [n], each of its row alone. predictions, labels: int64 [n].
            groups: of each attribute, the group of every row, int64 [n].
            part: "test", "validation", "train" or a name of your own.
            epsilon: spent so far.
        """
        named = {"losses": losses, "predictions": predictions, "labels": labels}
        given = {name: groups[name] for name in self._known(groups)}
        for name, of_rows in {**named, **given}.items():
            if tuple(of_rows.shape) != (len(labels),):
                raise ArgumentError(
                    f"evaluate expects a value of {name} a row, [{len(labels)}], got "
                    f"{list(of_rows.shape)}"
                )
        for name, names in {**self.attributes, CLASS: self.classes}.items():
            of_rows = labels if name == CLASS else given[name]
            if len(of_rows) and not 0 <= int(of_rows.min()) <= int(of_rows.max()) < len(names):
                raise ArgumentError(
                    f"evaluate expects numbers from 0 to {len(names) - 1} for {name}, got "
                    f"{int(of_rows.min())} to {int(of_rows.max())}"
                )
        table = evaluation(
            losses=_array(losses).astype(np.float64), predictions=_array(predictions),
            labels=_array(labels), classes=self.classes,
            groups={name: _array(of_rows) for name, of_rows in given.items()},
            attributes=self.attributes,
        )  # fmt: skip
        for row in table.to_dict("records"):
            self._note(step, part, epsilon=epsilon, **row)

    def observe(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """Norms of the last backward pass, before its `optimizer.step()`; see `Observed.add`."""
        self._known(groups)
        self._observed.add(optimizer, groups)

    def close_period(self, step: int) -> None:
        """Write what was observed since the last call: rows, mean norms, share clipped, by group."""
        for attribute, measures in self._observed.read().items():
            for measure, values in measures.items():
                for group, value in zip(self.attributes[attribute], values, strict=True):
                    self._note(step, TRAINING, attribute, group, measure, value)

    def thresholds(self, step: int, optimizer: Any) -> None:
        """Write thresholds, sensitivity and noise of the last step, which are public once released.

        Thresholds of groups are told by the groups of `protected`; of layers, by their number.
        """
        values = optimizer.threshold.detach().cpu().reshape(-1).tolist()
        protected = self._observed.protected
        groups = optimizer.keeper.clipping.strategy.threshold.num_groups
        attribute, names = "layer", tuple(str(number) for number in range(len(values)))
        if len(values) == 1:
            attribute, names = ALL, (ALL,)
        elif groups is not None and protected is not None:
            attribute, names = protected, self.attributes[protected]
        for name, value in zip(names, values, strict=True):
            self._note(step, TRAINING, attribute, name, "threshold", value, private=True)
        others = {
            "sensitivity": float(optimizer.sensitivity),
            "noise_multiplier": float(optimizer.noise_multiplier),
        }
        for measure, value in others.items():
            self._note(step, TRAINING, ALL, ALL, measure, value, private=True)

    def frame(self) -> pd.DataFrame:
        """All that was written, one value a row: `COLUMNS`."""
        return pd.DataFrame(self._rows, columns=list(COLUMNS))

    def to_tensorboard(self, writer: Any) -> None:
        """Write every value as a scalar of a torch.utils.tensorboard.SummaryWriter.

        Tags are part/attribute/group/measure, with "not private" in front where it is not.
        """
        for row in self._rows:
            words = (row["part"], row["attribute"], row["group"], row["measure"])
            tag = "/".join(("private" if row["private"] else "not private", *words))
            writer.add_scalar(tag, row["value"], row["step"])

    def state_dict(self) -> dict[str, Any]:
        """Everything, in types that torch.load(weights_only=True) reads. NOT private."""
        return {"rows": list(self._rows), "observed": dict(self._observed.sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._rows = list(state["rows"])
        self._observed.sums = dict(state["observed"])

    def _known(self, groups: Mapping[str, Tensor]) -> list[str]:
        missing = [name for name in self.attributes if name not in groups]
        if missing:
            raise ArgumentError(
                f"groups expects the attributes {tuple(self.attributes)}, lacks {', '.join(missing)}"
            )
        return list(self.attributes)

    def _note(
        self, step: int, part: str, attribute: str, group: str, measure: str, value: float,
        epsilon: float | None = None, private: bool = False,
    ) -> None:  # fmt: skip
        told = (step, epsilon, part, attribute, group, measure, float(value), private)
        self._rows.append(dict(zip(COLUMNS, told, strict=True)))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().to(torch.device("cpu")).numpy()

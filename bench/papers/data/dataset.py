"""What an experiment trains and tests on: tensors, the groups of every row, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """A part of a data set.

    Attributes:
        x: inputs of the model, each [n, ...].
        y: classes, int64 [n].
        groups: of each attribute, the group of every row, int64 [n].
    """

    x: tuple[Tensor, ...]
    y: Tensor
    groups: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A data set, split.

    Attributes:
        name: as in reports.
        train, test: its parts, and validation where the paper has one.
        classes: names of the classes.
        attributes: names of the groups of each protected attribute, by their number.
        synthetic: made by a generator: every output says so.
        notes: what differs from the paper's data, a sentence each.
        split: how it was split, as written into results: seed, numbers of rows, and a SHA-256 of the
            row numbers of each part.
    """

    name: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    attributes: Mapping[str, tuple[str, ...]]
    validation: Rows | None = None
    synthetic: bool = False
    notes: tuple[str, ...] = ()
    split: Mapping[str, Any] = field(default_factory=dict)

"""Which row of which data set a loader's row is, through torch's own subsets and joined data sets."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from fastclip.data.sample_keys import unknown_keys, value_of
from fastclip.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that one data set of no known parts brings.

    Args:
        dataset: that data set. places: int64 [rows], of the rows among those that were asked for.
        rows: int64 [rows], their numbers in it.
    """

    dataset: Any
    places: np.ndarray
    rows: np.ndarray


def parts_of(dataset: Any, rows: np.ndarray | None = None) -> list[Part]:
    """Rows of a data set, by the data sets that they come from: random_split's and nested ones too.

    Data sets of the user's own that repeat or reorder what they hold are taken as they are.

    Args:
        rows: int64 [rows], the numbers of those that are asked for; None: all.

    Raises:
        ArgumentError: a Subset has keys that do not say which of its samples are the same.
    """
    rows = np.arange(len(dataset), dtype=np.int64) if rows is None else rows
    return list(_parts(dataset, np.arange(len(rows), dtype=np.int64), rows))


def _parts(dataset: Any, places: np.ndarray, rows: np.ndarray) -> Iterator[Part]:
    if isinstance(dataset, Subset) and len(dataset) == len(dataset.indices):
        chosen = numbers(dataset.indices)
        if chosen is not None:
            yield from _parts(dataset.dataset, places, chosen[rows])
            return
        first: dict[Any, int] = {}
        try:
            keys = [value_of(key) for key in dataset.indices]
        except TypeError as error:
            who = f"the data set's {type(dataset).__name__} has"
            raise ArgumentError(unknown_keys(who, error)) from error
        same = [first.setdefault(key, place) for place, key in enumerate(keys)]
        rows = np.asarray(same, dtype=np.int64)[rows]
    elif isinstance(dataset, ConcatDataset) and len(dataset) == dataset.cumulative_sizes[-1]:
        rows = np.where(rows < 0, rows + len(dataset), rows)
        ends = np.asarray(dataset.cumulative_sizes, dtype=np.int64)
        which = np.searchsorted(ends, rows, side="right")
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(ends) + 1))
        for number, each in enumerate(dataset.datasets):
            mine = order[cuts[number] : cuts[number + 1]]
            if len(mine):
                before = int(ends[number - 1]) if number else 0
                yield from _parts(each, places[mine], rows[mine] - before)
        return
    length = length_of(dataset)
    yield Part(dataset, places, rows if length is None else np.where(rows < 0, rows + length, rows))


def length_of(dataset: Any) -> int | None:
    """Rows of a data set; None where it does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def numbers(indices: Any) -> np.ndarray | None:
    """Of a Subset, int64; None where it names its rows otherwise."""
    if isinstance(indices, Tensor):
        indices = indices.cpu().numpy()
    found = np.asarray(indices) if len(indices) else np.zeros(0, dtype=np.int64)
    if found.ndim == 1 and found.dtype.kind in "iub":
        return found.astype(np.int64)
    try:
        return np.fromiter((operator.index(i) for i in indices), np.int64, len(indices))
    except TypeError:
        return None

"""Which row of which data set a loader's row is, through torch's own subsets and joined data sets.

A loader draws numbers, each at most once; where two of them are one row (a Subset with a row ten times,
a data set joined with itself), that row contributes more often than epsilon says.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
)

from fastclip.data.loader import unwatched
from fastclip.data.samplers import SUBSETS, Choice
from fastclip.data.sampling import PoissonSampler
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


def parts_of(dataset: Any) -> list[Part]:
    """All rows of a data set, by the data sets that they come from: random_split's and nested ones too.

    Data sets of the user's own that repeat or reorder what they hold are taken as they are.
    """
    places = np.arange(len(dataset), dtype=np.int64)
    return list(_parts(dataset, places, places))


def _parts(dataset: Any, places: np.ndarray, rows: np.ndarray) -> Iterator[Part]:
    if isinstance(dataset, Subset) and len(dataset) == len(dataset.indices):
        chosen = _numbers(dataset.indices)
        if chosen is not None:
            yield from _parts(dataset.dataset, places, chosen[rows])
            return
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
    if hasattr(dataset, "__len__"):
        rows = np.where(rows < 0, rows + len(dataset), rows)
    yield Part(dataset, places, rows)


def _numbers(indices: Any) -> np.ndarray | None:
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


def _identity(dataset: Any) -> Hashable:
    """One for data sets of the same rows: a TensorDataset is its tensors."""
    if type(dataset) is TensorDataset:
        return tuple(id(tensor) for tensor in dataset.tensors)
    return id(dataset)


def check_copies(loader: DataLoader, choice: Choice | None, unit: Tensor | None) -> None:
    """Refuse rows that may be drawn apart and are the same row.

    Args:
        choice: of the rows to draw; None where the loader's own sampler draws.
        unit: of each row, -1 for those that are not drawn: copies must be one unit's. None where rows
            are drawn one by one.

    Raises:
        ArgumentError: naming two of them.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, (Subset, ConcatDataset)):
        return
    parts = parts_of(dataset)
    keys = np.zeros(len(dataset), dtype=np.int64)
    starts: dict[Hashable, int] = {}
    least = min((int(part.rows.min()) for part in parts if len(part.rows)), default=0)
    span = max((int(part.rows.max()) for part in parts if len(part.rows)), default=0) - least + 1
    for part in parts:
        start = starts.setdefault(_identity(part.dataset), len(starts) * span)
        keys[part.places] = start + part.rows - least
    drawn = _drawn(loader, choice, unit)
    keys = keys if drawn is None else keys[drawn]
    order = np.argsort(keys, kind="stable")
    again = keys[order[1:]] == keys[order[:-1]]
    if unit is not None:
        owners = unit.numpy() if drawn is None else unit.numpy()[drawn]
        again &= owners[order[1:]] != owners[order[:-1]]
    if not again.any():
        return
    first = int(again.argmax())
    i, j = (int(k if drawn is None else drawn[k]) for k in order[first : first + 2])
    part = next(each for each in parts if i in each.places)
    row = int(part.rows[part.places == i][0])
    count = int(again.sum())
    _refuse(dataset, f"{i} and {j}", f"{row} of {type(part.dataset).__name__}", count, unit)


def _refuse(dataset: Any, pair: str, row: str, count: int, unit: Tensor | None) -> None:
    if unit is not None:
        raise ArgumentError(
            f"unit_ids gives rows {pair} of the data set ({type(dataset).__name__}) to two units, and "
            f"they are one row ({row}; so are {count} pairs), which would contribute with both: give "
            "all copies of a row one id, or leave the copies out"
        )
    raise ArgumentError(
        "data_loader expects a data set that has each row once, for epsilon is stated for rows that are "
        f"drawn once, got rows {pair} of a {type(dataset).__name__} that are one row ({row}; {count} "
        "rows are copies); leave the copies out, or pass unit_ids (with poisson_sampling=True), one id "
        "for all copies of a row, such as the indices of the Subset, which are then drawn as one"
    )


def _drawn(loader: DataLoader, choice: Choice | None, unit: Tensor | None) -> np.ndarray | None:
    """Numbers of the rows that may be drawn, int64; None: all."""
    if unit is not None:
        return (unit >= 0).nonzero().reshape(-1).numpy()
    if choice is None:
        outer: Any = loader.batch_sampler
        sampler = outer.sampler if unwatched(outer) is BatchSampler else outer
        if unwatched(sampler) in SUBSETS:
            rows = _numbers(sampler.indices)
            return None if rows is None else rows % len(loader.dataset)  # type: ignore[arg-type]
        drawn = sampler.rows if isinstance(sampler, PoissonSampler) else None
        return None if drawn is None else drawn.numpy()
    weights = choice.weights if choice.rates is None else choice.rates
    if weights is not None:
        return (weights > 0).nonzero().reshape(-1).numpy()
    return None if choice.rows is None else choice.rows.numpy()

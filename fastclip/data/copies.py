"""Rows that a data set has several times.

A loader draws numbers, each at most once; where two of them are one row (a Subset with a row ten times,
a data set joined with itself, or views of one tensor that overlap), that row contributes more often than
epsilon says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
)

from fastclip.data.base_rows import keys_of, numbers, parts_of
from fastclip.data.loader import drawing, unwatched
from fastclip.data.samplers import SUBSETS, Choice
from fastclip.data.sampling import PoissonSampler
from fastclip.errors import ArgumentError

_JOINED = (Subset, ConcatDataset, StackDataset)
"""Of whose rows two may be one."""


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
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, _JOINED):
        return
    keys, drawn = keys_of(dataset), _drawn(loader, choice, unit)
    keys = keys if drawn is None else keys[drawn]
    order = np.lexsort(keys.T[::-1])
    again = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    if unit is not None:
        owners = unit.numpy() if drawn is None else unit.numpy()[drawn]
        again &= owners[order[1:]] != owners[order[:-1]]
    if not again.any():
        return
    first = int(again.argmax())
    i, j = (int(k if drawn is None else drawn[k]) for k in order[first : first + 2])
    part = next(each for each in parts_of(dataset) if i in each.places)
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
        sampler = drawing(loader)
        if unwatched(sampler) in SUBSETS:
            rows = numbers(sampler.indices)
            return None if rows is None else rows % len(loader.dataset)  # type: ignore[arg-type]
        drawn = sampler.rows if isinstance(sampler, PoissonSampler) else None
        return None if drawn is None else drawn.numpy()
    weights = choice.weights if choice.rates is None else choice.rates
    if weights is not None:
        return (weights > 0).nonzero().reshape(-1).numpy()
    return None if choice.rows is None else choice.rows.numpy()

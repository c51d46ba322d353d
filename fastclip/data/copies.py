"""Samples that a loader may draw apart, by their numbers, and that are one record or share a part of it.

Such a record contributes more often than epsilon states: a Subset with a sample ten times, a data set
joined with itself, one tensor expanded to many samples, overlapping windows of a series.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fastclip.data.base_rows import numbers
from fastclip.data.loader import drawing, unwatched
from fastclip.data.row_order import generators_restored
from fastclip.data.sample_memory import (
    Shared,
    leaves_of,
    leaves_of_items,
    reads_by_itself,
    shared,
)
from fastclip.data.samplers import SUBSETS, Choice
from fastclip.data.sampling import PoissonSampler
from fastclip.errors import ArgumentError

_HOW = {
    "copies": "are the same sample, by number or memory",
    "more": "share more than each has for itself",
    "part": "overlap in memory",
}
_FIX = {
    "copies": "Leave out the copies, or pass unit_ids with one id for all samples of a record",
    "more": "Leave out the copies, or pass unit_ids (keep what is the same for all samples out of the "
    "data set, or clone() it)",
    "part": "Leave out samples that overlap, or pass unit_ids with one id for all samples of a record",
}


def check_copies(loader: DataLoader, choice: Choice | None, unit: Tensor | None) -> None:
    """Raise an error if a record is in several samples that may be drawn apart.

    Formal guarantee: none of the samples that torch's data sets, tensors, arrays and lists hold shares
    memory with another unit's (`sample_memory.shared`). Of a data set of the user's own, four samples
    are read and compared, unless its workers are the first to read it or a sampler of the user's own
    draws, whose keys are not known.

    Args:
        choice: of the samples to draw; None if the loader's own sampler draws.
        unit: of each sample, -1 for those that are not drawn: what shares memory must be one unit's.
            None if samples are drawn one by one.

    Raises:
        ArgumentError: naming two of them.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return
    everything = np.arange(len(dataset), dtype=np.int64)  # type: ignore[arg-type]
    drawn = _drawn(loader, choice, unit)
    sampler = drawing(loader)
    home = unwatched(sampler).__module__.split(".")[0]
    unknown = choice is None and home not in ("torch", "fastclip", "opacus")
    drawn = everything if drawn is None else drawn
    owner = everything if unit is None else unit.numpy()
    found = shared(list(leaves_of(dataset, drawn, drawn)), owner)
    # workers may be the first to open a file, which does not survive being opened before the fork, and
    # a sampler of the user's own may draw other keys than numbers
    asked = choice is not None or not (unknown or loader.num_workers)
    if found is None and asked and reads_by_itself(dataset):
        found = _as_read(dataset, drawn, owner)
    if found is not None:
        by = type(sampler).__name__ if unknown else None
        raise ArgumentError(_said(type(dataset).__name__, found, by, unit is not None))


def _said(name: str, found: Shared, sampler: str | None, units: bool) -> str:
    pair = f"samples {found.first} and {found.second} of the data set ({name})"
    how = _HOW[found.how]
    if units:
        return (
            f"unit_ids gives two units to {pair}, which {how}. Give both the same id, or clone() memory "
            "that belongs to several units"
        )
    if sampler is not None:
        return (
            f"the sampler ({sampler}) may draw {pair}, which {how}. Pass a torch.utils.data.Subset of "
            "the samples to draw"
        )
    return f"{pair} {how}. {_FIX[found.how]}"


def _as_read(dataset: Any, drawn: np.ndarray, owner: np.ndarray) -> Shared | None:
    """Of some samples that are read, all of which are held: memory that is free again is nobody's."""
    few = (
        np.unique(drawn[[0, min(1, len(drawn) - 1), len(drawn) // 2, -1]]) if len(drawn) else drawn
    )
    items: list[Any] = []
    with generators_restored(), suppress(Exception):  # of one that cannot be read, the loader tells
        for row in few.tolist():
            items.append(dataset[row])
    read = few[: len(items)]
    return shared(list(leaves_of_items(items, read, "numbers", read)), owner)


def _drawn(loader: DataLoader, choice: Choice | None, unit: Tensor | None) -> np.ndarray | None:
    """Numbers of the samples that may be drawn, int64; None: all."""
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

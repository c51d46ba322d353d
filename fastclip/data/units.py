"""Rows that belong to one unit of privacy (a patient), in a draw and in the batch that is in hand.

A draw of units is their rows, unit by unit, so how many rows each unit has says whose a row is. Batches
are cut between units alone: a unit's gradient is clipped as one, so its rows must come in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fastclip.errors import BatchSizeError
from fastclip.ops.units import UnitRows


def of_sizes(sizes: Sequence[int], reduction: str) -> UnitRows:
    """The rows of units of so many rows each, in their order."""
    counts = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    units = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
    return UnitRows(units.repeat_interleave(counts), len(sizes), max(sizes, default=0), reduction)


def cut_between_units(sizes: Iterable[int], most: int | None) -> list[range]:
    """The rows of a draw in parts of at most `most` rows, none of which holds a part of a unit.

    Args:
        sizes: rows of each unit, in order. most: None does not cut.

    Raises:
        BatchSizeError: one unit has more rows.
    """
    cuts, start, stop = [], 0, 0
    for size in sizes:
        if most is not None and size > most:
            raise BatchSizeError(too_large(size, most))
        if most is not None and stop + size - start > most:
            cuts.append(range(start, stop))
            start = stop
        stop += size
    return [*cuts, range(start, stop)] if stop > start else cuts


def too_large(rows: int, most: int) -> str:
    """What to say where a unit does not fit into a physical batch."""
    return (
        f"physical batches of at most {most} rows cannot hold a unit of {rows} rows, whose gradient is "
        f"clipped as one, so that its rows may not be split: allow physical batches of {rows} rows "
        "(max_physical_batch_size, or per_device_train_batch_size of a Trainer), or pass "
        f"max_rows_per_unit={most} or less to make_private"
    )


class UnitBatch(list):
    """The rows of drawn units, unit by unit.

    Opacus' BatchMemoryManager splits a draw by np.array_split, which this class answers by NumPy's own
    protocol for arrays of other libraries (NEP 18): with parts that end between units.

    Args:
        rows: numbers of rows. sizes: how many belong to each unit, in order. largest: rows that any
            unit can bring. reduction: as of UnitRows.
    """

    def __init__(
        self, rows: Iterable[int], sizes: Sequence[int], largest: int, reduction: str
    ) -> None:
        super().__init__(rows)
        self.sizes, self.largest, self.reduction = tuple(sizes), largest, reduction
        self.most: int | None = None
        """Rows of a physical batch, where a splitting sampler draws."""
        self.cuts: list[range] | None = None
        """The parts that a splitting sampler was given, as places in this list."""

    def __reduce__(self) -> Any:
        """To a worker process, which reads the rows, go their numbers alone."""
        return list, (list(self),)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        plain: list[Any] = [_plain(a) for a in args]
        if function is not np.array_split or kwargs or args[0] is not self:
            return function(*plain, **kwargs)
        most = self.most
        if most is None:
            return function(*plain)
        if self.largest > most:
            raise BatchSizeError(too_large(self.largest, most))
        self.cuts = cut_between_units(self.sizes, most)
        return [np.asarray(self[cut.start : cut.stop]) for cut in self.cuts]

    def rows_of(self, part: range) -> UnitRows | None:
        """Whose the rows of a part are; None where it begins or ends within a unit."""
        sizes, stop = [], 0
        for size in self.sizes:
            start, stop = stop, stop + size
            if part.start <= start and stop <= part.stop:
                sizes.append(size)
        return of_sizes(sizes, self.reduction) if sum(sizes) == len(part) else None


def _plain(value: Any) -> Any:
    """Lists in the place of unit batches, nested ones included."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value

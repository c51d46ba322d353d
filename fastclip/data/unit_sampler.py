"""Poisson sampling of units: all rows of a drawn unit, or a few of them, chosen anew each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastclip.data.sampling import PoissonSampler
from fastclip.data.units import UnitBatch


class UnitSampler(PoissonSampler):
    """Draws units, each independently with probability q, and yields their rows, unit by unit.

    Args:
        unit: int64 [rows of the data set], whose each row is, from 0; -1 for rows that are never drawn.
        max_rows_per_unit: of a unit with more rows a draw takes so many, a uniformly random subset.
        reduction: "mean" or "sum" of the rows' gradients; goes with every draw.
        The rest as of PoissonSampler; n, steps, max_batch_size are in units.

    Formal guarantee: as of PoissonSampler, with units in the place of rows: a row is in a draw only with
    its unit, and once.
    """

    def __init__(
        self, unit: Tensor, *, max_rows_per_unit: int | None = None, reduction: str = "mean",
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self._order, sizes = rows_by_unit(unit)
        super().__init__(num_samples=len(sizes), **kwargs)
        self._starts = (0, *sizes.cumsum(0).tolist())
        self.max_rows_per_unit, self.reduction = max_rows_per_unit, reduction
        largest = int(sizes.max())
        self.largest = largest if max_rows_per_unit is None else min(largest, max_rows_per_unit)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            rows: list[int] = []
            sizes = []
            for unit in self.draw().tolist():
                mine = self._rows_of(unit)
                rows += mine
                sizes.append(len(mine))
            yield UnitBatch(rows, sizes, self.largest, self.reduction)

    @property
    def mean_size(self) -> float:
        """Mean number of rows that a drawn unit brings."""
        sizes = torch.tensor(self._starts, dtype=torch.int64, device="cpu").diff()
        return float(sizes.clamp(max=self.largest).double().mean())

    def owners(self, rows: int) -> Tensor:
        """The unit of each row of a data set of so many, int64 [rows]; -1 for rows never drawn."""
        found = torch.full((rows,), -1, dtype=torch.int64, device="cpu")
        sizes = torch.tensor(self._starts, dtype=torch.int64, device="cpu").diff()
        units = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
        found[self._order] = units.repeat_interleave(sizes)
        return found

    def _rows_of(self, unit: int) -> list[int]:
        rows = self._order[self._starts[unit] : self._starts[unit + 1]]
        most = self.max_rows_per_unit
        if most is not None and len(rows) > most:
            rows = rows[self.some(len(rows), most)]
        return rows.tolist()


def rows_by_unit(unit: Tensor) -> tuple[Tensor, Tensor]:
    """(rows in the order of their units, rows of each unit that has any), int64."""
    kept = (unit >= 0).nonzero().reshape(-1)
    owners = unit[kept]
    order = kept[owners.argsort(stable=True)]
    sizes = torch.bincount(owners)
    return order, sizes[sizes > 0]

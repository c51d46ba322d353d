"""A logical batch as the data loader hands it over: physical batches, collated one by one.

Each physical batch is padded to its own longest row. That length depends on the other rows of the
batch, but a row's loss must not: padded positions are left out of attention by the attention mask,
and of the loss by their label -100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from fastclip._torch import tree_leaves
from fastclip.data.units import cut_between_units, too_large
from fastclip.errors import ArgumentError, BatchSizeError

_OF_ROWS = (
    "labels", "label", "label_ids", "input_ids", "attention_mask", "token_type_ids", "inputs_embeds",
    "decoder_input_ids", "pixel_values", "input_values", "input_features",
)  # fmt: skip
"""Inputs of transformers' models whose first dimension is the rows."""


class LogicalBatchData(list):
    """The physical batches of one logical batch, in order. Attributes: sizes, their rows."""

    def __init__(self, batches: list[Any], sizes: list[int]) -> None:
        super().__init__(batches)
        self.sizes = sizes


class NumberedRows:
    """A data set whose rows come with the number of their unit, for SplitCollate to cut between units.

    Args:
        dataset: any with __getitem__.
        unit: int64 [rows], the unit of each row (`Plan.unit`).
    """

    def __init__(self, dataset: Any, unit: Tensor) -> None:
        self.dataset, self.unit = dataset, unit

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[int, Any]:
        return int(self.unit[row]), self.dataset[row]

    def __getitems__(self, rows: list[int]) -> list[tuple[int, Any]]:
        """Many at once, where the data set can."""
        read = getattr(self.dataset, "__getitems__", None)
        found = read(rows) if read else [self.dataset[row] for row in rows]
        return [(int(self.unit[i]), row) for i, row in zip(rows, found, strict=True)]


def by_units(loader: DataLoader, unit: Tensor | None, draws: Any, rows: int | None) -> Any:
    """The data set of a private loader, whose rows come with the numbers of their units, if it has any.

    Args:
        unit: of each row, int64.
        draws: of the loader.
        rows: most rows of a physical batch.

    Raises:
        BatchSizeError: a unit may bring more rows; said before training, not when it is drawn.
    """
    if unit is None:
        return loader.dataset
    sampler: Any = loader.batch_sampler  # a UnitSampler, for there are units
    largest = sampler.largest
    if rows is not None and largest > rows:
        raise BatchSizeError(too_large(largest, rows))
    numbered = NumberedRows(loader.dataset, unit)
    object.__setattr__(loader, "dataset", numbered)
    draws.physical_rows = rows
    return numbered


class SplitCollate:
    """Collates a logical batch into physical ones of at most `rows` rows each.

    They are cut as Opacus' BatchMemoryManager cuts them: as equal as can be; where units are drawn
    (the data set is NumberedRows), between units (`Draws.physical_rows` must say so, too). An
    empty logical batch (Poisson sampling draws one at times) becomes one physical batch of a
    placeholder row: the engine knows that the draw was empty, so it contributes exactly nothing, and
    the model need not bear an input without rows.

    Args:
        collate: the user's data collator.
        dataset: gives the placeholder row its shape.
        rows: most rows of a physical batch; None never splits.
    """

    def __init__(self, collate: Callable[[list], Any], dataset: Any, rows: int | None) -> None:
        self.collate, self.dataset, self.rows = collate, dataset, rows

    def __call__(self, drawn: list[Any]) -> LogicalBatchData:
        if not drawn:
            return LogicalBatchData([self.placeholder()], [0])
        cuts: Sequence[Sequence[int]]
        if isinstance(self.dataset, NumberedRows):
            sizes = [len(list(rows)) for _, rows in groupby(drawn, key=itemgetter(0))]
            cuts, drawn = cut_between_units(sizes, self.rows), [row for _, row in drawn]
        else:
            parts = -(-len(drawn) // (self.rows or len(drawn)))
            cuts = [part.tolist() for part in np.array_split(np.arange(len(drawn)), parts)]
        batches = [self._collated([drawn[i] for i in cut]) for cut in cuts]
        return LogicalBatchData(batches, [len(cut) for cut in cuts])

    def _collated(self, drawn: list[Any]) -> Any:
        batch = self.collate(drawn)
        for found in _row_counts(batch):
            if found != len(drawn):
                raise ArgumentError(
                    f"the collator returned {found} rows for {len(drawn)} rows of the data set, but one "
                    "row of the data set must stay one row of the batch, for each is clipped as one: "
                    "join, pack or cut rows into chunks before training, so that what privacy protects "
                    "is a row of train_dataset"
                )
        return batch

    def placeholder(self) -> Any:
        """A batch of one row, which stands for none."""
        row = self.dataset[0]
        return self._collated([row[1] if isinstance(self.dataset, NumberedRows) else row])


def _row_counts(batch: Any) -> list[int]:
    """How many rows a collated batch says that it has."""
    if not isinstance(batch, Mapping):
        return [
            len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
        ][:1]
    tensors = {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    counts = [len(tensors[name]) for name in _OF_ROWS if name in tensors]
    return counts or [len(v) for v in tensors.values()][:1]

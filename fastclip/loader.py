"""An empty Poisson batch that the data loader replaces by one made-up row."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from fastclip.bookkeeping import BookKeeper
from fastclip.errors import ArgumentError


def mark_made_up_rows(loader: DataLoader, keeper: BookKeeper) -> None:
    """Tell the book-keeper which batches are made up (rand_on_empty=True).

    Such a row would differ between neighbouring data sets by up to 2C; the engine gives it scale 0.
    The mark is set when the batch is collated, which must therefore happen in this process.
    """
    if loader.num_workers:
        raise ArgumentError(
            f"rand_on_empty=True needs num_workers=0 (got {loader.num_workers}): a worker cannot "
            "tell the engine that a row is made up; leave rand_on_empty=False, which trains on "
            "empty batches exactly"
        )
    loader.collate_fn = _Marking(loader.collate_fn, keeper)


class _Marking:
    def __init__(self, collate: Any, keeper: BookKeeper) -> None:
        self.collate, self.keeper = collate, keeper

    def __call__(self, batch: list[Any]) -> Any:
        self.keeper.made_up = not batch
        return self.collate(batch)

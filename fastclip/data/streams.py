"""Streams that are read side by side: each worker of a loader reads an IterableDataset of its own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ChainDataset, DataLoader, IterableDataset

SHARDED = "sharded_by_worker"
"""An attribute of a data set: True says that no two workers bring the same row."""
TWICE = (
    "this step joins {joined} backward passes over a stream that {readers} workers of the data loader "
    "read side by side, and each of them brings every row unless the data set shares them out, so a row "
    "may be in the step {most} times: take a step after every batch, or pass num_workers=1 or 0; where "
    "the data set shares its rows out (torch.utils.data.get_worker_info), say so by setting "
    f"{SHARDED} = True on it"
)


def readers_of(loader: DataLoader) -> int:
    """How many times a pass may bring a row of a stream; 1 for data sets whose rows are drawn."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset) or _sharded(dataset):
        return 1
    return max(1, loader.num_workers)


def _sharded(dataset: Any) -> bool:
    if isinstance(dataset, ChainDataset):
        return all(_sharded(each) for each in dataset.datasets)
    if type(dataset).__module__.startswith("datasets."):  # each worker reads files of its own there
        return True
    return getattr(dataset, SHARDED, False) is True

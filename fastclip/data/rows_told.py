"""What tells whether two processes read the same rows in the same order, where a data set can say it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fastclip.parallel.digest import digest


def told_of(dataset: Any) -> str:
    """A digest of its rows: of tensors, subsets and joined sets of them, and of Hugging Face data sets.

    Others are named by their type and length alone: reading their rows may change them (augmentation).
    """
    if isinstance(dataset, TensorDataset):
        return digest(dataset.tensors)
    if isinstance(dataset, Subset):
        chosen = torch.as_tensor([int(i) for i in dataset.indices], dtype=torch.int64, device="cpu")
        return f"{digest([chosen])} of {told_of(dataset.dataset)}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(map(told_of, dataset.datasets))
    length = len(dataset) if hasattr(dataset, "__len__") else "?"
    return f"{type(dataset).__name__} {length} {getattr(dataset, '_fingerprint', '')}"

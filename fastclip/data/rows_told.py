"""What tells whether two processes read the same rows in the same order, where a data set can say it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset


def told_of(dataset: Any) -> str:
    """A digest of its rows: of tensors, subsets and joined sets of them, and of Hugging Face data sets.

    Others are named by their type and length alone: reading their rows may change them (augmentation).
    """
    if isinstance(dataset, TensorDataset):
        return " ".join(map(_digest, dataset.tensors))
    if isinstance(dataset, Subset):
        chosen = torch.as_tensor([int(i) for i in dataset.indices], dtype=torch.int64, device="cpu")
        return f"{_digest(chosen)} of {told_of(dataset.dataset)}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(map(told_of, dataset.datasets))
    length = len(dataset) if hasattr(dataset, "__len__") else "?"
    return f"{type(dataset).__name__} {length} {getattr(dataset, '_fingerprint', '')}"


def _digest(x: Tensor) -> str:
    if x.layout != torch.strided:
        return str(x.shape)
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]

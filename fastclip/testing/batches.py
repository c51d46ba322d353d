"""Batches of any nesting: their samples, and copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import ArgumentError


def each_tensor(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A copy of the batch with every tensor changed; other values are as they were."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)
        for key in list(batch):
            new[key] = each_tensor(change, batch[key])
        return new
    if isinstance(batch, (tuple, list)):
        values = [each_tensor(change, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def copied(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """The batch with tensors of its own, those of real numbers in `dtype` if it is given."""

    def change(x: Tensor) -> Tensor:
        new = x.detach().clone()
        return new.to(dtype) if dtype is not None and x.is_floating_point() else new

    return each_tensor(change, batch)


def samples_in(batch: Any, batch_first: bool) -> int:
    """The number of samples, on which all tensors must agree."""
    sizes: set[int] = set()

    def look(x: Tensor) -> Tensor:
        if x.dim():
            sizes.add(x.shape[_axis(x, batch_first)])
        return x

    each_tensor(look, batch)
    if len(sizes) != 1:
        axis = "axis 0" if batch_first else "axis 1 (axis 0 of those of one dimension)"
        raise ArgumentError(
            f"batch expects tensors that hold the samples along {axis}, all equally many, got sizes "
            f"{sorted(sizes) or 'of no tensor'}; what all samples share belongs into `loss`"
        )
    if min(sizes) < 2:
        raise ArgumentError(
            f"batch expects at least 2 samples, got {min(sizes)}: with one alone, nothing that "
            "couples samples can be seen"
        )
    return sizes.pop()


def sample(batch: Any, i: int, batch_first: bool) -> Any:
    """Sample i as a batch of one."""
    return each_tensor(
        lambda x: x.narrow(_axis(x, batch_first), i, 1).clone() if x.dim() else x.clone(), batch
    )


def _axis(x: Tensor, batch_first: bool) -> int:
    return 0 if batch_first or x.dim() == 1 else 1

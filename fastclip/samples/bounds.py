"""Numbers of rows out of bounds are an error of this run, not of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import TorchDispatchMode

LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_CTC = ("aten::_ctc_loss", "aten::_cudnn_ctc_loss")
"""They look at no label on a CPU, and read beside their tables."""
_ALONG = (
    "aten::index_select", "aten::gather", "aten::scatter", "aten::scatter_add", "aten::index_add",
    "aten::index_copy", "aten::index_fill", "aten::scatter_reduce",
)  # fmt: skip
_TAKEN_BY = {"aten::embedding": 1, "aten::_embedding_bag": 1, "aten::take": 1}
_TAKEN_BY |= dict.fromkeys(_ALONG, 2)
"""Operators that look something up, and which argument holds the numbers."""
_BY_PLACES = ("aten::index", "aten::index_put", "aten::_index_put_impl")


class InBounds(TorchDispatchMode):
    """Inside, numbers of rows are looked at first: a device would end the process for wrong ones.

    Raises:
        IndexError: they are out of bounds.
        ValueError: one number (a longest length) has to become a whole one and is none: as int() says.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::_to_copy" and _is_none(args[0], (kwargs or {}).get("dtype")):
            raise ValueError("what is NaN or infinite is no whole number")
        for x, low, high in _looked_up(name.rstrip("_"), args):
            whole = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
            out = (x < low) | (x >= high) if whole else None
            if out is not None and name in LOSSES:
                out &= x != args[4]
            if out is not None and bool(out.any()):
                wrong = f"{x[out][0].item()} is no number of a row"
                raise IndexError(f"{name}: numbers of rows are out of bounds, {wrong}")
        return func(*args, **(kwargs or {}))


def classes_of(args: tuple) -> int:
    """How many one of LOSSES tells apart."""
    scores: Tensor = args[0]
    return scores.shape[1 if scores.dim() > 1 else 0]


def _is_none(x: Tensor, dtype: torch.dtype | None) -> bool:
    """One number that has to become a whole one, and cannot."""
    if x.numel() != 1 or not x.is_floating_point() or dtype in (None, torch.bool):
        return False
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return whole and not bool(x.isfinite().all())


def _looked_up(name: str, args: tuple) -> Iterator[tuple[Any, int, int]]:
    """Numbers of rows, and between which they must lie."""
    if name in LOSSES:
        yield args[1], 0, classes_of(args)
    elif name in _CTC:
        yield args[1], 0, args[0].shape[-1]
    elif name in _BY_PLACES:
        at = 0
        for x in args[1]:
            masks = x is not None and x.dtype in (torch.bool, torch.uint8)
            size = args[0].shape[at] if at < args[0].dim() else 0
            if x is not None and not masks:
                yield x, -size, size
            at += x.dim() if masks else 1
    elif name in _TAKEN_BY:
        table, place = args[0], _TAKEN_BY[name]
        if name == "aten::take":
            yield args[1], -table.numel(), table.numel()
        elif len(args) > place:
            axis = args[1] if place == 2 else 0
            yield args[place], 0, table.shape[axis] if table.dim() else 1

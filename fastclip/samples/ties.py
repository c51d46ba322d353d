"""Rows that a model sorts are moved even where all of them are equal.

A model may sort its rows by their length, or by the expert that they are sent to. In the few rows of a
look all may have the same, so that nothing would move; in a later batch they do.
"""

from __future__ import annotations

from typing import Any

import torch

from fastclip._torch import TorchDispatchMode

_SORTS = {
    torch.ops.aten.sort.default: 1,
    torch.ops.aten.sort.stable: 2,
    torch.ops.aten.topk.default: 2,
}
"""Operations that put entries in order, and which argument is the dimension; argsort is one of them."""


class Ties(TorchDispatchMode):
    """Among equal entries, the last one comes first: an order as true as any."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SORTS or not args[0].dim():
            return func(*args, **kwargs)
        x, place = args[0], _SORTS[func]
        dim = args[place] if len(args) > place else kwargs.get("dim", -1)
        out = func(x.flip(dim), *args[1:], **kwargs)
        return out[0], x.shape[dim] - 1 - out[1]

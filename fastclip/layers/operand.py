"""Inputs in the type in which torch's autocast multiplies them."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import ref

import torch
from torch import Tensor

from fastclip._torch import stream_of


def autocast_operand(x: Tensor) -> Tensor:
    """`x` in the type in which torch's autocast, if it is on, multiplies it.

    For layers that are products: what is then saved for the backward pass is what was multiplied, as
    large as torch would save it, and of the type of the output's gradient.
    """
    kind = multiplied(x)
    return x if kind == x.dtype else x.to(kind)


def multiplied(x: Tensor) -> torch.dtype:
    """The type in which autocast multiplies x."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device) if x.is_floating_point() else x.dtype


class LastCast:
    """The input that a forward pass has cast last: layers that are given the same tensor share its copy.

    Queries, keys and values are: one cast is launched, one copy is saved. Neither tensor is held here.
    A copy that others could have to wait for, on another stream, is not shared, nor one of a tensor that
    was changed since. (A change that the tensor's version does not tell, through `.data` or by a kernel
    that writes to its address, is not seen; autograd does not see it either.)
    """

    def __init__(self) -> None:
        self._last: tuple[Hashable, ref[Tensor], ref[Tensor], int] | None = None

    def of(self, x: Tensor) -> Tensor:
        """`autocast_operand(x)`; a copy is a leaf of its own, which requires a gradient if x does."""
        kind = multiplied(x)
        if kind == x.dtype:
            return x
        key = _state(x, kind)
        if key is not None and self._last is not None:
            last, original, cast, version = self._last
            copy = cast()
            if copy is not None and last == key and original() is x and copy._version == version:
                return copy
        copy = x.to(kind).detach().requires_grad_(x.requires_grad)
        if key is not None:
            self._last = key, ref(x), ref(copy), copy._version
        return copy


def _state(x: Tensor, kind: torch.dtype) -> Hashable:
    """What the copy of a tensor depends on; None where that cannot be told."""
    if type(x) is not Tensor or x.is_inference():
        return None
    address = x.data_ptr()
    if not address:
        return None
    stream = stream_of(x.get_device()) if x.is_cuda else 0
    return x._version, address, x.shape, x.stride(), x.requires_grad, kind, stream

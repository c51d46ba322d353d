"""Tensors that a loop for the CPU may write to, or read beside those."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from fastclip._torch import is_functorch_wrapped
from fastclip.memory import lies_on_host

_SHAPE, _GRAD = attrgetter("shape"), attrgetter("requires_grad")
_KIND = attrgetter("dtype", "device.type", "layout")
_FLOATS = torch.float32, "cpu", torch.strided
_PLAIN = {Tensor, nn.Parameter}


def is_written_to(out: Tensor) -> bool:
    """float32 in memory, one number behind the other, whose graph nobody asks for."""
    floats = type(out) is Tensor and out.dtype == torch.float32 and out.numel() > 0
    ours = floats and lies_on_host(out) and out.is_contiguous()
    return ours and not (out.is_inference() or out.requires_grad)


def all_lie_alike(outs: Sequence[Tensor], totals: Sequence[Tensor | None]) -> bool:
    """Whether a loop can write to all of these, and read its total beside each; without a line of Python
    for each."""
    found = [total for total in totals if total is not None]
    if not outs or len(found) != len(outs):
        return False
    both = [*outs, *found]
    shapes = [*map(_SHAPE, outs)] == [*map(_SHAPE, found)]
    odd = not shapes or not all_lie_here(both) or not all(map(Tensor.is_contiguous, both))
    return not (odd or any(map(Tensor.is_inference, outs)) or any(map(_GRAD, outs)))


def all_lie_here(given: Sequence[Tensor]) -> bool:
    """Whether a loop can read all of these float32 tensors; without a line of Python for each."""
    floats = {*map(type, given)} <= _PLAIN and {*map(_KIND, given)} == {_FLOATS}
    odd = not floats or any(map(is_functorch_wrapped, given)) or any(map(Tensor.is_neg, given))
    return not odd and all(map(Tensor.numel, given)) and all(map(Tensor.data_ptr, given))


def lies_alike(out: Tensor, total: Tensor | None) -> bool:
    """A loop can read this total beside what it writes."""
    if total is None:
        return False
    same = total.dtype == torch.float32 and total.shape == out.shape
    return same and lies_on_host(total) and total.is_contiguous()

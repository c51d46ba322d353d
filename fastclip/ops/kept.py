"""Clipped sums of per-sample gradients that are at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastclip.ops.dispatch import host_operation, operation
from fastclip.ops.numerics import drop_zeroed, widen
from fastclip.ops.precision import in_full_float32


@operation
@in_full_float32
def kept_sum(gradients: Tensor, scale: Tensor) -> Tensor:
    """sum_b scale_b gradients_b, for gradients [b, *shape] and scale [b]: [*shape], accumulated widely.

    A scale that was rounded to 16 bits would be up to 2^-8 too large, and if tiny by a factor of two.
    """
    (gradients,) = drop_zeroed(scale, widen(gradients))
    rows, back = as_they_lie(gradients)
    total = scale.to(rows.dtype) @ rows.reshape(len(scale), rows.shape[1:].numel())
    return total.view(rows.shape[1:]).permute(back).contiguous()


def as_they_lie(gradients: Tensor) -> tuple[Tensor, list[int]]:
    """Gradients [b, *shape] with the axes of a sample in the order of memory, so that none is copied.

    Returns:
        them, and how a sum of them, without b, is permuted to come back to `shape`.
    """
    axes = sorted(range(1, gradients.dim()), key=gradients.stride, reverse=True)
    return gradients.permute(0, *axes), sorted(range(len(axes)), key=axes.__getitem__)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Gradients of all samples, of some after the other."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


@host_operation
def parted_sum(parts: Iterable[Tensor], scale: Tensor) -> Tensor:
    """`kept_sum` of gradients in parts, some samples after the other; scale is [b], of all."""
    total, first = None, 0
    for gradients in parts:
        own = kept_sum(gradients, scale[first : first + len(gradients)])
        total = own if total is None else total.add_(own)
        first += len(gradients)
    assert total is not None
    return total


@in_full_float32
def kept_sums(gradients: Tensor, scales: Tensor) -> Tensor:
    """The same for k parameters of one size, [k, b, n], at scales [b] or [k, b]: [k, n]."""
    gradients = widen(gradients)
    if scales.dim() == 1:
        (rows,) = drop_zeroed(scales, gradients.transpose(0, 1))
        return torch.matmul(scales.to(rows.dtype), rows.transpose(0, 1))
    (rows,) = drop_zeroed(scales.flatten(), gradients.flatten(0, 1))
    return torch.bmm(scales.to(rows.dtype)[:, None], rows.view(gradients.shape))[:, 0]

"""Entry-wise gradients, summed over the entries of each sample that one entry of a parameter met."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastclip import ops

if TYPE_CHECKING:
    from fastclip.uses.tap import UseBackward

_CHUNK_BYTES = 1 << 22
"""Of a product that is summed at once; larger ones go a few samples at a time."""


def aligned(shape: torch.Size | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """`shape` as it is broadcast to so many dimensions."""
    return (1,) * (dims - len(shape)) + tuple(shape)


def summed_to(
    use: UseBackward, each: Tensor, shape: torch.Size, factor: Tensor | None = None,
    own: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """sum of each * factor over what `shape` does not have, for every sample: [b, *shape].

    Args:
        each: gradients, entry by entry of the output. factor: broadcasts to them; 1 if None.
        own: `shape` as it lies in the output; aligned to the right if None.
    """
    place = use.place
    own = aligned(shape, each.dim()) if own is None else own
    if place is None:
        return _summed_rows(use, each, shape, factor)
    kept = [size for axis, size in enumerate(own) if axis != place.axis]
    rows = use.rows(each)  # [b, (n,) *others]
    folded = rows.dim() - 1 - len(kept)
    axes = [*range(1, 1 + folded), *(1 + folded + i for i, n in enumerate(kept) if n == 1)]
    axes = [axis for axis in axes if rows.shape[axis] != 1]
    if factor is None:
        total = ops.widen(rows)
        total = total.sum(axes) if axes else total
    else:
        total = _products(rows, _rows_like(use, factor, each), axes)
    return total.reshape(len(rows), *shape)


def _summed_rows(
    use: UseBackward, each: Tensor, shape: torch.Size, factor: Tensor | None
) -> Tensor:
    """The same where every row (all axes but the last) may be anybody's, and `shape` is of one row.

    Of a number, every entry may be.
    """
    wide = ops.widen(each)
    wide = wide if factor is None else wide * factor.to(wide.dtype)
    if shape.numel() == 1:
        owner = use.entry_owners().expand(each.shape).reshape(-1)
        return ops.sum_by_owner(wide.reshape(-1), owner, use.batch).reshape(use.batch, *shape)
    rows = wide.reshape(wide.shape[:-1].numel(), wide.shape[-1])
    return ops.sum_by_owner(rows, use.row_owners(), use.batch).reshape(use.batch, *shape)


def _rows_like(use: UseBackward, factor: Tensor, each: Tensor) -> Tensor:
    """The factor's samples along axis 0; size 1 there if it has none."""
    assert use.place is not None
    factor = factor.view(aligned(factor.shape, each.dim()))
    if factor.shape[use.place.axis] == each.shape[use.place.axis]:
        return use.rows(factor)
    first = factor.movedim(use.place.axis, 0)
    return first if use.place.plain else first[None]


def _products(rows: Tensor, factor: Tensor, axes: list[int]) -> Tensor:
    whole = len(axes) == rows.dim() - 1 - sum(n == 1 for n in rows.shape[1:])
    if whole and factor.shape == rows.shape and rows.numel():
        n = rows[0].numel()
        wide = ops.widen(rows).reshape(len(rows), 1, n)
        return _dots(wide, factor.to(wide.dtype).reshape(len(rows), n, 1))
    step = _CHUNK_BYTES // max(1, rows[:1].numel() * 4) or 1
    if len(rows) <= step:
        return _product(rows, factor, axes)
    each = len(factor) == len(rows)
    parts = [
        _product(part, factor[i * step : (i + 1) * step] if each else factor, axes)
        for i, part in enumerate(rows.split(step))
    ]
    return torch.cat(parts)


def _product(rows: Tensor, factor: Tensor, axes: list[int]) -> Tensor:
    wide = ops.widen(rows)
    product = wide * factor.to(wide.dtype)
    return product.sum(axes) if axes else product


@ops.in_full_float32
def _dots(one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other)

"""A linear map over rows in any order: sample i's gradient is the sum of g_n a_n^T over its own rows.

Index letters: n row, b sample, d input feature, p output feature. A row of owner -1 belongs to nobody.
How many rows a sample has is never looked at, which would wait for a GPU: `most` bounds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.ops.linear import gram_bound, per_sample_gradients
from fastclip.ops.numerics import (
    PRODUCT_ERROR_FACTOR,
    row_norm_sq,
    unit_roundoff,
    widen,
)
from fastclip.ops.precision import in_full_float32

_BLOCK = 512
"""Rows whose Gram is taken at once."""
_SCRATCH_BYTES = 32 << 20


@in_full_float32
def routed_norm(a: Tensor, g: Tensor, owner: Tensor, batch_size: int, most: int) -> Tensor:
    """Squared norms of the samples' gradients, [b], never below the exact values.

    By Grams of neighbouring rows, once these are sorted by their sample; or by the gradients
    themselves where that is less work.

    Args:
        a: [n, d]. g: [n, p]. owner: the sample of each row, int64 [n].
        batch_size: b. most: no sample has more rows.
    """
    n, d, p = len(a), a.shape[1], g.shape[1]
    most = min(most, n)
    if n * min(n, _BLOCK + most) * (d + p) > batch_size * most * d * p:
        own = routed_gradients(a, g, owner, batch_size, most)
        return (row_norm_sq(own).sqrt() + routed_slack(a, g, owner, batch_size)).square()
    a, g, owner = _sorted(widen(a), widen(g), owner)
    parts = []
    for first in range(0, n, _BLOCK):
        rows, near = slice(first, first + _BLOCK), slice(first, first + _BLOCK + most)
        same = (owner[rows, None] == owner[None, near]).triu()
        products = (a[rows] @ a[near].t()) * (g[rows] @ g[near].t())
        products = products.masked_fill(~same, 0)  # other samples' rows need not be finite
        parts.append(2 * products.sum(1) - products.diagonal())
    terms = torch.cat(parts) if parts else a.new_zeros(0)
    total, count, norm_a, norm_g = (
        _by_sample(x, owner, batch_size)
        for x in (terms, torch.ones_like(terms), row_norm_sq(a), row_norm_sq(g))
    )
    total = total.clamp_min(0)
    bound = gram_bound(total, count, norm_a, norm_g, count * d, count * p)
    return total * (1 + (d + p) / 32 * unit_roundoff(total.dtype)) + bound


@in_full_float32
def routed_gradients(a: Tensor, g: Tensor, owner: Tensor, batch_size: int, most: int) -> Tensor:
    """The samples' gradients themselves, [b, p, d], in the accumulation type."""
    d, p, most = a.shape[1], g.shape[1], min(most, len(a))
    a, g, owner = _sorted(a, g, owner)
    samples = torch.arange(batch_size, dtype=torch.int64, device=owner.device)
    first = torch.searchsorted(owner, samples)
    last = torch.searchsorted(owner, samples, right=True)
    rows = first[:, None] + torch.arange(most, dtype=torch.int64, device=owner.device)
    others = (rows >= last[:, None])[..., None]  # [b, most, 1]
    rows = rows.clamp(max=max(len(a) - 1, 0))
    each = max(1, _SCRATCH_BYTES // max(1, most * (d + p) * a.element_size()))
    found = [
        per_sample_gradients(a[i].masked_fill(gone, 0), g[i].masked_fill(gone, 0))
        for i, gone in zip(rows.split(each), others.split(each), strict=True)
    ]
    return torch.cat(found) if batch_size else widen(a).new_zeros(0, p, d)


def routed_slack(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """What rounding can hide of the norms of `routed_gradients`, [b]; see `product_slack`."""
    norm_a, norm_g = (_by_sample(row_norm_sq(x), owner, batch_size) for x in (a, g))
    size = (norm_a * norm_g).sqrt()
    return PRODUCT_ERROR_FACTOR * unit_roundoff(size.dtype) * size


def _sorted(a: Tensor, g: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    owner, order = owner.sort(stable=True)
    return a[order], g[order], owner


def _by_sample(x: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Sums of x [n] over the rows of each sample, [b]."""
    return x.new_zeros(batch_size + 1).index_add_(0, owner + 1, x)[1:]

"""A linear map over rows in any order: sample i's gradient is the sum of g_n a_n^T over its own rows.

Index letters: n row, b sample, d input feature, p output feature. A row of owner -1 belongs to nobody.
How many rows a sample has is looked at on a CPU only: a GPU would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.ops.bounds import dot_room, gram_bound, raised_by_signs
from fastclip.ops.linear import per_sample_gradients
from fastclip.ops.numerics import (
    PRODUCT_ERROR_FACTOR,
    row_norm_sq,
    unit_roundoff,
    widen,
)
from fastclip.ops.precision import in_full_float32

_LEAST, _BLOCK = 16, 512
"""Rows that one product compares with those behind them, at least and at most."""
_SCRATCH_BYTES = 32 << 20


@in_full_float32
def routed_norm(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Squared norms of the samples' gradients, [b], never below the exact values.

    By Grams of neighbouring rows, once these are sorted by their sample.

    Args:
        a: [n, d]. g: [n, p]. owner: the sample of each row, int64 [n]. batch_size: b.
    """
    d, p, most = a.shape[1], g.shape[1], _most(owner)
    owner, order = owner.sort(stable=True)
    a, g = widen(a)[order], widen(g)[order]
    terms, absolute = _terms(a, g, owner, most)
    total, absolute, count, norm_a, norm_g = (
        sum_by_owner(x, owner, batch_size)
        for x in (terms, absolute, torch.ones_like(terms), row_norm_sq(a), row_norm_sq(g))
    )
    total = total.clamp_min(0)
    bound = gram_bound(total, count, norm_a, norm_g, count * d, count * p)
    return raised_by_signs(total, absolute, dot_room(d, p, a), count) + bound


def routes_apart(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> bool:
    """Whether the gradients themselves are less work than the Grams of `routed_norm`."""
    n, d, p, most = len(a), a.shape[1], g.shape[1], _most(owner)
    return n * min(n, _block(n, most) + most) * (d + p) > batch_size * most * d * p


def routed_slack(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """What rounding can hide of the norms of `routed_gradients_apart`, [b]; see `product_slack`."""
    norm_a, norm_g = (sum_by_owner(row_norm_sq(x), owner, batch_size) for x in (a, g))
    size = (norm_a * norm_g).sqrt()
    return PRODUCT_ERROR_FACTOR * unit_roundoff(size.dtype) * size


def sum_by_owner(x: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Rows [n, ...] added up for every sample: [b, ...]; those of owner -1 are left out."""
    total = x.new_zeros(batch_size + 1, *x.shape[1:])
    return total.index_add_(0, owner + 1, x)[1:]


def _most(owner: Tensor) -> int:
    """No sample has more rows."""
    if owner.device.type != "cpu" or not len(owner):
        return len(owner)
    return max(1, int((owner + 1).bincount(minlength=2)[1:].max()))


def _block(n: int, most: int) -> int:
    return max(1, min(n, _BLOCK, max(most, _LEAST)))


def _terms(a: Tensor, g: Tensor, owner: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What each row adds to its sample's squared norm, alone and with the rows behind it: [n]; and the
    sum of the absolute values of that.

    Rows are sorted by their sample. Blocks of them meet the rows that are `most` away.
    """
    n, block = len(a), _block(len(a), most)
    reach = block + most - 1
    scratch = 4 * block * reach * a.element_size()
    step = block * max(1, _SCRATCH_BYTES // max(1, scratch))
    parts, sizes = [], []
    for first in range(0, n, step):
        left = n - first
        blocks = -(-min(step, left) // block)
        width = reach if blocks > 1 else min(reach, left)
        last = first + (blocks - 1) * block + width
        lacking = max(0, last - n)
        rows, gradients, whose = (
            F.pad(x[first:last], [0, 0] * (x.dim() - 1) + [0, lacking], value=none).unfold(
                0, width, block
            )
            for x, none in ((a, 0.0), (g, 0.0), (owner, -2))
        )  # [blocks, d, width], [blocks, p, width], [blocks, width]
        products = (rows[..., :block].mT @ rows) * (gradients[..., :block].mT @ gradients)
        same = (whose[:, :block, None] == whose[:, None]).triu()
        products = products.masked_fill(~same, 0)  # other samples' rows need not be finite
        alone = products.diagonal(dim1=1, dim2=2)  # of one row, not negative
        parts.append((2 * products.sum(2) - alone).flatten())
        sizes.append((2 * products.abs().sum(2) - alone).flatten())
    if not parts:
        return a.new_zeros(0), a.new_zeros(0)
    return torch.cat(parts)[:n], torch.cat(sizes)[:n]


def routed_gradients_apart(
    a: Tensor, g: Tensor, owner: Tensor, batch_size: int
) -> Iterator[Tensor]:
    """The samples' gradients themselves, in the accumulation type, a few samples after the other.

    Yields:
        [., p, d]: in all b of them, the same numbers each time.
    """
    d, p, most = a.shape[1], g.shape[1], _most(owner)
    if not batch_size:
        yield widen(a).new_zeros(0, p, d)
    sorted_owner, order = owner.sort(stable=True)
    samples = torch.arange(batch_size, dtype=torch.int64, device=owner.device)
    first = torch.searchsorted(sorted_owner, samples)
    last = torch.searchsorted(sorted_owner, samples, right=True)
    place = first[:, None] + torch.arange(most, dtype=torch.int64, device=owner.device)
    none = len(a)  # a row of zeros
    rows = F.pad(order, (0, most), value=none)[place].masked_fill(place >= last[:, None], none)
    a, g = F.pad(a, (0, 0, 0, 1)), F.pad(g, (0, 0, 0, 1))
    each = max(1, _SCRATCH_BYTES // max(1, (most * (d + p) + d * p) * a.element_size()))
    for i in rows.split(each):
        if len(i):
            yield per_sample_gradients(a[i], g[i])

"""Per-sample norms and clipped sums of an embedding table, in O(n d): never a [b, v, d] tensor.

Looked-up rows are flat: entry j looks up row ids[j] for sample[j] and received gradient g[j].
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.core.numerics import (
    GRAM_ERROR_FACTOR,
    accumulation_dtype,
    drop_zeroed,
    in_full_float32,
    row_norm_sq,
    unit_roundoff,
    widen,
)
from fastclip.ops.dispatch import operation
from fastclip.ops.grams import dot_room

_ROUNDINGS = 8
"""Successive roundings of a squared norm that is not from a Gram, in u."""


def flatten_lookup(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flattens [b, t] ids and [b, t, d] gradients to ids [n], sample [n], g [n, d]."""
    b, t = ids.shape
    sample = torch.arange(b, device=ids.device)[:, None].expand(b, t).reshape(-1)
    return ids.reshape(-1), sample, g.reshape(b * t, g.shape[-1])


@operation
def lookup_norm(
    ids: Tensor, sample: Tensor, g: Tensor, batch_size: int, num_embeddings: int,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Returns squared norms of per-sample table gradients: sum over distinct ids of ||sum of g||^2.

    Sums are float64. Rows of one id may cancel, and the rounding of a float32 sum of many could then
    exceed the margin of the scales.

    Args:
        ids: [n] int64. sample: [n] int64, the sample of each entry. g: [n, d].
        batch_size: b. num_embeddings: v, rows of the table.
        padding_idx: row that receives no gradient.

    Returns:
        [b].
    """
    accumulated, g = accumulation_dtype(g.dtype), g.double()
    key = sample * num_embeddings + ids
    sorted_key, order = key.sort()
    segment, segment_of = _segments(sorted_key, order)
    sums = _sum_rows(g, segment_of, len(g))
    per_segment = row_norm_sq(sums)  # [n], zero beyond the last segment
    owner = torch.zeros_like(segment).scatter_(0, segment, sorted_key // num_embeddings)
    if padding_idx is not None:
        row = torch.full_like(segment, -1).scatter_(0, segment, sorted_key % num_embeddings)
        per_segment = per_segment.masked_fill(row == padding_idx, 0)
    return per_segment.new_zeros(batch_size).index_add_(0, owner, per_segment).to(accumulated)


def _sum_rows(g: Tensor, index: Tensor, rows: int, skip: int = -1) -> Tensor:
    """Sums the g[j] with index[j] = r into row r; 10x as fast as index_add_ on a CPU."""
    return torch.ops.aten.embedding_dense_backward(g, index, rows, skip, False)


@operation
def lookup_sum(
    ids: Tensor, sample: Tensor, g: Tensor, scale: Tensor, num_embeddings: int,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Clipped sum of the table's gradients, [v, d]; scale is [b].

    Sums are float64, as those of the norm, and are rounded once. If rows cancel, the rest in float32
    could exceed the norm.
    """
    accumulated = accumulation_dtype(g.dtype)
    per_entry = scale[sample]
    (g,) = drop_zeroed(per_entry, g)
    weighted = g * per_entry.double()[:, None]  # float64, whatever g is
    skip = -1 if padding_idx is None else padding_idx
    if num_embeddings <= len(ids):
        return _sum_rows(weighted, ids, num_embeddings, skip).to(accumulated)
    # Few rows of a large table are looked up, and the others are never in memory as float64.
    sorted_ids, order = ids.sort()
    segment, segment_of = _segments(sorted_ids, order)
    sums = _sum_rows(weighted, segment_of, len(ids)).to(accumulated)
    owner = torch.zeros_like(segment).scatter_(0, segment, sorted_ids)
    return _sum_rows(sums, owner, num_embeddings, skip)


def lookup_margin(sample: Tensor, g: Tensor, batch_size: int) -> Tensor:
    """Returns the rounding margin of per-sample table gradients for any order of float64 sums, [b].

    Two sums of n rows, in different orders, are each off by up to n u sum |g_j|.
    """
    size = torch.zeros(batch_size, dtype=torch.float64, device=g.device)
    size.index_add_(0, sample, row_norm_sq(g).double())
    n = g.shape[0]
    return (2 * unit_roundoff(torch.float64) * n**1.5 * size.sqrt()).to(accumulation_dtype(g.dtype))


def _segments(sorted_key: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the run of equal keys of each entry, for sorted entries and for entries as given."""
    starts = torch.ones_like(sorted_key)
    starts[1:] = (sorted_key[1:] != sorted_key[:-1]).to(starts.dtype)
    segment = starts.cumsum(0) - 1
    return segment, torch.empty_like(segment).scatter_(0, order, segment)


def embedding_norm(ids: Tensor, g: Tensor, padding_idx: int | None = None) -> Tensor:
    """Returns squared per-sample norms for ids [b, t] int64 and g [b, t, d]: [b]."""
    flat_ids, sample, flat_g = flatten_lookup(ids, g)
    # Any bound above every id serves as v: b * v must stay below 2^63.
    return lookup_norm(flat_ids, sample, flat_g, ids.shape[0], 1 << 31, padding_idx)


def embedding_sum(
    ids: Tensor, g: Tensor, scale: Tensor, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """Returns the clipped sum for ids [b, t], g [b, t, d] and scale [b]: [v, d]."""
    flat_ids, sample, flat_g = flatten_lookup(ids, g)
    return lookup_sum(flat_ids, sample, flat_g, scale, num_embeddings, padding_idx)


@in_full_float32
def tied_norm(ids: Tensor, g_rows: Tensor, a: Tensor, g: Tensor, separate: Tensor) -> Tensor:
    """Returns squared norms [b] of the summed gradients of a table used as embedding and output head.

    The embedding is a linear map whose output gradient is one-hot, so the cross Gram is a gather:
    <E_b, L_b> = sum_{t,s} (g_rows[b,t] . a[b,s]) * g[b, s, ids[b,t]]. As with any Gram the result
    is clamped at 0 and raised by its rounding bound.

    Args:
        ids: [b, t] looked-up rows. g_rows: [b, t, d], their gradients (0 where padding).
        a: [b, s, d], input of the linear map. g: [b, s, v], gradient of its output.
        separate: [b], ||E_b||^2 + ||L_b||^2.
    """
    a, g, g_rows = widen(a), widen(g), widen(g_rows)
    dots = torch.bmm(a, g_rows.transpose(1, 2))  # [b, s, t]
    index = ids[:, None, :].expand(-1, g.shape[1], -1)
    products = dots * g.gather(2, index)
    size = ids.shape[1] * row_norm_sq(g_rows) * row_norm_sq(a) * row_norm_sq(g)
    bound = 2 * GRAM_ERROR_FACTOR * size.sqrt()
    # If the two cancel, the rest has the roundings of both.
    room = 4 + 2 * dot_room(a.shape[2], 0, a)
    bound = bound + _ROUNDINGS * separate + room * products.abs().sum((1, 2))
    return (separate + 2 * products.sum((1, 2))).clamp_min(0) + unit_roundoff(a.dtype) * bound

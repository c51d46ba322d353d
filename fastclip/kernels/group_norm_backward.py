"""Backward of GroupNorm of channels-last maps: the input's gradient, and per-sample affine ones.

    x_hat = (x - mean) * rstd    dw_b = sum_t g * x_hat    db_b = sum_t g    h = g * w
    dx = rstd * (h - M[h] - x_hat * M[h * x_hat]),  M the mean over a group

Cut into programs as in kernels/group_norm.py. Where a sample's positions fit in registers x and g are
read once. Else each chunk leaves its part of dw and db, and a second kernel adds those of a sample, in
a fixed order, and reads x and g once more for dx. Other maps go to kernels/norm_affine.py.

Index letters: b sample, t position, c channel, k group of channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels import norm_affine
from fastclip.kernels.group_norm import (
    affine,
    columns,
    cut,
    held,
    is_channels_last,
    launch,
    over_groups,
    store,
    tile,
    tiles,
    warps,
)
from fastclip.kernels.runtime import alike, autotuned, launched, next_power_of_2, runs_on


@triton.jit
def _statistics(MEAN, RSTD, at, there):
    """Mean and reciprocal standard deviation of each column's group."""
    mean = tl.load(MEAN + at, mask=there, other=0.0).to(tl.float32)
    return mean, tl.load(RSTD + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _means(w, dw, db, rstd, n, SIZE2: tl.constexpr, COLUMNS: tl.constexpr):
    """M[h] and M[h * x_hat] * rstd of each column's group."""
    total = over_groups(db * w, SIZE2, COLUMNS) / n
    return total, over_groups(dw * w, SIZE2, COLUMNS) / n * rstd


@triton.jit
def _input(x, g, w, rstd, total, product):
    """dx of x - mean and g."""
    return (g * w[None, :] - total[None, :] - x * product[None, :]) * rstd[None, :]


@autotuned(warps(8, 4), key=["SIZE", "COLUMNS", "T2", "NEED_INPUT", "work"], prune=held)
@launched(do_not_specialize=["work"])
def _whole(X, G, MEAN, RSTD, W, DX, DW, DB, t, c, k, blocks, work,
           T2: tl.constexpr, SIZE: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr,
           HAS_WEIGHT: tl.constexpr, NEED_INPUT: tl.constexpr):  # fmt: skip
    """All positions of some groups of a sample."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    mean, rstd = _statistics(MEAN, RSTD, b * k + group, there)
    row = tl.arange(0, T2)
    g = tile(G + b * t * c, row, channel, t, there, c)
    x = tile(X + b * t * c, row, channel, t, there, c) - mean[None, :]
    dw = tl.sum(x * g, 0) * rstd
    db = tl.sum(g, 0)
    tl.store(DW + b * c + channel, dw, mask=there)
    tl.store(DB + b * c + channel, db, mask=there)
    if NEED_INPUT:
        w = affine(W, channel, there, HAS_WEIGHT, 1.0)
        total, product = _means(w, dw, db, rstd, t.to(tl.float32) * SIZE, SIZE2, COLUMNS)
        dx = _input(x, g, w, rstd, total, product)
        store(DX + b * t * c, row, channel, t, there, c, dx)


@autotuned(tiles((4096, 8), (2048, 4)), key=["SIZE", "COLUMNS", "rows", "work"])
@launched(do_not_specialize=["rows", "work"])
def _sums(X, G, MEAN, RSTD, DWS, DBS, t, c, k, blocks, chunks, rows, work,
          SIZE: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr,
          ELEMENTS: tl.constexpr):  # fmt: skip
    """A chunk's part of dw and db."""
    ROWS: tl.constexpr = ELEMENTS // COLUMNS
    part = tl.program_id(0) // blocks  # chunk of a sample
    b, start = (part // chunks).to(tl.int64), part % chunks * rows
    end = tl.minimum(t, start + rows)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    mean, rstd = _statistics(MEAN, RSTD, b * k + group, there)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    totals = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(start, end, ROWS, num_stages=2):
        row = first + tl.arange(0, ROWS)
        g = tile(G + b * t * c, row, channel, end, there, c)
        products += g * (tile(X + b * t * c, row, channel, end, there, c) - mean[None, :])
        totals += g
    at = part.to(tl.int64) * c + channel
    tl.store(DWS + at, tl.sum(products, 0) * rstd, mask=there)
    tl.store(DBS + at, tl.sum(totals, 0), mask=there)


@autotuned(tiles((4096, 8), (2048, 4)), key=["SIZE", "COLUMNS", "rows", "work"])
@launched(do_not_specialize=["samples", "rows", "work"])
def _gradient(X, G, MEAN, RSTD, W, DWS, DBS, DX, DW, DB, samples, t, c, k, blocks, chunks, rows, work,
              CHUNKS2: tl.constexpr, SIZE: tl.constexpr, SIZE2: tl.constexpr,
              COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ELEMENTS: tl.constexpr):  # fmt: skip
    """dx of a chunk, once the parts of dw and db are added; last samples first: these are what the
    cache still holds."""
    ROWS: tl.constexpr = ELEMENTS // COLUMNS
    part = samples * chunks - 1 - tl.program_id(0) // blocks
    b, start = (part // chunks).to(tl.int64), part % chunks * rows
    end = tl.minimum(t, start + rows)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    mean, rstd = _statistics(MEAN, RSTD, b * k + group, there)
    chunk = tl.arange(0, CHUNKS2)
    at = (b * chunks + chunk)[:, None] * c + channel[None, :]
    inside = (chunk < chunks)[:, None] & there[None, :]
    dw = tl.sum(tl.load(DWS + at, mask=inside, other=0.0), 0)
    db = tl.sum(tl.load(DBS + at, mask=inside, other=0.0), 0)
    if part % chunks == 0:
        tl.store(DW + b * c + channel, dw, mask=there)
        tl.store(DB + b * c + channel, db, mask=there)
    w = affine(W, channel, there, HAS_WEIGHT, 1.0)
    total, product = _means(w, dw, db, rstd, t.to(tl.float32) * SIZE, SIZE2, COLUMNS)
    for first in tl.range(start, end, ROWS, num_stages=2):
        row = first + tl.arange(0, ROWS)
        g = tile(G + b * t * c, row, channel, end, there, c)
        x = tile(X + b * t * c, row, channel, end, there, c) - mean[None, :]
        dx = _input(x, g, w, rstd, total, product)
        store(DX + b * t * c, row, channel, end, there, c, dx)


def group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As fastclip.ops.group_norm_backward: x, g [b, c, t] of any strides, mean, rstd [b, k]."""
    k = mean.shape[1]
    if not is_channels_last(x, k):
        return norm_affine.group_norm_backward(x, g, mean, rstd, weight, need_input)
    if not runs_on(*(y for y in (x, g, mean, rstd, weight) if y is not None)):
        return NotImplemented
    b, c, t = x.shape
    how = cut(c, t, k)
    w = x if weight is None else weight.contiguous()
    given = x, g.mT.contiguous(), mean.contiguous(), rstd.contiguous()
    same = alike(*given, w), weight is None, need_input
    dx = (
        torch.empty_strided((b, c, t), (c * t, 1, c), dtype=x.dtype, device=x.device)
        if need_input
        else None
    )
    dw, db = (x.new_empty(b, c, dtype=torch.float32) for _ in range(2))
    has_weight = weight is not None
    if how.whole:
        tensors = *given, w, x if dx is None else dx, dw, db
        launch(_whole, b * how.blocks, same, tensors, t, c, k, how.blocks, T2=next_power_of_2(t),
               HAS_WEIGHT=has_weight, NEED_INPUT=need_input, **how.constants)  # fmt: skip
        return dx, dw, db
    parts = [x.new_empty(b, how.chunks, c, dtype=torch.float32) for _ in range(2)]
    programs = b * how.chunks * how.blocks
    cuts = t, c, k, how.blocks, how.chunks, how.rows
    launch(_sums, programs, same, (*given, *parts), *cuts, **how.constants)
    if dx is None:
        dw, db = (part.sum(1) for part in parts)
        return None, dw, db
    launch(_gradient, programs, same, (*given, w, *parts, dx, dw, db), b, *cuts,
           CHUNKS2=next_power_of_2(how.chunks), HAS_WEIGHT=has_weight, **how.constants)  # fmt: skip
    return dx, dw, db

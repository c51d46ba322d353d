"""GroupNorm of channels-last maps, forward and backward: x [b, c, t], where [b, t, c] is contiguous.

    y = (x - mean) * rstd * w + bias,  statistics over the c/k channels of a group and all positions

PyTorch's kernels need adjacent positions of a channel, and copy every other map there and back. Here a
program takes some whole groups of neighboring channels of one sample, its columns. A row of its tile is
one read of neighboring bytes. Groups whose size is not a power of two are padded to one.

If a sample's positions fit in registers, x is read once. Otherwise they are cut into chunks. Each writes
mean and squared deviations of its groups (Welford's recurrence per entry of the tile, merged as by Chan,
Golub and LeVeque 1983, without losing digits to a large mean). A second kernel merges those of a sample
and normalizes. The cut depends only on the shape of a sample, not on the batch.

Index letters: b sample, t position, c channel, k group of channels.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.ops.triton import layer_norm
from fastclip.ops.triton.runtime import (
    Launched,
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    work_class,
)

COLUMNS = (64, 32, 16)
"""Channels per program, the most that fit; fewer would be less than 32 bytes of a row."""
MAX_SIZE = 1024  # channels of a group, all of which are columns of one program
ENOUGH = 32  # columns: more only if a tile is so small that two share a multiprocessor
TILE = 1 << 14  # entries that a program holds in registers
A_THREAD = 64  # entries that a thread holds, most
CHUNK = 1 << 15  # entries that a program goes through
MERGED = 1 << 12  # maximal columns of all chunks of a sample: the merging program reads them all
STEP = 64  # positions: chunks are whole steps


@dataclass(frozen=True)
class Cut:
    """How a sample is cut into programs, which depends on its shape.

    Attributes:
        size: channels of a group. columns: of a program, padding included. blocks: of columns.
        chunks: of positions; 1 if a program holds all. rows: positions of a chunk.
        whole: whether a program holds all positions in registers.
    """

    size: int
    columns: int
    blocks: int
    chunks: int
    rows: int
    whole: bool

    @property
    def constants(self) -> dict[str, int]:
        """Returns the constants of every kernel here."""
        return {"SIZE": self.size, "SIZE2": next_power_of_2(self.size), "COLUMNS": self.columns}


@functools.lru_cache(maxsize=4096)
def cut(c: int, t: int, k: int) -> Cut:
    """Returns how a sample of t positions with c channels in k groups is cut."""
    size = c // k
    size2, t2 = next_power_of_2(size), next_power_of_2(t)
    widths = [min(max(n, size2), next_power_of_2(k) * size2) for n in COLUMNS]
    fitting = [n for n in widths if n >= ENOUGH and t2 * n <= TILE // 2]
    fitting += [n for n in widths if t2 * n <= TILE]
    columns = (fitting or widths)[0]
    blocks = cdiv(k, columns // size2)
    if fitting:
        return Cut(size, columns, blocks, 1, t, True)
    rows = STEP * cdiv(max(CHUNK, columns * cdiv(t * columns, MERGED)), STEP * columns)
    rows = STEP * cdiv(cdiv(t, cdiv(t, rows)), STEP)
    return Cut(size, columns, blocks, cdiv(t, rows), rows, False)


def is_channels_last(x: Tensor, k: int) -> bool:
    """Whether the kernels here are for x [b, c, t]: [b, t, c] is contiguous, and x is not."""
    b, c, t = x.shape
    strides = x.stride(1), x.stride(2), x.stride(0) if b > 1 else c * t
    if min(b, c - 1, t - 1) <= 0 or strides != (1, c, c * t):
        return False
    return c % k == 0 and c <= MAX_SIZE * k


def launch(
    kernel: Launched, programs: int, same: Hashable, tensors: Sequence[Tensor], *numbers: float,
    **constants: Any,
) -> None:  # fmt: skip
    """Launches once, with the class of its work as the last number."""
    if not kernel.repeat(same, *tensors):
        kernel[(programs,)](*tensors, *numbers, work_class(programs), same=same, **constants)


def warps(*sizes: int) -> list[triton.Config]:
    """Returns configurations of kernels that hold a sample: only threads vary."""
    return [triton.Config({}, num_warps=w, num_stages=1) for w in sizes]


def held(configs: list[triton.Config], _: Any, *, T2: int, COLUMNS: int, **rest: Any) -> list[Any]:
    """Returns those with enough threads for T2 positions of COLUMNS channels, below four times that."""
    each = [T2 * COLUMNS / (32 * c.num_warps) for c in configs]
    fits = [c for c, n in zip(configs, each, strict=True) if A_THREAD // 4 < n <= A_THREAD]
    return fits or [min(configs, key=lambda c: c.num_warps)]  # a small tile


def tiles(*sizes: tuple[int, int]) -> list[triton.Config]:
    """Returns configurations of kernels that loop over a chunk: entries of a tile, and threads."""
    return [triton.Config({"ELEMENTS": n}, num_warps=w, num_stages=2) for n, w in sizes]


@triton.jit
def columns(block, c, SIZE: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr):
    """Channel and group of each column of a block, and whether there is such a channel."""
    j = tl.arange(0, COLUMNS)
    group = block * (COLUMNS // SIZE2) + j // SIZE2
    if SIZE == SIZE2:
        channel = block * COLUMNS + j
        return channel, group, channel < c
    else:
        channel = group * SIZE + j % SIZE2
        return channel, group, (channel < c) & (j % SIZE2 < SIZE)


@triton.jit
def over_groups(x, SIZE2: tl.constexpr, COLUMNS: tl.constexpr):
    """x [COLUMNS], every entry replaced by the sum of its group."""
    sums = tl.sum(tl.reshape(x, [COLUMNS // SIZE2, SIZE2]), 1)[:, None]
    return tl.reshape(tl.broadcast_to(sums, [COLUMNS // SIZE2, SIZE2]), [COLUMNS])


@triton.jit
def tile(X, row, channel, end, there, c):
    """Rows and columns of a sample in float32, 0 outside."""
    inside = (row[:, None] < end) & there[None, :]
    at = row.to(tl.int64)[:, None] * c + channel[None, :]
    return tl.load(X + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(Y, row, channel, end, there, c, y):
    inside = (row[:, None] < end) & there[None, :]
    at = row.to(tl.int64)[:, None] * c + channel[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def affine(W, channel, there, HAS: tl.constexpr, OTHERWISE: tl.constexpr):
    """A parameter of each column, or a number if there is none."""
    if HAS:
        return tl.load(W + channel, mask=there, other=0.0).to(tl.float32)
    else:
        return tl.where(there, OTHERWISE, 0.0)


@triton.jit
def _keep(MEAN, RSTD, at, group, there, mean, rstd, SIZE2: tl.constexpr, COLUMNS: tl.constexpr):
    """One number per group, of its first column."""
    first = there & (tl.arange(0, COLUMNS) % SIZE2 == 0)
    tl.store(MEAN + at + group, mean, mask=first)
    tl.store(RSTD + at + group, rstd, mask=first)


@autotuned(warps(8, 4), key=["SIZE", "COLUMNS", "T2", "work"], prune=held)
@launched(do_not_specialize=["work"])
def _whole(X, W, BIAS, Y, MEAN, RSTD, t, c, k, blocks, eps, work,
           T2: tl.constexpr, SIZE: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr,
           HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """All positions of some groups of a sample."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    row = tl.arange(0, T2)
    x = tile(X + b * t * c, row, channel, t, there, c)
    n = t.to(tl.float32) * SIZE
    mean = over_groups(tl.sum(x, 0), SIZE2, COLUMNS) / n
    x = tl.where((row[:, None] < t) & there[None, :], x - mean[None, :], 0.0)
    rstd = tl.rsqrt(over_groups(tl.sum(x * x, 0), SIZE2, COLUMNS) / n + eps)
    _keep(MEAN, RSTD, b * k, group, there, mean, rstd, SIZE2, COLUMNS)
    factor = affine(W, channel, there, HAS_WEIGHT, 1.0) * rstd
    y = x * factor[None, :] + affine(BIAS, channel, there, HAS_BIAS, 0.0)[None, :]
    store(Y + b * t * c, row, channel, t, there, c, y)


@autotuned(tiles((4096, 8), (2048, 4)), key=["SIZE", "COLUMNS", "rows", "work"])
@launched(do_not_specialize=["rows", "work"])
def _moments(X, MEANS, SQUARES, t, c, k, blocks, chunks, rows, work,
             SIZE: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr,
             ELEMENTS: tl.constexpr):  # fmt: skip
    """Mean and sum of squared deviations of each group in a chunk of a sample."""
    ROWS: tl.constexpr = ELEMENTS // COLUMNS
    part = tl.program_id(0) // blocks  # chunk of a sample
    b, start = (part // chunks).to(tl.int64), part % chunks * rows
    end = tl.minimum(t, start + rows)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    seen = 0.0
    for first in tl.range(start, end, ROWS, num_stages=2):
        row = first + tl.arange(0, ROWS)
        x = tile(X + b * t * c, row, channel, end, there, c)
        seen += 1.0
        off = tl.where(row[:, None] < end, x - mean, 0.0)
        mean += off * (1.0 / seen)
        square += tl.where(row[:, None] < end, off * (x - mean), 0.0)
    left = tl.maximum(end - start - tl.arange(0, ROWS), 0)
    seen_by_row = ((left + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    n = (end - start).to(tl.float32) * SIZE
    whole = over_groups(tl.sum(mean * seen_by_row, 0), SIZE2, COLUMNS) / n
    off = tl.where(there[None, :], mean - whole[None, :], 0.0)
    square = over_groups(tl.sum(square + off * off * seen_by_row, 0), SIZE2, COLUMNS)
    _keep(MEANS, SQUARES, part.to(tl.int64) * k, group, there, whole, square, SIZE2, COLUMNS)


@autotuned(tiles((4096, 8), (2048, 4)), key=["SIZE", "COLUMNS", "rows", "work"])
@launched(do_not_specialize=["samples", "rows", "work"])
def _normalize(X, W, BIAS, MEANS, SQUARES, Y, MEAN, RSTD, samples, t, c, k, blocks, chunks, rows, eps,
               work, CHUNKS2: tl.constexpr, SIZE: tl.constexpr,
               SIZE2: tl.constexpr, COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
               HAS_BIAS: tl.constexpr, ELEMENTS: tl.constexpr):  # fmt: skip
    """A chunk, after merging the moments of its sample's chunks; last samples first: the cache still
    holds these."""
    ROWS: tl.constexpr = ELEMENTS // COLUMNS
    part = samples * chunks - 1 - tl.program_id(0) // blocks
    b, start = (part // chunks).to(tl.int64), part % chunks * rows
    end = tl.minimum(t, start + rows)
    channel, group, there = columns(tl.program_id(0) % blocks, c, SIZE, SIZE2, COLUMNS)
    chunk = tl.arange(0, CHUNKS2)
    at = (b * chunks + chunk)[:, None] * k + group[None, :]
    inside = (chunk < chunks)[:, None] & there[None, :]
    means = tl.load(MEANS + at, mask=inside, other=0.0)
    squares = tl.load(SQUARES + at, mask=inside, other=0.0)
    seen = (tl.minimum(tl.maximum(t - chunk * rows, 0), rows).to(tl.float32) * SIZE)[:, None]
    n = t.to(tl.float32) * SIZE
    mean = tl.sum(means * seen, 0) / n
    off = means - mean[None, :]
    rstd = tl.rsqrt(tl.sum(squares + off * off * seen, 0) / n + eps)
    if part % chunks == 0:
        _keep(MEAN, RSTD, b * k, group, there, mean, rstd, SIZE2, COLUMNS)
    factor = (affine(W, channel, there, HAS_WEIGHT, 1.0) * rstd)[None, :]
    bias = affine(BIAS, channel, there, HAS_BIAS, 0.0)[None, :]
    for first in tl.range(start, end, ROWS, num_stages=2):
        row = first + tl.arange(0, ROWS)
        x = tile(X + b * t * c, row, channel, end, there, c)
        y = (x - mean[None, :]) * factor + bias
        store(Y + b * t * c, row, channel, end, there, c, y)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, k: int, eps: float, dtype: torch.dtype
) -> Any:
    """As fastclip.ops.group_norm, of channels-last maps."""
    if x.dim() < 3 or dtype == torch.float64:
        return NotImplemented
    rows, params = x.flatten(2), [p for p in (weight, bias) if p is not None]
    b, c, t = rows.shape
    if not is_channels_last(rows, k) or any(p.shape != (c,) for p in params):
        return NotImplemented
    if not runs_on(x, *params):
        return NotImplemented
    how = cut(c, t, k)
    y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    mean, rstd = (x.new_empty(b, k, dtype=torch.float32) for _ in range(2))
    own = x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous()
    same = alike(rows, *own, y), weight is None, bias is None, k, eps
    given = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, **how.constants}
    if how.whole:
        tensors = x, *own, y, mean, rstd
        launch(_whole, b * how.blocks, same, tensors, t, c, k, how.blocks, eps,
               T2=next_power_of_2(t), **given)  # fmt: skip
        return y, mean, rstd
    parts = [x.new_empty(b, how.chunks, k, dtype=torch.float32) for _ in range(2)]
    programs = b * how.chunks * how.blocks
    cuts = t, c, k, how.blocks, how.chunks, how.rows
    launch(_moments, programs, same, (x, *parts), *cuts, **how.constants)
    launch(_normalize, programs, same, (x, *own, *parts, y, mean, rstd), b, *cuts, eps,
           CHUNKS2=next_power_of_2(how.chunks), **given)  # fmt: skip
    return y, mean, rstd


# -------------------------------------------------------------------------------------------------
# Backward of GroupNorm of channels-last maps: the input's gradient, and per-sample affine ones.
#
#     x_hat = (x - mean) * rstd    dw_b = sum_t g * x_hat    db_b = sum_t g    h = g * w
#     dx = rstd * (h - M[h] - x_hat * M[h * x_hat]),  M the mean over a group
#
# Cut into programs as in the forward pass. If a sample's positions fit in registers, x and g are
# read once. Otherwise each chunk writes its part of dw and db. A second kernel adds those of a
# sample, in a fixed order, and reads x and g once more for dx. Other maps go to
# ops/triton/layer_norm.py.
#
# Index letters: b sample, t position, c channel, k group of channels.


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
def _whole_backward(X, G, MEAN, RSTD, W, DX, DW, DB, t, c, k, blocks, work,
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
    """dx of a chunk, after adding the parts of dw and db; last samples first: the cache still holds
    these."""
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
        return layer_norm.group_norm_backward(x, g, mean, rstd, weight, need_input)
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
        launch(_whole_backward, b * how.blocks, same, tensors, t, c, k, how.blocks,
               T2=next_power_of_2(t), HAS_WEIGHT=has_weight, NEED_INPUT=need_input,
               **how.constants)  # fmt: skip
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

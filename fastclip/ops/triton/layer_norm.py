"""Backward of LayerNorm, RMSNorm and GroupNorm: the input's gradient and per-sample affine ones.

    x_hat = (x - mean) * rstd    dw_b = sum_t g * x_hat    db_b = sum_t g    h = g * w
    dx = rstd * (h - M[h] - x_hat * M[h * x_hat]),  M the mean over what was normalized

(RMSNorm: no mean and no M[h].) Index letters: b sample, t position, c channel, k group of channels.
LayerNorm and RMSNorm: a program takes some positions of a sample with all their channels. x and g are
read once, dx is written once, and dw and db are written as partial sums over blocks of positions, added
in a fixed order. GroupNorm (InstanceNorm: one channel per group): a program takes a group of a sample. x
and g are read once if the group fits in registers, otherwise a second time from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.ops.triton.runtime import (
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    work_class,
)

MAX_FEATURES = 8192  # of a position: its x, g, dw and db are held in registers
MAX_GROUP = 1 << 20  # elements of a group: one program goes through them


def _configs(*sizes: tuple[int, int]) -> list[triton.Config]:
    return [triton.Config({"ELEMENTS": n}, num_warps=w, num_stages=2) for n, w in sizes]


@autotuned(
    _configs((2048, 4), (4096, 4)),
    key=["c", "IS_LAYER", "NEED_INPUT", "rows", "work"],
)
@launched(do_not_specialize=["chunks", "rows", "work"])
def _rows(X, G, MEAN, RSTD, W, DX, DW, DB, t, c, chunks, rows, work,
          sxb, sxt, sxc, sgb, sgt, sgc, smb, smt, srb, srt, sdb, sdt, sdc, sw,
          C2: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr,
          NEED_INPUT: tl.constexpr, ELEMENTS: tl.constexpr):  # fmt: skip
    """`rows` positions of a sample; C2 is c rounded up to a power of two."""
    ROWS: tl.constexpr = ELEMENTS // C2 if ELEMENTS > C2 else 1
    b = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    col = tl.arange(0, C2)
    col64 = col.to(tl.int64)[None, :]
    end = tl.minimum(t, (chunk + 1) * rows)
    w = 1.0
    if HAS_WEIGHT:
        w = tl.load(W + col.to(tl.int64) * sw, mask=col < c, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([C2], tl.float32)
    db = tl.zeros([C2], tl.float32)
    for start in tl.range(0, rows, ROWS, num_stages=2):
        row = chunk * rows + start + tl.arange(0, ROWS)
        row64 = row.to(tl.int64)
        inside = (row[:, None] < end) & (col[None, :] < c)
        x = tl.load(X + b * sxb + row64[:, None] * sxt + col64 * sxc, mask=inside, other=0.0)
        g = tl.load(G + b * sgb + row64[:, None] * sgt + col64 * sgc, mask=inside, other=0.0)
        rstd = tl.load(RSTD + b * srb + row64 * srt, mask=row < end, other=0.0)
        rstd = rstd.to(tl.float32)[:, None]
        x = x.to(tl.float32)
        g = g.to(tl.float32)
        if IS_LAYER:
            mean = tl.load(MEAN + b * smb + row64 * smt, mask=row < end, other=0.0)
            x -= mean.to(tl.float32)[:, None]
            db += tl.sum(g, 0)
        x *= rstd
        dw += tl.sum(g * x, 0)
        if NEED_INPUT:
            h = g * w
            dx = h - x * (tl.sum(h * x, 1) / c)[:, None]
            if IS_LAYER:
                dx -= (tl.sum(h, 1) / c)[:, None]
            dx = (dx * rstd).to(DX.dtype.element_ty)
            tl.store(DX + b * sdb + row64[:, None] * sdt + col64 * sdc, dx, mask=inside)
    at = (b * chunks + chunk) * c + col
    tl.store(DW + at, dw, mask=col < c)
    if IS_LAYER:
        tl.store(DB + at, db, mask=col < c)


@triton.jit
def _tile(X, G, channel, position, channels, t, mean, sxc, sxt, sgc, sgt):
    """x - mean and g at some channels and positions of a group, in float32; 0 outside."""
    c64, t64 = channel.to(tl.int64)[:, None], position.to(tl.int64)[None, :]
    inside = (channel[:, None] < channels) & (position[None, :] < t)
    x = tl.load(X + c64 * sxc + t64 * sxt, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + c64 * sgc + t64 * sgt, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, x - mean, 0.0), g


@triton.jit
def _weight(W, channel, channels, sw, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(W + channel * sw, mask=channel < channels, other=0.0).to(tl.float32)
    else:
        return tl.where(channel < channels, 1.0, 0.0)


@triton.jit
def _store(DX, channel, position, channels, t, dx, sdc, sdt):
    inside = (channel[:, None] < channels) & (position[None, :] < t)
    at = channel.to(tl.int64)[:, None] * sdc + position.to(tl.int64)[None, :] * sdt
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)


@autotuned(
    _configs((4096, 8), (2048, 4), (8192, 16)),
    key=["channels", "C2", "T2", "NEED_INPUT", "work"],
)
@launched(do_not_specialize=["work"])
def _groups(X, G, MEAN, RSTD, W, DX, DW, DB, t, channels, groups, work,
            sxb, sxc, sxt, sgb, sgc, sgt, smb, smk, srb, srk, sdb, sdc, sdt, sw,
            C2: tl.constexpr, T2: tl.constexpr, HAS_WEIGHT: tl.constexpr,
            NEED_INPUT: tl.constexpr, ELEMENTS: tl.constexpr):  # fmt: skip
    """A group of `channels` channels of a sample; C2, T2: channels and t, as powers of two."""
    BLOCK_T: tl.constexpr = T2 if T2 < ELEMENTS else ELEMENTS
    BLOCK_C: tl.constexpr = C2 if C2 < ELEMENTS // BLOCK_T else ELEMENTS // BLOCK_T
    b = (tl.program_id(0) // groups).to(tl.int64)
    first = (tl.program_id(0) % groups).to(tl.int64) * channels
    X += b * sxb + first * sxc
    G += b * sgb + first * sgc
    DX += b * sdb + first * sdc
    W += first * sw
    DW += b * groups * channels + first
    DB += b * groups * channels + first
    k = tl.program_id(0) % groups
    mean = tl.load(MEAN + b * smb + k.to(tl.int64) * smk).to(tl.float32)
    rstd = tl.load(RSTD + b * srb + k.to(tl.int64) * srk).to(tl.float32)
    size = t * 1.0 * channels  # either may be a compile-time 1
    if (C2 == BLOCK_C) & (T2 == BLOCK_T):  # x and g stay in registers
        channel, position = tl.arange(0, C2), tl.arange(0, T2)
        x, g = _tile(X, G, channel, position, channels, t, mean, sxc, sxt, sgc, sgt)
        dw = tl.sum(x * g, 1) * rstd
        db = tl.sum(g, 1)
        tl.store(DW + channel, dw, mask=channel < channels)
        tl.store(DB + channel, db, mask=channel < channels)
        if NEED_INPUT:
            w = _weight(W, channel, channels, sw, HAS_WEIGHT)
            dx = g * w[:, None] - tl.sum(db * w) / size - x * (tl.sum(dw * w) / size * rstd)
            _store(DX, channel, position, channels, t, dx * rstd, sdc, sdt)
    else:
        product = tl.full([], 0.0, tl.float32)  # sum of h * x_hat over the group
        total = tl.full([], 0.0, tl.float32)  # sum of h
        for c0 in range(0, channels, BLOCK_C):
            channel = c0 + tl.arange(0, BLOCK_C)
            products = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
            totals = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
            for t0 in tl.range(0, t, BLOCK_T, num_stages=2):
                position = t0 + tl.arange(0, BLOCK_T)
                x, g = _tile(X, G, channel, position, channels, t, mean, sxc, sxt, sgc, sgt)
                products += x * g
                totals += g
            dw = tl.sum(products, 1) * rstd
            db = tl.sum(totals, 1)
            tl.store(DW + channel, dw, mask=channel < channels)
            tl.store(DB + channel, db, mask=channel < channels)
            w = _weight(W, channel, channels, sw, HAS_WEIGHT)
            product += tl.sum(dw * w)
            total += tl.sum(db * w)
        if NEED_INPUT:
            for c0 in range(0, channels, BLOCK_C):
                channel = c0 + tl.arange(0, BLOCK_C)
                w = _weight(W, channel, channels, sw, HAS_WEIGHT)[:, None]
                for t0 in tl.range(0, t, BLOCK_T, num_stages=2):
                    position = t0 + tl.arange(0, BLOCK_T)
                    x, g = _tile(X, G, channel, position, channels, t, mean, sxc, sxt, sgc, sgt)
                    dx = (g * w - total / size - x * (product / size * rstd)) * rstd
                    _store(DX, channel, position, channels, t, dx, sdc, sdt)


def layer_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As fastclip.ops.layer_norm_backward: x, g [b, t, c], mean, rstd [b, t]."""
    return _by_rows(x, g, mean, rstd, weight, need_input)


def rms_norm_backward(
    x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor]:
    """As fastclip.ops.rms_norm_backward: x, g [b, t, c], rstd [b, t]."""
    result = _by_rows(x, g, None, rstd, weight, need_input)
    return result if result is NotImplemented else result[:2]


def _by_rows(
    x: Tensor, g: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> Any:
    b, t, c = x.shape
    given = [y for y in (x, g, mean, rstd, weight) if y is not None]
    same = alike(*given), mean is None, weight is None, need_input
    if not runs_on(*given) or c > MAX_FEATURES:
        return NotImplemented
    dx = torch.empty_like(x) if need_input else None
    if not x.numel():
        return dx, *x.new_zeros(2, b, c, dtype=torch.float32)
    c2 = next_power_of_2(c)
    # Enough programs to fill a large GPU eight times, in blocks long enough that the partial sums
    # are a few percent of the traffic.
    rows = min(max(next_power_of_2(b * t) // 1024, 16, 4096 // c2), 128)
    chunks = cdiv(t, rows)
    parts = x.new_empty(1 if mean is None else 2, b, chunks, c, dtype=torch.float32)
    both = parts.unbind()
    tensors = (
        x, g, rstd if mean is None else mean, rstd, x if weight is None else weight,
        x if dx is None else dx, both[0], both[-1],
    )  # fmt: skip
    if not _rows.repeat(same, *tensors):
        _rows[(b * chunks,)](
            *tensors, t, c, chunks, rows, work_class(b * chunks), *x.stride(), *g.stride(),
            *tensors[2].stride(), *rstd.stride(), *tensors[5].stride(),
            0 if weight is None else weight.stride(0), C2=c2, IS_LAYER=mean is not None,
            HAS_WEIGHT=weight is not None, NEED_INPUT=need_input, same=same,
        )  # fmt: skip
    sums = (parts[:, :, 0] if chunks == 1 else parts.sum(2)).unbind()
    return dx, sums[0], sums[-1]


def group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As fastclip.ops.group_norm_backward: x, g [b, c, t] of any strides, mean, rstd [b, k]."""
    b, c, t = x.shape
    k = mean.shape[1]
    given = [y for y in (x, g, mean, rstd, weight) if y is not None]
    if not runs_on(*given) or c * t > MAX_GROUP * k:
        return NotImplemented
    dx = torch.empty_like(x) if need_input else None
    dw, db = x.new_zeros(2, b, c, dtype=torch.float32)
    if x.numel():
        _groups[(b * k,)](
            x, g, mean, rstd, x if weight is None else weight, x if dx is None else dx, dw, db,
            t, c // k, k, work_class(b * k), *x.stride(), *g.stride(), *mean.stride(), *rstd.stride(),
            *(x if dx is None else dx).stride(), 0 if weight is None else weight.stride(0),
            C2=next_power_of_2(c // k), T2=next_power_of_2(t),
            HAS_WEIGHT=weight is not None, NEED_INPUT=need_input,
        )  # fmt: skip
    return dx, dw, db

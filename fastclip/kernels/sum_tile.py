"""One tile of a clipped sum over one stretch of (b, t): what scaled_sum and scaled_sums launch.

Index letters: b sample, t position, d input feature, p output feature.

A step takes as many positions as a power of two, so that the last one of a sample may be filled
little: a ViT's 197 are one step of 128 and 69 positions of another. With a TAIL these are taken by
themselves, after the whole steps of all samples, as 64 and 16 positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastclip.kernels.products import multiply


@triton.jit
def sum_tile(
    a, g, scale, out, d, p, b, t, split, splits, tile, a_b, a_t, a_d, g_b, g_t, g_p, scale_b,
    BY_SAMPLE: tl.constexpr, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Sum of s_b g_b^T a_b over one of `splits` stretches, stored.

    Args:
        WHOLE_T: BLOCK_T divides t. WHOLE_SIDES: the tile lies within p and d. TAIL: 16 or 80, no less
            than the positions beyond a sample's last whole step, which are taken by themselves, or 0.
    """
    tl.static_assert(TAIL == 0 or BLOCK_T == 128)  # of which a TAIL is the rest
    tiles_d = tl.cdiv(d, BLOCK_D)
    i, j = tile // tiles_d, tile % tiles_d
    rows, cols = i * BLOCK_P + tl.arange(0, BLOCK_P), j * BLOCK_D + tl.arange(0, BLOCK_D)
    g += rows[:, None].to(tl.int64) * g_p
    a += cols[None, :].to(tl.int64) * a_d
    in_p, in_d = rows[:, None] < p, cols[None, :] < d
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    if not BY_SAMPLE:
        acc = _of_rows(
            acc,
            a,
            g,
            scale,
            in_p,
            in_d,
            b,
            t,
            split,
            splits,
            a_b,
            a_t,
            g_b,
            g_t,
            scale_b,
            MODE,
            BLOCK_T,
        )
    else:
        acc = _of_steps(
            acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
            MODE, WHOLE_T, WHOLE_SIDES, BLOCK_T, TAIL,
        )  # fmt: skip
        if TAIL:
            acc = _of_tails(
                acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
                MODE, WHOLE_SIDES, BLOCK_T, TAIL,
            )  # fmt: skip
    to = out + rows[:, None].to(tl.int64) * d + cols[None, :]
    tl.store(to, acc, mask=in_p & in_d)


@triton.jit
def _of_steps(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr, BLOCK_T: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Products of one sample's positions each, scaled; what a TAIL takes is left out.

    Few instructions a step: the processors that issue them are what tensor cores wait for.
    """
    if TAIL:
        t = t // BLOCK_T * BLOCK_T
    local = tl.arange(0, BLOCK_T)
    chunks = tl.maximum(tl.cdiv(t, BLOCK_T), 1)  # of a sample
    steps = b * tl.cdiv(t, BLOCK_T)
    share = tl.cdiv(steps, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, steps)
    sample, t0 = (first // chunks).to(tl.int64), first % chunks * BLOCK_T
    g_at = g + local[None, :].to(tl.int64) * g_t
    a_at = a + local[:, None].to(tl.int64) * a_t
    g_from, a_from = sample * g_b + t0.to(tl.int64) * g_t, sample * a_b + t0.to(tl.int64) * a_t
    scale += sample * scale_b
    for _ in range(first, stop):
        factor = tl.load(scale).to(tl.float32)  # early: the product hides how long that takes
        in_t = local < t - t0
        part = _product(
            tl.zeros_like(acc), g_at + g_from, a_at + a_from, in_t, in_p, in_d,
            MODE, WHOLE_T or TAIL > 0, WHOLE_SIDES,
        )  # fmt: skip
        acc = tl.where(factor == 0, acc, tl.fma(part, factor, acc))
        ends = t0 + BLOCK_T >= t
        g_from += tl.where(ends, g_b - t0.to(tl.int64) * g_t, BLOCK_T * g_t)
        a_from += tl.where(ends, a_b - t0.to(tl.int64) * a_t, BLOCK_T * a_t)
        scale += tl.where(ends, scale_b, 0)
        t0 = tl.where(ends, 0, t0 + BLOCK_T)
    return acc


@triton.jit
def _of_tails(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, WHOLE_SIDES: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The same of what lies beyond the whole steps."""
    share = tl.cdiv(b, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, b)
    t0 = (t // BLOCK_T * BLOCK_T).to(tl.int64)
    rest = t - t0
    g += t0 * g_t + first.to(tl.int64) * g_b
    a += t0 * a_t + first.to(tl.int64) * a_b
    scale += first.to(tl.int64) * scale_b
    for _ in range(first, stop):
        factor = tl.load(scale).to(tl.float32)
        part = tl.zeros_like(acc)
        if TAIL > 16:
            part = _piece(part, g, a, rest, in_p, in_d, a_t, g_t, MODE, WHOLE_SIDES, 0, 64)
        part = _piece(part, g, a, rest, in_p, in_d, a_t, g_t, MODE, WHOLE_SIDES, TAIL - 16, 16)
        acc = tl.where(factor == 0, acc, tl.fma(part, factor, acc))
        g += g_b
        a += a_b
        scale += scale_b
    return acc


@triton.jit
def _piece(
    part, g, a, rest, in_p, in_d, a_t, g_t, MODE: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    FIRST: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """part + the product of so many of a tail's positions, as far as there are any."""
    local = FIRST + tl.arange(0, LENGTH)
    return _product(
        part, g + local[None, :].to(tl.int64) * g_t, a + local[:, None].to(tl.int64) * a_t,
        local < rest, in_p, in_d, MODE, False, WHOLE_SIDES,
    )  # fmt: skip


@triton.jit
def _product(
    part, g, a, in_t, in_p, in_d, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr
):  # fmt: skip
    """part + g a, of the tiles at these addresses."""
    g_tile = _loaded(g, in_t[None, :], in_p, WHOLE_T, WHOLE_SIDES)
    a_tile = _loaded(a, in_t[:, None], in_d, WHOLE_T, WHOLE_SIDES)
    return multiply(g_tile, a_tile, part, MODE)


@triton.jit
def _loaded(at, in_t, in_side, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr):
    """A tile, 0 beyond the operand's ends, which are looked for where they can be in it."""
    if WHOLE_T and WHOLE_SIDES:
        tile = tl.load(at)
    elif WHOLE_T:
        tile = tl.load(at, mask=in_side, other=0.0)
    elif WHOLE_SIDES:
        tile = tl.load(at, mask=in_t, other=0.0)
    else:
        tile = tl.load(at, mask=in_t & in_side, other=0.0)
    return tile


@triton.jit
def _of_rows(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Products of rows of any samples, which are scaled as they are loaded."""
    local = tl.arange(0, BLOCK_T)
    share = tl.cdiv(tl.cdiv(b * t, BLOCK_T), splits) * BLOCK_T
    first, stop = split * share, tl.minimum((split + 1) * share, b * t)
    for start in range(first, stop, BLOCK_T):
        row = start + local
        sample, at = (row // t).to(tl.int64), (row % t).to(tl.int64)
        factor = tl.load(scale + sample * scale_b, mask=row < stop, other=0.0).to(tl.float32)
        alive = factor != 0  # the others are not even read
        g_at = g + (sample * g_b + at * g_t)[None, :]
        a_at = a + (sample * a_b + at * a_t)[:, None]
        g_tile = tl.load(g_at, mask=in_p & alive[None, :], other=0.0).to(tl.float32)
        a_tile = tl.load(a_at, mask=in_d & alive[:, None], other=0.0)
        acc = multiply(g_tile * factor[None, :], a_tile, acc, MODE)
    return acc

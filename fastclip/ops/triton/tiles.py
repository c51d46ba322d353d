"""The parts of kernels for products: a product of two tiles, a sum in fixed order, and the
configurations to try.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fastclip.core.numerics import (
    GRAM_ERROR_FACTOR,
    lost_squares,
    margin,
    unit_roundoff,
    user_allows_tf32,
)
from fastclip.ops.linear import LAYERS_TOGETHER
from fastclip.ops.triton.runtime import INTERPRETED, alike, launched

# -------------------------------------------------------------------------------------------------
# Copies of operands whose rows do not suit wide loads.
#
# A row of a vocabulary's gradient (p = 50257) begins at any even address. Its bfloat16 values are then
# loaded 2 bytes at a time, and tensor cores wait: asynchronous copies need at least 4 bytes, and pay
# with 16. If an operand is read repeatedly, one copy with features padded by zeros costs less. Zeros
# change no norm and no product, and bounds for more features hold for fewer.
#
# Triton only knows whether 16 divides a number, so this is checked for strides and sizes. Index
# letters: b sample, t position, n feature.


WIDE = 16
"""16-byte loads need strides, sizes and addresses that this divides."""
READS = 4
"""Loads of an operand from which a copy (one read and one write) pays."""
LEAST = 1 << 20
"""Bytes below which an operand fits into the cache, and a launch costs more than its loads."""
ROOM = 1 << 28
"""Bytes of copies at a time."""


def is_wide(x: Tensor) -> bool:
    """Whether 16 bytes of x [b, t, n] can be loaded at once, along n or along t."""
    (_, t, n), (b_stride, t_stride, n_stride) = x.shape, x.stride()
    along_n = n_stride == 1 and not (n % WIDE or t_stride % WIDE)
    along_t = t_stride == 1 and not (t % WIDE or n_stride % WIDE)
    return (along_n or along_t) and not (b_stride % WIDE or x.data_ptr() % WIDE)


def to_copy(x: Tensor, reads: int) -> int:
    """Returns the bytes of `aligned(x)` if a copy of x [b, t, n], loaded `reads` times, pays; else 0.

    For float32 operands it does not: their exact products take longer than their loads.
    """
    size = x.numel() * x.element_size()
    return 0 if x.element_size() != 2 or reads < READS or size < LEAST or is_wide(x) else size


def aligned(x: Tensor) -> Tensor:
    """Copies x [b, t, n] with zeros up to the next n that `WIDE` divides, [b, t, n']."""
    b, t, n = x.shape
    copy = x.new_empty(b, t, -(-n // WIDE) * WIDE)
    copy[..., :n] = x
    copy[..., n:] = 0
    return copy


def stretches(n: int, size: int, step: int = 1) -> list[slice]:
    """Cuts 0 to n into parts of about `ROOM` of `size` bytes, at multiples of `step`.

    >>> stretches(5, 2 * ROOM)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    parts = max(1, -(-size // ROOM))
    length = -(-n // (parts * step)) * step
    return [slice(start, min(n, start + length)) for start in range(0, n, length)]


# -------------------------------------------------------------------------------------------------


_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter would multiply bfloat16's bits


@triton.jit
def multiply(left, right, acc, MODE: tl.constexpr):
    """acc + left right, in float32."""
    if _WIDEN or MODE != "native":
        left, right = left.to(tl.float32), right.to(tl.float32)
    if MODE == "ieee":  # a short sum first; by fma, because an addition is fused into the product
        acc = tl.fma(tl.dot(left, right, input_precision="ieee"), 1.0, acc)
    elif MODE == "tf32x3":
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def ordered_sum(x, n, stride, BLOCK: tl.constexpr, SQUARED: tl.constexpr):
    """Sum of n numbers (of their squares) in fixed order."""
    local = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + local.to(tl.int64)
        value = tl.load(x + at * stride, mask=at < n, other=0.0).to(tl.float32)
        acc += value * value if SQUARED else value
    return tl.sum(acc)


@triton.jit
def one_of(layer, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11):
    """A layer's operand, by selects, which keep what is known of addresses: that 16 divides them."""
    x = tl.where(layer == 1, x1, x0)
    x = tl.where(layer == 2, x2, x)
    x = tl.where(layer == 3, x3, x)
    x = tl.where(layer == 4, x4, x)
    x = tl.where(layer == 5, x5, x)
    x = tl.where(layer == 6, x6, x)
    x = tl.where(layer == 7, x7, x)
    x = tl.where(layer == 8, x8, x)
    x = tl.where(layer == 9, x9, x)
    x = tl.where(layer == 10, x10, x)
    return tl.where(layer == 11, x11, x)


def layers_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor] | None:
    """Returns the arguments for `one_of`: inputs, then gradients, padded with the first layer's.

    Returns None if one launch cannot take them: too many, not of one kind, or several of which 16 does
    not divide an address.
    """
    layers, kind = len(pairs), alike(*pairs[0])
    if layers > LAYERS_TOGETHER or any(alike(*pair) != kind for pair in pairs[1:]):
        return None
    if layers > 1 and any(x.data_ptr() % WIDE for pair in pairs for x in pair):
        return None
    inputs, gradients = zip(*pairs, *[pairs[0]] * (LAYERS_TOGETHER - layers), strict=True)
    return [*inputs, *gradients]


Spills = Mapping[tuple[str, str], Collection[tuple[int, ...]]]
"""(kind of product, generation) -> (sizes of the tile, warps, stages) whose registers spill, or that
were not checked."""


def generation() -> str:
    """Returns the current GPU's generation: "ampere", or "hopper" for newer ones and the interpreter."""
    new = INTERPRETED or driver.active.get_current_target().arch >= 90
    return "hopper" if new else "ampere"


def stays(config: triton.Config, mode: str, spills: Spills, *sizes: str) -> bool:
    """Whether a tile of these sizes stays in registers, as measured by bench.kernels.static."""
    tile = (*(config.kwargs[size] for size in sizes), config.num_warps, config.num_stages)
    return tile not in spills.get((mode, generation()), ())


def product_configs(
    *tiles: tuple[int, int, int, int, int], **constants: bool
) -> list[triton.Config]:
    """Returns configurations of a tiled product g^T a from (block_p, block_d, block_t, warps, stages),
    all with these constants."""
    return [
        triton.Config(
            {"BLOCK_P": block_p, "BLOCK_D": block_d, "BLOCK_T": block_t, **constants},
            num_warps=warps,
            num_stages=stages,
        )
        for block_p, block_d, block_t, warps, stages in tiles
    ]


# -------------------------------------------------------------------------------------------------
# A tile of a Gram, the product of two Grams' tiles, and which tiles a program has.


@triton.jit
def gram_tile(
    x, y, n, rows_x, rows_y, t_x, t_y, stride_xt, stride_xn, stride_yt, stride_yn, sums,
    SAME: tl.constexpr, SUMS: tl.constexpr, RESTART: tl.constexpr, MODE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x_i y_j^T over n features, [BLOCK_T, BLOCK_T]; `SAME` if x_i is y_j. A new sum begins after every
    `RESTART` features. `SUMS`: features of x_i, summed over its rows."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + rows_x[:, None] * stride_xt + k[None, :].to(tl.int64) * stride_xn
    y_at = y + rows_y[None, :] * stride_yt + k[:, None].to(tl.int64) * stride_yn
    in_x, in_y = rows_x[:, None] < t_x, rows_y[None, :] < t_y
    acc = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    total = acc
    for start in range(0, n, BLOCK_K):
        left = tl.load(x_at, mask=in_x & (k[None, :] < n - start), other=0.0)
        if SUMS:
            tl.store(sums + start + k, tl.sum(left.to(tl.float32), 0), mask=k < n - start)
        if SAME:
            right = tl.trans(left)
        else:
            right = tl.load(y_at, mask=in_y & (k[:, None] < n - start), other=0.0)
        acc = multiply(left, right, acc, MODE)
        x_at += BLOCK_K * stride_xn
        y_at += BLOCK_K * stride_yn
        if RESTART and start % RESTART == RESTART - BLOCK_K:
            total += acc
            acc = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    return total + acc if RESTART else acc


@triton.jit
def pair_of(pair):
    """(i, j), i <= j, of pair = j (j + 1) / 2 + i; the square root may be off by one."""
    j = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    j -= (j * (j + 1) // 2 > pair).to(tl.int32)
    j += ((j + 1) * (j + 2) // 2 <= pair).to(tl.int32)
    return pair - j * (j + 1) // 2, j


@triton.jit
def gram_pair(
    a_x, g_x, a_y, g_y, sums, d, p, i, j, t_x, t_y,
    a_xt, a_xd, g_xt, g_xp, a_yt, a_yd, g_yt, g_yp,
    CROSS: tl.constexpr, ONE_TILE: tl.constexpr, SUMS: tl.constexpr, A_MODE: tl.constexpr,
    G_MODE: tl.constexpr, A_RESTART: tl.constexpr, G_RESTART: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums of K H, |K H|, K^2, H^2 and traces of K and H, of tile i, j of the Grams of a sample: x and y
    are one use, or two (CROSS). SUMS: takes the sums of g_x over the rows of tile i, if i is j."""
    local = tl.arange(0, BLOCK_T)
    rows_x, rows_y = i.to(tl.int64) * BLOCK_T + local, j.to(tl.int64) * BLOCK_T + local
    if not CROSS and (ONE_TILE or i == j):  # a tile with itself is read once
        gram_k = gram_tile(
            a_x, a_x, d, rows_x, rows_x, t_x, t_x, a_xt, a_xd, a_xt, a_xd, sums, True, False,
            A_RESTART, A_MODE, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        gram_h = gram_tile(
            g_x, g_x, p, rows_x, rows_x, t_x, t_x, g_xt, g_xp, g_xt, g_xp, sums, True, SUMS,
            G_RESTART, G_MODE, BLOCK_T, BLOCK_K,
        )  # fmt: skip
    else:
        gram_k = gram_tile(
            a_x, a_y, d, rows_x, rows_y, t_x, t_y, a_xt, a_xd, a_yt, a_yd, sums, False, False,
            A_RESTART, A_MODE, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        gram_h = gram_tile(
            g_x, g_y, p, rows_x, rows_y, t_x, t_y, g_xt, g_xp, g_yt, g_yp, sums, False, False,
            G_RESTART, G_MODE, BLOCK_T, BLOCK_K,
        )  # fmt: skip
    product = gram_k * gram_h
    total, absolute = tl.sum(product), tl.sum(tl.abs(product))
    kk, hh = tl.sum(gram_k * gram_k), tl.sum(gram_h * gram_h)
    diagonal = (local[:, None] == local[None, :]) & (i == j) & (not CROSS)
    trace_k = tl.sum(tl.where(diagonal, gram_k, 0.0))
    trace_h = tl.sum(tl.where(diagonal, gram_h, 0.0))
    return total, absolute, kk, hh, trace_k, trace_h


@triton.jit
def store_pair(at, step, weight, total, absolute, kk, hh, trace_k, trace_h):
    """Stores the six numbers at distance `step`; those off the diagonal are multiplied by `weight`."""
    tl.store(at, weight * total)
    tl.store(at + step, weight * absolute)
    tl.store(at + 2 * step, weight * kk)
    tl.store(at + 3 * step, weight * hh)
    tl.store(at + 4 * step, trace_k)
    tl.store(at + 5 * step, trace_h)


# -------------------------------------------------------------------------------------------------
# How tensor cores multiply, and the resulting rounding margins of norms.


UNIT = 2.0**-24
"""u of float32, the type of all accumulators."""
STEP = 32
"""Terms of an exact float32 product between two additions to its accumulator."""
TILE_SUM = 16
"""Error of one sign, in u, of a tile's own sum: a thread adds up to 64 terms."""
CHUNK = 4096
"""Features after which a tile starts a new sum (vocabularies), to keep its error small."""


def product_mode(x: Tensor, y: Tensor) -> str:
    """Returns how x and y are multiplied: "native" (16-bit tensor cores), "ieee" or "tf32x3".

    tf32 rounds by up to 2^-11. Neither a useful bound nor the margin of the scales (2^-18) covers this.
    If the user allows tf32, three tf32 products that together keep 21 bits replace it.
    """
    if x.dtype == y.dtype and x.dtype != torch.float32:
        return "native"
    return "tf32x3" if by_tf32(x, y) else "ieee"


def by_tf32(x: Tensor, y: Tensor) -> bool:
    """Returns everything that `product_mode` of x, y and themselves depends on, except their types."""
    return torch.float32 in (x.dtype, y.dtype) and user_allows_tf32()


def one_sided(n: int, mode: str) -> tuple[float, float]:
    """Returns (m, w): largest errors of one sign, in u, of an accumulated sum of n products.

    m: for products of one sign, relative to their sum. w: for products that cancel, relative to n and
    to the norms of the factors. A model of the A100 (8 products per step, one guard bit) loses up to
    0.22 n and 0.02 n, of the H100 less; float32 products are rounded, `STEP` at a time.
    """
    if mode == "native":
        return n / 4, 1 / 32
    if mode == "tf32x3":  # 4 products a step, and 2^-21 that no product holds
        return n / 2 + 8, 1 / 16
    return (min(n, STEP) + n / STEP) / 4, 0.0


def summed(t: int) -> float:
    """Returns by how much a clipped sum of t positions of one sign can be too high, in u of its squared
    norm.

    This is for float32 products, which tensor cores truncate. It counts errors beyond half of the margin
    of the scales, which covers up to 3,072 positions.
    """
    room = margin(torch.float32) / UNIT / 2
    return 2 * max(0.0, one_sided(t, "ieee")[0] - room)


@functools.lru_cache(maxsize=1024)
def gram_coefficients(
    t: int, sizes: tuple[int, ...], modes: tuple[frozenset[str], ...]
) -> tuple[float, ...]:
    """Returns the bounds of a product of Grams, in the order of ghost_norm's `raised`.

    Args:
        t: positions. sizes: d and p. modes: in which inputs, and gradients, are multiplied.
    """
    errors = []
    for n, kinds in zip(sizes, modes, strict=True):
        length = min(n, CHUNK)
        m, w = (max(one_sided(length, mode)[k] for mode in kinds) for k in (0, 1))
        errors.append((m + n / CHUNK, w * length))
    (m_k, w_k), (m_h, w_h) = errors
    alike = m_k + m_h + TILE_SUM + summed(t)
    rounding = [UNIT * x for x in (GRAM_ERROR_FACTOR, alike, w_k, w_h)]
    return (*rounding, *(lost_squares(t * n, torch.float32) for n in (*sizes, t)))


# -------------------------------------------------------------------------------------------------
# Squared norms of g_b^T a_b for samples with one position: outer products, without a Gram.
#
# Index letters: b sample, d input feature, p output feature.


_LANES = 1024


@launched
def _one_position_kernel(
    a, g, norms, d, p, factor, lost_a, lost_g, a_b, a_d, g_b, g_p, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    norm_a = ordered_sum(a + b * a_b, d, a_d, BLOCK, True) + lost_a
    norm_g = ordered_sum(g + b * g_b, p, g_p, BLOCK, True) + lost_g
    tl.store(norms + b, norm_a * norm_g * factor)


def one_position_norm(a: Tensor, g: Tensor) -> Tensor:
    """||a_b||^2 ||g_b||^2 for a [b, 1, d] and g [b, 1, p]: the norm of an outer product, [b]."""
    (b, _, d), p = a.shape, g.shape[2]
    norms = torch.empty(b, dtype=torch.float32, device=a.device)
    # Each lane adds its squares in sequence: equal ones are too low by up to a quarter u each.
    factor = 1 + unit_roundoff(norms.dtype) * (d + p) / (4 * _LANES)
    _one_position_kernel[(b,)](
        a, g, norms, d, p, factor, lost_squares(d, a.dtype), lost_squares(p, g.dtype),
        a.stride(0), a.stride(2), g.stride(0), g.stride(2), BLOCK=_LANES,
    )  # fmt: skip
    return norms

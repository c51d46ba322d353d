"""A tile of a Gram, the product of two Grams' tiles, and which tiles a program has."""

from __future__ import annotations

import triton
import triton.language as tl

from fastclip.kernels.products import multiply


@triton.jit
def gram_tile(
    x, y, n, rows_x, rows_y, t_x, t_y, stride_xt, stride_xn, stride_yt, stride_yn, sums,
    SAME: tl.constexpr, SUMS: tl.constexpr, RESTART: tl.constexpr, MODE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x_i y_j^T over n features, [BLOCK_T, BLOCK_T]; `SAME` where x_i is y_j. A sum of more than
    `RESTART` features is begun anew after so many. `SUMS`: features of x_i, summed over its rows."""
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
    are one use, or two (CROSS). SUMS: where the sums of g_x over the rows of tile i go, if i is j."""
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
    """The six numbers `step` apart; those off the diagonal count as often as `weight` says."""
    tl.store(at, weight * total)
    tl.store(at + step, weight * absolute)
    tl.store(at + 2 * step, weight * kk)
    tl.store(at + 3 * step, weight * hh)
    tl.store(at + 4 * step, trace_k)
    tl.store(at + 5 * step, trace_h)

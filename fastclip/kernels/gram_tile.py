"""A tile of a Gram, and which tiles a program has."""

from __future__ import annotations

import triton
import triton.language as tl

from fastclip.kernels.products import multiply


@triton.jit
def gram_tile(  # type: ignore[no-untyped-def]
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
def pair_of(pair):  # type: ignore[no-untyped-def]
    """(i, j), i <= j, of pair = j (j + 1) / 2 + i; the square root may be off by one."""
    j = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    j -= (j * (j + 1) // 2 > pair).to(tl.int32)
    j += ((j + 1) * (j + 2) // 2 <= pair).to(tl.int32)
    return pair - j * (j + 1) // 2, j

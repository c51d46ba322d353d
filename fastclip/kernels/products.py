"""Products of tiles in float32, how they are made, and what rounding of one sign hides of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.runtime import INTERPRETED, runs_on
from fastclip.ops.precision import user_allows_tf32

UNIT = 2.0**-24
"""u of float32, in which everything accumulates."""
STEP = 32
"""Terms of an exact float32 product between two additions to its accumulator."""
TILE_SUM = 16
"""Error of one sign, in u, of a tile's own sum: a thread adds up to 64 terms."""
_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter would multiply bfloat16's bits


def product_mode(x: Tensor, y: Tensor) -> str:
    """How x and y are multiplied: "native" (16-bit tensor cores), "ieee" or "tf32x3".

    tf32 rounds by up to 2^-11, which neither a useful bound nor the slack of the scales (2^-18)
    covers; where the user allows it, three tf32 products that together keep 21 bits take its place.
    """
    if x.dtype == y.dtype and x.dtype != torch.float32:
        return "native"
    with_float32 = torch.float32 in (x.dtype, y.dtype)
    return "tf32x3" if with_float32 and user_allows_tf32() else "ieee"


def takes(*tensors: Tensor) -> bool:
    """Whether these kernels can take [b, t, n] tensors: a block's step must fit in 32 bits."""
    return runs_on(*tensors) and all(max(x.stride()[1:], default=0) < 1 << 24 for x in tensors)


def one_sided(n: int, mode: str) -> tuple[float, float]:
    """(m, w): largest error of one sign, in u, of an accumulated sum of n products.

    m: where the products have one sign, relative to their sum. w: where they cancel, relative to n
    and to the norms of the factors. A model of the A100 (8 products a step, one guard bit) loses up
    to 0.22 n and 0.02 n, of the H100 less; float32 products are rounded, `STEP` at a time.
    """
    if mode == "native":
        return n / 4, 1 / 32
    if mode == "tf32x3":  # 4 products a step, and 2^-21 that no product holds
        return n / 2 + 8, 1 / 16
    return (min(n, STEP) + n / STEP) / 4, 0.0


@triton.jit
def multiply(left, right, acc, MODE: tl.constexpr):  # type: ignore[no-untyped-def]
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
def ordered_sum(x, n, stride, BLOCK: tl.constexpr, SQUARED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of n numbers (of their squares) in fixed order."""
    local = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + local.to(tl.int64)
        value = tl.load(x + at * stride, mask=at < n, other=0.0).to(tl.float32)
        acc += value * value if SQUARED else value
    return tl.sum(acc)

"""Sums of a ghost norm's tiles, and the norm that they give, raised by its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.products import ordered_sum
from fastclip.kernels.rounding import CHUNK, gram_coefficients, product_mode
from fastclip.kernels.runtime import cdiv, launched, next_power_of_2

STATS = 6
"""Sums of KH, |KH|, K^2, H^2; traces of K, H."""


@triton.jit
def raised(
    total, absolute, kk, hh, trace_k, trace_h, c, m, w_k, w_h, lost_k, lost_h, lost
):  # fmt: skip
    """The norm and its bounds (`bounds_of`); NaN stays NaN, which tl.maximum would drop."""
    bound = c * trace_k * trace_h + lost_k * trace_h + lost_h * trace_k + m * absolute
    norm_h = tl.minimum(tl.sqrt_rn(hh + lost), trace_h)  # the trace where the squares overflow
    norm_k = tl.minimum(tl.sqrt_rn(kk + lost), trace_k)
    bound += tl.where(w_k > 0, w_k * trace_k * norm_h, 0.0)
    bound += tl.where(w_h > 0, w_h * trace_h * norm_k, 0.0)
    return tl.where(total < 0, 0.0, total) + bound


@launched(do_not_specialize=["columns", "stats_s", "stats_b"])
def _finish_kernel(
    stats, norms, columns, c, m, w_k, w_h, lost_k, lost_h, lost, stats_s, stats_b,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at = stats + b * stats_b
    norm = raised(
        ordered_sum(at, columns, 1, BLOCK, False),
        ordered_sum(at + stats_s, columns, 1, BLOCK, False),
        ordered_sum(at + 2 * stats_s, columns, 1, BLOCK, False),
        ordered_sum(at + 3 * stats_s, columns, 1, BLOCK, False),
        ordered_sum(at + 4 * stats_s, columns, 1, BLOCK, False),
        ordered_sum(at + 5 * stats_s, columns, 1, BLOCK, False),
        c, m, w_k, w_h, lost_k, lost_h, lost,
    )  # fmt: skip
    tl.store(norms + b, norm)


Use = tuple[Tensor, Tensor]
"""Input a [b, t, d] and output gradient g [b, t, p] of one use of a parameter."""


def pairs_of(x: Use, y: Use, block: int) -> int:
    """Pairs of tiles of `block` positions of two uses, or of one (y is x), whose Grams are symmetric."""
    tiles = cdiv(x[0].shape[1], block)
    return tiles * cdiv(y[0].shape[1], block) if x is not y else tiles * (tiles + 1) // 2


def room_for(x: Use, y: Use) -> int:
    """The most pairs of any usable configuration: up to 64 positions are always one tile."""
    return pairs_of(x, y, 64)


def restart(x: Tensor) -> int:
    """Features after which a sum is begun anew; 0: never."""
    return CHUNK if x.shape[2] > CHUNK else 0


def bounds_of(uses: Sequence[Use]) -> tuple[float, ...]:
    """The bounds' coefficients in the order of `raised`, for the coarsest of the products."""
    t, sizes = sum(a.shape[1] for a, _ in uses), tuple(x.shape[2] for x in uses[0])
    sides = zip(*uses, strict=True)  # inputs, then gradients
    modes = (frozenset(product_mode(x, y) for x in side for y in side) for side in sides)
    return gram_coefficients(t, sizes, tuple(modes))


def finish(stats: Tensor, columns: int, bounds: Sequence[float]) -> Tensor:
    """Squared norms [n] of sums [6, n, >= columns] of pairs of tiles."""
    found = stats.new_empty(stats.shape[1])
    _finish_kernel[(len(found),)](
        stats, found, columns, *bounds, *stats.stride()[:2],
        BLOCK=min(1024, max(32, next_power_of_2(columns))),
    )  # fmt: skip
    return found

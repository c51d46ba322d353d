"""Squared norms of g_b^T a_b by computing it, a tile in registers; stored only on request.

    W_pd = sum_t g_tp a_td,   ||W||^2 = sum_{p,d} W_pd^2

Index letters: b sample, t position, d input feature, p output feature. A program takes one sample
and one tile of W: it loops over t, squares and sums. One number per tile is written (with `keep`, W
too), and a second launch adds them in fixed order (one configuration, one result: `runtime.autotuned`).
With n_p by n_d tiles, a is read n_p times and g n_d times, from L2 after the first. The first row of
tiles reads a once more and the first column g, for the sizes that the bound needs.

The result is never below the exact value: (||W|| (1 + m u) + (1 + t w) u ||A|| ||G||)^2 with
u = 2^-24. 1 u ||A|| ||G|| is the reference's `product_margin`; m and w (`tiles.one_sided`) cover
the accumulators of tensor cores, which truncate.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.core.numerics import PRODUCT_ERROR_FACTOR
from fastclip.ops.triton.runtime import (
    Known,
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    takes,
    work_class,
)
from fastclip.ops.triton.tiles import (
    STEP,
    TILE_SUM,
    UNIT,
    Spills,
    by_tf32,
    multiply,
    one_position_norm,
    one_sided,
    ordered_sum,
    product_configs,
    product_mode,
    stays,
)

_STATS = 3  # sums of squares of W, g, a
_CONFIGS = product_configs(
    (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3), (16, 128, 64, 4, 4), (128, 16, 64, 4, 4),
    (64, 64, STEP, 4, 3), (64, 64, STEP, 8, 3), (128, 64, STEP, 8, 3), (128, 128, STEP, 8, 3),
    (16, 64, STEP, 4, 3), (64, 16, STEP, 4, 3),
)  # fmt: skip
_SPILLS = {("ieee", "ampere"): ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))}


def usable(
    configs: list[Any], named: dict[str, Any], spills: Spills = _SPILLS, **kwargs: Any
) -> list[Any]:
    """Returns configurations whose tile suits a gradient [p, d] and the kind of product. For 16-bit
    operands, one side may be half of what fits."""
    options = {**named, **kwargs}
    mode = options["MODE"]

    def suits(block: dict[str, int]) -> bool:
        sides = ((block["BLOCK_P"], options["p"]), (block["BLOCK_D"], options["d"]))
        fits = (n <= 16 if side == 16 else side <= max(64, 2 * n - 1) for side, n in sides)
        native = block["BLOCK_T"] > STEP
        halves = sum(16 < side < min(128, next_power_of_2(n)) for side, n in sides)
        return all(fits) and native == (mode == "native") and (halves < 2 or not native)

    kept = [c for c in configs if suits(c.kwargs)]
    return [c for c in kept if stays(c, mode, spills, "BLOCK_P", "BLOCK_D")]


@triton.jit
def _squares(
    x, n, t, stride_n, stride_t, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Sum of squares of n features (at most BLOCK_N) over all positions."""
    features, local = tl.arange(0, BLOCK_N).to(tl.int64), tl.arange(0, BLOCK_T).to(tl.int64)
    at = x + local[:, None] * stride_t + features[None, :] * stride_n
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, t, BLOCK_T):
        inside = (local[:, None] < t - start) & (features[None, :] < n)
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        acc += value * value
        at += BLOCK_T * stride_t
    return tl.sum(acc)


@autotuned(_CONFIGS, key=["d", "p", "bucket", "MODE", "KEEP", "work"], prune=usable)
@launched(do_not_specialize=["bucket", "work", "stats_s", "stats_b"])
def _tiles_kernel(
    a, g, stats, grads, d, p, t, bucket, work, a_b, a_t, a_d, g_b, g_t, g_p, stats_s, stats_b,
    KEEP: tl.constexpr, MODE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tiles_d = tl.cdiv(d, BLOCK_D)
    tiles = tl.cdiv(p, BLOCK_P) * tiles_d
    b, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    i, j = tile // tiles_d, tile % tiles_d
    local = tl.arange(0, BLOCK_T).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    left_p, left_d = p - i * BLOCK_P, d - j * BLOCK_D
    g += b * g_b + (i * BLOCK_P).to(tl.int64) * g_p
    a += b * a_b + (j * BLOCK_D).to(tl.int64) * a_d
    g_at = g + rows[:, None].to(tl.int64) * g_p + local[None, :] * g_t
    a_at = a + local[:, None] * a_t + cols[None, :].to(tl.int64) * a_d
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, t, BLOCK_T):
        in_g = (rows[:, None] < left_p) & (local[None, :] < t - start)
        in_a = (local[:, None] < t - start) & (cols[None, :] < left_d)
        g_tile = tl.load(g_at, mask=in_g, other=0.0)
        acc = multiply(g_tile, tl.load(a_at, mask=in_a, other=0.0), acc, MODE)
        g_at += BLOCK_T * g_t
        a_at += BLOCK_T * a_t
    at = stats + b * stats_b
    tl.store(at + tile, tl.sum(acc * acc))
    if KEEP:
        to = grads + (b * p + i * BLOCK_P) * d + j * BLOCK_D
        inside = (rows[:, None] < left_p) & (cols[None, :] < left_d)
        tl.store(to + rows[:, None].to(tl.int64) * d + cols[None, :], acc, mask=inside)
    if j == 0:
        tl.store(at + stats_s + i, _squares(g, left_p, t, g_p, g_t, BLOCK_P, BLOCK_T))
    if i == 0:
        tl.store(at + 2 * stats_s + j, _squares(a, left_d, t, a_d, a_t, BLOCK_D, BLOCK_T))


@launched(do_not_specialize=["stats_s"])
def _finish_kernel(
    stats, norms, tiles_p, tiles_d, factor, margin, stats_s, stats_b, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at = stats + b * stats_b
    norm = tl.sqrt_rn(ordered_sum(at, tiles_p * tiles_d, 1, BLOCK, False))
    size_g = tl.sqrt_rn(ordered_sum(at + stats_s, tiles_p, 1, BLOCK, False))
    size_a = tl.sqrt_rn(ordered_sum(at + 2 * stats_s, tiles_d, 1, BLOCK, False))
    norm = norm * factor + margin * size_a * size_g
    tl.store(norms + b, norm * norm)


def instantiated_norm(a: Tensor, g: Tensor, keep: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Squared norm of g_b^T a_b by computing it: fastclip.ops.instantiated_norm.

    Args:
        a: [b, t, d]. g: [b, t, p]. keep: also return the per-sample gradients [b, p, d], float32.
    """
    same = alike(a, g), by_tf32(a, g), keep
    known = _KNOWN.get(same)
    if known is None and not takes(a, g):
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    if not (b and t and d and p):
        norms = torch.zeros(b, dtype=torch.float32, device=a.device)
        return (norms, norms.new_zeros(b, p, d)) if keep else norms
    if t == 1 and not keep:
        return one_position_norm(a, g)
    norms = torch.empty(b, dtype=torch.float32, device=a.device)
    grads = norms.new_empty(b, p, d) if keep else norms
    stats = norms.new_empty(_STATS, b, cdiv(p, 64) * cdiv(d, 64))
    code = known and _tiles_kernel.repeat(same, a, g, stats, grads)
    if code:
        tiles = cdiv(p, code.constants["BLOCK_P"]), cdiv(d, code.constants["BLOCK_D"])
    else:
        tiles = _launch(a, g, stats, grads, keep, same)
        _KNOWN[same] = True
    finish = same, tiles
    if not _finish_kernel.repeat(finish, stats, norms):
        m, w = one_sided(t, product_mode(a, g))
        _finish_kernel[(b,)](
            stats, norms, *tiles, 1 + UNIT * (m + TILE_SUM / 2),
            UNIT * (PRODUCT_ERROR_FACTOR + t * w), *stats.stride()[:2],
            BLOCK=min(1024, max(32, next_power_of_2(tiles[0] * tiles[1]))), same=finish,
        )  # fmt: skip
    return (norms, grads) if keep else norms


_KNOWN: Known[bool] = Known()
"""Whether kernels take operands of a kind."""


def _launch(
    a: Tensor, g: Tensor, stats: Tensor, grads: Tensor, keep: bool, same: Hashable
) -> tuple[int, int]:
    """Launches, and returns the numbers of tiles of p and d; `repeat` finds the launch by `same`."""
    (b, t, d), p = a.shape, g.shape[2]
    tiles = 0, 0

    def grid(meta: dict[str, Any]) -> tuple[int]:
        nonlocal tiles
        tiles = cdiv(p, meta["BLOCK_P"]), cdiv(d, meta["BLOCK_D"])
        return (b * tiles[0] * tiles[1],)

    _tiles_kernel[grid](
        a, g, stats, grads, d, p, t, next_power_of_2(t), work_class(b * stats.shape[2]),
        *a.stride(), *g.stride(), *stats.stride()[:2], KEEP=keep, MODE=product_mode(a, g),
        same=same,
    )  # fmt: skip
    return tiles

"""Squared norms of linear layers from Gram matrices: of one use, of several, of several layers.

For several uses the Grams are those of their concatenation along t: the uses' own terms, and twice their
cross terms. A program takes one sample and one pair of tiles, as in ghost_norms, which also explains the
bounds. Each pair of uses is a launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    CHUNK,
    STEP,
    aligned,
    by_tf32,
    generation,
    gram_coefficients,
    gram_pair,
    layers_of,
    one_of,
    one_position_norm,
    ordered_sum,
    pair_of,
    product_mode,
    store_pair,
    stretches,
    to_copy,
)

# -------------------------------------------------------------------------------------------------
# Sums of a ghost norm's tiles, and the norm that they give, raised by its bounds.


STATS = 6
"""Sums of KH, |KH|, K^2, H^2; traces of K, H."""


@triton.jit
def raised(
    total, absolute, kk, hh, trace_k, trace_h, c, m, w_k, w_h, lost_k, lost_h, lost
):  # fmt: skip
    """The norm and its bounds (`bounds_of`); NaN stays NaN, which tl.maximum would drop."""
    bound = c * trace_k * trace_h + lost_k * trace_h + lost_h * trace_k + m * absolute
    norm_h = tl.minimum(tl.sqrt_rn(hh + lost), trace_h)  # the trace if the squares overflow
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
    """Counts pairs of tiles of `block` positions of two uses, or of one (y is x, symmetric Grams)."""
    tiles = cdiv(x[0].shape[1], block)
    return tiles * cdiv(y[0].shape[1], block) if x is not y else tiles * (tiles + 1) // 2


def room_for(x: Use, y: Use) -> int:
    """Returns the maximal pairs of any usable configuration: up to 64 positions are one tile."""
    return pairs_of(x, y, 64)


def restart(x: Tensor) -> int:
    """Returns the features after which a new sum begins; 0: never."""
    return CHUNK if x.shape[2] > CHUNK else 0


def bounds_of(uses: Sequence[Use]) -> tuple[float, ...]:
    """Returns the bounds' coefficients in the order of `raised`, for the coarsest of the products."""
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


# -------------------------------------------------------------------------------------------------
# Tiles of ghost norms that are tried.


LONGEST = 128
"""Positions of the longest tile."""


def usable(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Returns configurations whose tile suits positions and kinds of product, and stays in registers
    (bench.kernels.static). Wide tiles that begin new sums, or sum g for a bias, need more."""
    options = {**named, **kwargs}
    bucket, modes = options["bucket"], (options["A_MODE"], options["G_MODE"])
    sizes = (max(16, bucket),) if bucket <= 64 else (64, LONGEST)
    long, exact = options["A_RESTART"] or options["G_RESTART"], "ieee" in modes
    sums, ampere = options.get("SUMS", False), generation() == "ampere"
    if ampere and bucket > 64 and sum(map(bool, (sums, long, bucket > LONGEST))) > 1:
        sizes = (64,)
    warps = 8 if long and bucket > 64 and ampere else 4

    def fits(c: Any) -> bool:
        native, block_t = c.kwargs["BLOCK_K"] > STEP, c.kwargs["BLOCK_T"]
        if native or block_t < 64:
            spread = block_t != 64 or c.num_warps == warps
            return native == (modes == ("native", "native")) and spread
        if exact:
            if sums:
                return c.num_warps == 8 and (c.num_stages == 1) == bool(long)
            return c.num_warps == 4 and (c.num_stages == 1 or not (long or bucket <= 64))
        return "tf32x3" in modes and c.num_stages > 1 and (c.num_warps == 8 or not long)

    return [c for c in configs if c.kwargs["BLOCK_T"] in sizes and fits(c)]


CONFIGS = [
    triton.Config({"BLOCK_T": block_t, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
    for block_t, block_k, warps, stages in (
        (128, 64, 8, 3), (64, 64, 4, 4), (64, 64, 8, 3),
        (32, 128, 4, 4), (16, 128, 2, 4),
        (64, STEP, 4, 3), (64, STEP, 8, 3), (64, STEP, 4, 1), (64, STEP, 8, 1), (32, STEP, 4, 3),
        (16, STEP, 2, 3),
    )
]  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Squared norms of several linear layers of one kind in one launch; ghost_norm is that of one.
#
#     ||g_b^T a_b||^2 = sum_{t,s} K_ts H_ts,    K = a_b a_b^T, H = g_b g_b^T
#
# Index letters: b sample, t and s position, d input feature, p output feature. A program takes one
# sample of one layer and one pair (i <= j) of tiles of positions: both Gram tiles in registers
# (loops over d, then over p), their product summed, pairs off the diagonal counted twice. Nothing
# of size t x t is written. Six sums per pair are written, which a second launch adds in fixed order
# (one configuration, one result: `runtime.autotuned`). If one tile holds every position there is no
# second launch. With n tiles of positions a and g are read n times, from L2 after the first. The
# same read gives the sums of g over a tile's positions, for the gradients of a bias.
#
# One grid for all layers: a launch costs the host as much as a small layer's norm costs the device.
# The layers' addresses are arguments, as in scaled_sums.
#
# The result is never below the exact value. With u = 2^-24 and m, w of `tiles.one_sided` it adds:
# - 2 u ||A||^2 ||G||^2 and what underflow hides, as the reference does: independent errors;
# - m u sum |K_ts H_ts|: errors of one sign. Tensor cores truncate their float32 accumulator (Fasi
#   et al. 2021, Khattak and Mikaitis 2025). Equal terms round alike wherever they are added, also in
#   the clipped sum, which is then too high (`tiles.summed`);
# - w u (d ||A||^2 ||H||_F + p ||G||^2 ||K||_F): truncation inside an entry whose terms cancel (d
#   and p at most `CHUNK`).


_KNOWN: Known[tuple[tuple[float, ...], int]] = Known()
"""For groups of a kind with suitable layout: the bounds, and the room for their sums."""
_SMALLEST = 64
"""Positions that are always one tile."""


@autotuned(CONFIGS, key=["d", "p", "bucket", "A_MODE", "G_MODE", "SUMS", "work"], prune=usable)
@launched(do_not_specialize=["b", "bucket", "work", "stats_s", "stats_b"])
def _norms_kernel(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
    g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11,
    stats, norms, sums, d, p, t, b, c, m, w_k, w_h, lost_k, lost_h, lost, bucket, work,
    a_b, a_t, a_d, g_b, g_t, g_p, stats_s, stats_b,
    SUMS: tl.constexpr, A_MODE: tl.constexpr, G_MODE: tl.constexpr, A_RESTART: tl.constexpr,
    G_RESTART: tl.constexpr, LENGTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one pair of tiles, or the norm itself for one tile; LENGTH: positions as a power of
    two, or one number for more than any tile."""
    ONE_TILE: tl.constexpr = LENGTH <= BLOCK_T
    tiles = tl.cdiv(t, BLOCK_T)
    pairs = tiles * (tiles + 1) // 2
    pair, row = tl.program_id(0) % pairs, tl.program_id(0) // pairs
    i, j = pair_of(pair)
    layer, sample = row // b, (row % b).to(tl.int64)
    row = row.to(tl.int64)
    a = one_of(layer, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11) + sample * a_b
    g = one_of(layer, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11) + sample * g_b
    total, absolute, kk, hh, trace_k, trace_h = gram_pair(
        a, g, a, g, sums + (row * tl.cdiv(t, 64) + i) * p, d, p, i, j, t, t,
        a_t, a_d, g_t, g_p, a_t, a_d, g_t, g_p,
        False, ONE_TILE, SUMS, A_MODE, G_MODE, A_RESTART, G_RESTART, BLOCK_T, BLOCK_K,
    )  # fmt: skip
    if ONE_TILE:
        norm = raised(
            total, absolute, kk, hh, trace_k, trace_h, c, m, w_k, w_h, lost_k, lost_h, lost
        )  # fmt: skip
        tl.store(norms + row, norm)
    else:
        at, weight = stats + row * stats_b + pair, tl.where(i == j, 1.0, 2.0)
        store_pair(at, stats_s, weight, total, absolute, kk, hh, trace_k, trace_h)


def ghost_norms(pairs: Sequence[Use], biases: bool) -> tuple[Tensor, Tensor | None]:
    """Of layers of one kind, [l, b], and sums of their g, [l, b, p]: fastclip.ops.ghost_norms."""
    layers, use = len(pairs), pairs[0]
    a, g = use
    operands, same = layers_of(pairs), (alike(a, g), by_tf32(a, g), layers, biases)
    known = _KNOWN.get(same)
    if operands is None or (known is None and not _lie_well(a, g)):
        return NotImplemented
    bounds, room = known or (bounds_of([use]), room_for(use, use))
    (b, t, _), p = a.shape, g.shape[2]
    rows = layers * b
    norms = torch.empty(rows, dtype=torch.float32, device=a.device)
    # A launch begins where the configuration of the previous one ended: entries that a trial of smaller
    # tiles wrote lie beyond the columns that are added.
    stats = norms.new_empty(STATS, rows, room)
    sums = norms.new_empty(rows, cdiv(t, _SMALLEST), p) if biases else norms
    code = known and _norms_kernel.repeat(same, *operands, stats, norms, sums)
    if code:
        count = pairs_of(use, use, code.constants["BLOCK_T"])
    else:
        count = _launch_group(use, operands, stats, norms, sums, layers, biases, bounds, same)
        _KNOWN[same] = bounds, room
    if count > 1:
        norms = finish(stats, count, bounds)
    if not biases:
        return norms.view(layers, b), None
    tiles = (isqrt(8 * count + 1) - 1) // 2
    bias = sums[:, 0] if tiles == 1 else sums[:, :tiles].sum(1)
    return norms.view(layers, b), bias.view(layers, b, p)


def _launch_group(
    use: Use, operands: Sequence[Tensor], stats: Tensor, norms: Tensor, sums: Tensor, layers: int,
    biases: bool, bounds: Sequence[float], same: Hashable,
) -> int:  # fmt: skip
    """Launches, and returns the number of pairs of tiles; `repeat` finds the launch by `same`."""
    a, g = use
    (b, t, d), p = a.shape, g.shape[2]
    bucket, pairs = next_power_of_2(t), 0

    def grid(meta: dict[str, Any]) -> tuple[int]:
        nonlocal pairs
        pairs = pairs_of(use, use, meta["BLOCK_T"])
        return (layers * b * pairs,)

    _norms_kernel[grid](
        *operands, stats, norms, sums, d, p, t, b, *bounds,
        bucket, work_class(layers * b * stats.shape[2]), *a.stride(), *g.stride(),
        *stats.stride()[:2], SUMS=biases, LENGTH=min(bucket, 2 * LONGEST),
        A_MODE=product_mode(a, a), G_MODE=product_mode(g, g),
        A_RESTART=restart(a), G_RESTART=restart(g), same=same,
    )  # fmt: skip
    return pairs


def _lie_well(a: Tensor, g: Tensor) -> bool:
    """Whether a launch takes them without a copy, for several positions per sample."""
    if not takes(a, g) or a.shape[1] < 2 or not a.numel() or not g.numel():
        return False
    return not any(to_copy(x, cdiv(a.shape[1], _SMALLEST)) for x in (a, g))


# -------------------------------------------------------------------------------------------------


_MOST_USES = 4


@autotuned(CONFIGS, key=["d", "p", "bucket", "A_MODE", "G_MODE", "work"], prune=usable)
@launched(do_not_specialize=["bucket", "work", "stats_s", "stats_b"])
def _pairs_kernel(
    a_x, g_x, a_y, g_y, stats, d, p, t_x, t_y, bucket, work,
    a_xb, a_xt, a_xd, g_xb, g_xt, g_xp, a_yb, a_yt, a_yd, g_yb, g_yt, g_yp, stats_s, stats_b,
    CROSS: tl.constexpr, A_MODE: tl.constexpr, G_MODE: tl.constexpr, A_RESTART: tl.constexpr,
    G_RESTART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one pair of tiles."""
    tiles, tiles_y = tl.cdiv(t_x, BLOCK_T), tl.cdiv(t_y, BLOCK_T)
    pairs = tiles * tiles_y if CROSS else tiles * (tiles + 1) // 2
    pair = tl.program_id(0) % pairs
    if CROSS:
        i, j = pair // tiles_y, pair % tiles_y
    else:
        i, j = pair_of(pair)
    b = (tl.program_id(0) // pairs).to(tl.int64)
    total, absolute, kk, hh, trace_k, trace_h = gram_pair(
        a_x + b * a_xb, g_x + b * g_xb, a_y + b * a_yb, g_y + b * g_yb, stats, d, p, i, j, t_x, t_y,
        a_xt, a_xd, g_xt, g_xp, a_yt, a_yd, g_yt, g_yp,
        CROSS, False, False, A_MODE, G_MODE, A_RESTART, G_RESTART, BLOCK_T, BLOCK_K,
    )  # fmt: skip
    weight = 2.0 if CROSS else tl.where(i == j, 1.0, 2.0)
    store_pair(
        stats + b * stats_b + pair, stats_s, weight, total, absolute, kk, hh, trace_k, trace_h
    )


def _launch(x: Use, y: Use, stats: Tensor) -> int:
    """Writes sums of every pair of tiles of two uses, or of one (y is x), and returns their number.

    Args:
        stats: [6, b, >= room_for(x, y)].
    """
    (a_x, g_x), (a_y, g_y) = x, y
    t_x, t_y, pairs = a_x.shape[1], a_y.shape[1], 0

    def grid(meta: dict[str, Any]) -> tuple[int]:
        nonlocal pairs
        pairs = pairs_of(x, y, meta["BLOCK_T"])
        return (a_x.shape[0] * pairs,)

    _pairs_kernel[grid](
        a_x, g_x, a_y, g_y, stats, a_x.shape[2], g_x.shape[2], t_x, t_y,
        next_power_of_2(max(t_x, t_y)), work_class(len(a_x) * room_for(x, y)), *a_x.stride(),
        *g_x.stride(), *a_y.stride(), *g_y.stride(), *stats.stride()[:2],
        CROSS=x is not y, A_MODE=product_mode(a_x, a_y), G_MODE=product_mode(g_x, g_y),
        A_RESTART=restart(a_x), G_RESTART=restart(g_x),
    )  # fmt: skip
    return pairs


def _pair_norms(uses: Sequence[Use]) -> Tensor:
    """Returns norms of non-empty uses with suitable layout, with one bound for all: uses may cancel."""
    if len(uses) == 1:
        return ghost_norms(uses, False)[0][0]
    pairs = [(x, y) for k, x in enumerate(uses) for y in uses[k:]]
    # A launch begins where the configuration of the previous one ended: entries that a trial of
    # smaller tiles wrote are overwritten, or lie beyond the columns that are added.
    first, columns = uses[0][0], 0
    stats = torch.empty(
        STATS, len(first), sum(room_for(x, y) for x, y in pairs), dtype=torch.float32,
        device=first.device,
    )  # fmt: skip
    for x, y in pairs:
        columns += _launch(x, y, stats[:, :, columns:])
    return finish(stats, columns, bounds_of(uses))


def ghost_norm_concat(parts: Sequence[Use]) -> Tensor:
    """Returns squared norms of sum_k g_k^T a_k over the uses of one parameter, [b].

    Nothing is copied, unless there are many uses, or their layout does not suit (`aligned`).

    Args:
        parts: the uses; t may differ from use to use.
    """
    sizes_of = {(a.shape[2], g.shape[2]) for a, g in parts}
    if len(sizes_of) > 1 or not takes(*(x for use in parts for x in use)):
        return NotImplemented
    b, _, d = parts[0][0].shape
    uses = [use for use in parts if use[0].shape[1]]
    if not (b and d and parts[0][1].shape[2] and uses):
        return torch.zeros(b, dtype=torch.float32, device=parts[0][0].device)
    if len(uses) == 1 and uses[0][0].shape[1] == 1:
        return one_position_norm(*uses[0])
    if len(uses) > _MOST_USES:
        uses = [(torch.cat([a for a, _ in uses], 1), torch.cat([g for _, g in uses], 1))]
    reads = cdiv(max(a.shape[1] for a, _ in uses), 64)
    sizes = [max(to_copy(x, reads) for x in side) for side in zip(*uses, strict=True)]
    if not any(sizes):
        return _pair_norms(uses)

    def ready(x: Tensor, size: int, samples: slice) -> Tensor:
        return aligned(x[samples]) if size else x[samples]  # for all uses, or their n would differ

    return torch.cat([
        _pair_norms([(ready(a, sizes[0], part), ready(g, sizes[1], part)) for a, g in uses])
        for part in stretches(b, sum(sizes) * len(uses))
    ])  # fmt: skip


def ghost_norm(a: Tensor, g: Tensor) -> Tensor:
    """Squared norm of g_b^T a_b through the Grams: fastclip.ops.ghost_norm."""
    return ghost_norm_concat([(a, g)])


def ghost_cross(a1: Tensor, g1: Tensor, a2: Tensor, g2: Tensor) -> Tensor:
    """Returns <g1_b^T a1_b, g2_b^T a2_b>, the cross term of two uses of one parameter, [b].

    It has a sign and no bound: `ghost_norm_concat` is the norm. a1 [b, t, d], g1 [b, t, p],
    a2 [b, s, d], g2 [b, s, p].
    """
    if not takes(a1, g1, a2, g2):
        return NotImplemented
    norms = torch.zeros(a1.shape[0], dtype=torch.float32, device=a1.device)
    if not (a1.numel() and g1.numel() and a2.numel() and g2.numel()):
        return norms
    x, y = (a1, g1), (a2, g2)
    stats = norms.new_empty(STATS, a1.shape[0], room_for(x, y))
    pairs = _launch(x, y, stats)
    return stats[0, :, :pairs].sum(1) / 2

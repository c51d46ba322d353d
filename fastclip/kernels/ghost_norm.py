"""Squared norms of g_b^T a_b through the Grams K = a_b a_b^T, H = g_b g_b^T, in symmetric tiles.

    ||g_b^T a_b||^2 = sum_{t,s} K_ts H_ts

Index letters: b sample, t and s position, d input feature, p output feature. A program takes one
sample and one pair (i <= j) of tiles of positions: both Gram tiles in registers (loops over d, then
over p), their product summed, pairs off the diagonal counted twice. Nothing of size t x t is
written: six sums a pair, which a second launch adds in fixed order (one configuration, one
result: `runtime.autotuned`); where one tile holds every position there is no second launch. With n
tiles of positions a and g are read n times, from L2 after the first.

The result is never below the exact value. Added are, with u = 2^-24 and m, w of
`rounding.one_sided`:
- 2 u ||A||^2 ||G||^2 and what underflow hides, as the reference does: independent errors;
- m u sum |K_ts H_ts|: errors of one sign. Tensor cores truncate their float32 accumulator (Fasi et
  al. 2021, Khattak and Mikaitis 2025), and equal terms round alike wherever they are added, those of
  the clipped sum too, which then comes out high (`rounding.summed`);
- w u (d ||A||^2 ||H||_F + p ||G||^2 ||K||_F): truncation inside an entry whose terms cancel (d
  and p at most `CHUNK`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isqrt
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.alignment import aligned, stretches, to_copy
from fastclip.kernels.ghost_configs import CONFIGS, LONGEST, usable
from fastclip.kernels.ghost_sums import STATS, GhostSums, finish, raised, room_for
from fastclip.kernels.gram_tile import gram_tile, pair_of
from fastclip.kernels.one_position import one_position_norm
from fastclip.kernels.rounding import CHUNK, by_tf32, gram_coefficients, product_mode
from fastclip.kernels.runtime import alike, autotuned, cdiv, launched, next_power_of_2, takes
from fastclip.kernels.work import work_class
from fastclip.ops.numerics import wide_sum

_MOST_USES = 4
_MOST_KNOWN = 4096


@autotuned(CONFIGS, key=["d", "p", "bucket", "A_MODE", "G_MODE", "work"], prune=usable)
@launched(do_not_specialize=["bucket", "work", "stats_s", "stats_b"])
def _pairs_kernel(  # type: ignore[no-untyped-def]
    a_x, g_x, a_y, g_y, stats, norms, sums, d, p, t_x, t_y, c, m, w_k, w_h, lost_k, lost_h, lost,
    bucket, work,
    a_xb, a_xt, a_xd, g_xb, g_xt, g_xp, a_yb, a_yt, a_yd, g_yb, g_yt, g_yp, stats_s, stats_b,
    CROSS: tl.constexpr, ALONE: tl.constexpr, SUMS: tl.constexpr, A_MODE: tl.constexpr,
    G_MODE: tl.constexpr, A_RESTART: tl.constexpr, G_RESTART: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one pair of tiles, or the norm itself where a lone use has one tile; LENGTH: positions
    as a power of two, those of more than any tile as one number."""
    ONE_TILE: tl.constexpr = LENGTH <= BLOCK_T
    tiles, tiles_y = tl.cdiv(t_x, BLOCK_T), tl.cdiv(t_y, BLOCK_T)
    pairs = tiles * tiles_y if CROSS else tiles * (tiles + 1) // 2
    pair = tl.program_id(0) % pairs
    if CROSS:
        i, j = pair // tiles_y, pair % tiles_y
    else:
        i, j = pair_of(pair)
    b = (tl.program_id(0) // pairs).to(tl.int64)
    a_x, g_x, a_y, g_y = a_x + b * a_xb, g_x + b * g_xb, a_y + b * a_yb, g_y + b * g_yb
    local = tl.arange(0, BLOCK_T)
    rows_x, rows_y = i.to(tl.int64) * BLOCK_T + local, j.to(tl.int64) * BLOCK_T + local
    if not CROSS and (ONE_TILE or i == j):  # a tile with itself is read once
        gram_k = gram_tile(
            a_x, a_x, d, rows_x, rows_x, t_x, t_x, a_xt, a_xd, a_xt, a_xd, sums, True, False,
            A_RESTART, A_MODE, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        gram_h = gram_tile(
            g_x, g_x, p, rows_x, rows_x, t_x, t_x, g_xt, g_xp, g_xt, g_xp,
            sums + (b * tl.cdiv(t_x, 64) + i) * p, True, SUMS, G_RESTART, G_MODE, BLOCK_T, BLOCK_K,
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
    if ALONE and ONE_TILE:
        norm = raised(
            total, absolute, kk, hh, trace_k, trace_h, c, m, w_k, w_h, lost_k, lost_h, lost
        )  # fmt: skip
        tl.store(norms + b, norm)
    else:
        twice = 2.0 if CROSS else tl.where(i == j, 1.0, 2.0)
        at = stats + b * stats_b + pair
        tl.store(at, twice * total)
        tl.store(at + stats_s, twice * absolute)
        tl.store(at + 2 * stats_s, twice * kk)
        tl.store(at + 3 * stats_s, twice * hh)
        tl.store(at + 4 * stats_s, trace_k)
        tl.store(at + 5 * stats_s, trace_h)


Use = tuple[Tensor, Tensor]
"""Input a [b, t, d] and output gradient g [b, t, p] of one use of a parameter."""


def _pairs(x: Use, y: Use, block: int) -> int:
    tiles = cdiv(x[0].shape[1], block)
    return tiles * cdiv(y[0].shape[1], block) if x is not y else tiles * (tiles + 1) // 2


def _room(x: Use, y: Use) -> int:
    """The most pairs of any usable configuration: up to 64 positions are always one tile."""
    return _pairs(x, y, 64)


def _restart(x: Tensor) -> int:
    return CHUNK if x.shape[2] > CHUNK else 0


def _launch(
    x: Use, y: Use, stats: Tensor, norms: Tensor, bounds: Sequence[float], alone: bool,
    same: Hashable = None, sums: Tensor | None = None,
) -> int:  # fmt: skip
    """Sums of every pair of tiles of two uses, or of one (y is x); the number of pairs.

    Args:
        stats: [6, b, >= _room(x, y)]. norms: [b], filled where a lone use has one pair.
        bounds: of `_bounds`. same: under which the launch can be repeated.
        sums: [b, >= tiles of 64 positions, p], of every tile of g, or None.
    """
    (a_x, g_x), (a_y, g_y) = x, y
    t_x, t_y, pairs = a_x.shape[1], a_y.shape[1], 0
    bucket = next_power_of_2(max(t_x, t_y))

    def grid(meta: dict[str, Any]) -> tuple[int]:
        nonlocal pairs
        pairs = _pairs(x, y, meta["BLOCK_T"])
        return (a_x.shape[0] * pairs,)

    _pairs_kernel[grid](
        a_x, g_x, a_y, g_y, stats, norms, norms if sums is None else sums, a_x.shape[2],
        g_x.shape[2], t_x, t_y, *bounds,
        bucket, work_class(len(a_x) * _room(x, y)), *a_x.stride(), *g_x.stride(), *a_y.stride(),
        *g_y.stride(), *stats.stride()[:2],
        CROSS=x is not y, ALONE=alone, SUMS=sums is not None, LENGTH=min(bucket, 2 * LONGEST),
        A_MODE=product_mode(a_x, a_y), G_MODE=product_mode(g_x, g_y),
        A_RESTART=_restart(a_x), G_RESTART=_restart(g_x), same=same,
    )  # fmt: skip
    return pairs


def _bounds(uses: Sequence[Use]) -> tuple[float, ...]:
    """The bounds' coefficients in the order of `ghost_sums.raised`, for the coarsest of the products."""
    t, sizes = sum(a.shape[1] for a, _ in uses), tuple(x.shape[2] for x in uses[0])
    sides = zip(*uses, strict=True)  # inputs, then gradients
    modes = (frozenset(product_mode(x, y) for x in side for y in side) for side in sides)
    return gram_coefficients(t, sizes, tuple(modes))


def _sums(parts: Sequence[Use], same: Hashable = None) -> GhostSums | Tensor:
    """What `ghost_norm_concat` is made of, or the norm [b] itself.

    The Grams of the concatenation along t: the uses' own terms, and twice their cross terms, with
    one bound for all (uses may cancel). Each pair of uses is a launch; nothing is copied, unless
    there are many, or they lie badly (`alignment`).

    Args:
        parts: the uses; t may differ from use to use. same: the kind of a lone one.
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
        return _pair_sums(uses, same)

    def ready(x: Tensor, size: int, samples: slice) -> Tensor:
        return aligned(x[samples]) if size else x[samples]  # of all uses, or their n would differ

    return torch.cat([
        finish(_pair_sums([(ready(a, sizes[0], part), ready(g, sizes[1], part)) for a, g in uses]))
        for part in stretches(b, sum(sizes) * len(uses))
    ])  # fmt: skip


def _pair_sums(uses: Sequence[Use], same: Hashable = None) -> GhostSums | Tensor:
    """`_sums` of uses that lie well, none of them empty."""
    pairs = [(x, y) for k, x in enumerate(uses) for y in uses[k:]]
    alone, bounds = len(uses) == 1, _bounds(uses)
    # A launch begins where the configuration of the one before it ended: what a trial of smaller
    # tiles wrote beyond is written over, or lies beyond the columns that are added.
    room, columns = sum(_room(x, y) for x, y in pairs), 0
    stats, norms = room_for(uses[0][0], room)
    for x, y in pairs:
        columns += _launch(x, y, stats[:, :, columns:], norms, bounds, alone, same)
    if same is not None:
        _note(same, bounds, room)
    return norms if alone and columns == 1 else GhostSums(stats, columns, bounds)


def _note(same: Hashable, bounds: tuple[float, ...], room: int) -> None:
    if len(_BOUNDS) >= _MOST_KNOWN:
        _BOUNDS.clear()
    _BOUNDS[same] = bounds, room


_BOUNDS: dict[Hashable, tuple[tuple[float, ...], int]] = {}
"""Of lone uses of a kind, if their operands lie well; and the room for their sums."""


def begin_ghost_norm(a: Tensor, g: Tensor) -> GhostSums | Tensor:
    """The squared norm of g_b^T a_b, but for the sum of its tiles: fastclip.ops.begin_ghost_norm."""
    same, use = (alike(a, g), by_tf32(a, g)), (a, g)
    known = _BOUNDS.get(same)
    if known is None:
        return _sums([use], same)
    stats, norms = room_for(a, known[1])
    code = _pairs_kernel.repeat(same, a, g, a, g, stats, norms, norms)
    if code is None:
        return _sums([use], same)
    pairs = _pairs(use, use, code.constants["BLOCK_T"])  # another configuration, another number
    return norms if pairs == 1 else GhostSums(stats, pairs, known[0])


def begin_norm_and_bias(a: Tensor, g: Tensor) -> tuple[GhostSums | Tensor, Tensor]:
    """begin_ghost_norm, and sum_t g, of which the diagonal tiles have read all: [b, p], float32."""
    same, use = (alike(a, g), by_tf32(a, g), "bias"), (a, g)
    known = _BOUNDS.get(same)
    if known is None and not _lie_well(a, g):
        norm = begin_ghost_norm(a, g)
        return NotImplemented if norm is NotImplemented else (norm, wide_sum(g, 1))
    bounds, room = known or (_bounds([use]), _room(use, use))
    stats, norms = room_for(a, room)
    sums = norms.new_empty(len(a), cdiv(a.shape[1], 64), g.shape[2])
    code = known and _pairs_kernel.repeat(same, a, g, a, g, stats, norms, sums)
    if code:
        pairs = _pairs(use, use, code.constants["BLOCK_T"])
    else:
        pairs = _launch(use, use, stats, norms, bounds, True, same, sums)
        _note(same, bounds, room)
    tiles = (isqrt(8 * pairs + 1) - 1) // 2
    bias = sums[:, 0] if tiles == 1 else sums[:, :tiles].sum(1)
    return norms if pairs == 1 else GhostSums(stats, pairs, bounds), bias


def _lie_well(a: Tensor, g: Tensor) -> bool:
    """Whether one launch takes them as they are, for several positions of a sample."""
    if not takes(a, g) or a.shape[1] < 2 or not a.numel() or not g.numel():
        return False
    return not any(to_copy(x, cdiv(a.shape[1], 64)) for x in (a, g))


def ghost_norm_concat(parts: Sequence[Use]) -> Tensor:
    """Squared norm of sum_k g_k^T a_k over the uses of one parameter, [b].

    Args:
        parts: the uses; t may differ from use to use.
    """
    return finish(_sums(parts))


def ghost_norm(a: Tensor, g: Tensor) -> Tensor:
    """Squared norm of g_b^T a_b through the Grams: fastclip.ops.ghost_norm."""
    return ghost_norm_concat([(a, g)])


def ghost_cross(a1: Tensor, g1: Tensor, a2: Tensor, g2: Tensor) -> Tensor:
    """<g1_b^T a1_b, g2_b^T a2_b>, the cross term of two uses of one parameter, [b].

    It has a sign and no bound: `ghost_norm_concat` is the norm. a1 [b, t, d], g1 [b, t, p],
    a2 [b, s, d], g2 [b, s, p].
    """
    if not takes(a1, g1, a2, g2):
        return NotImplemented
    norms = torch.zeros(a1.shape[0], dtype=torch.float32, device=a1.device)
    if not (a1.numel() and g1.numel() and a2.numel() and g2.numel()):
        return norms
    x, y = (a1, g1), (a2, g2)
    stats = norms.new_empty(STATS, a1.shape[0], _room(x, y))
    pairs = _launch(x, y, stats, norms, [0.0] * 7, alone=False)
    return stats[0, :, :pairs].sum(1) / 2

"""Squared norms of several linear layers of one kind in one launch; ghost_norm is that of one.

    ||g_b^T a_b||^2 = sum_{t,s} K_ts H_ts,    K = a_b a_b^T, H = g_b g_b^T

Index letters: b sample, t and s position, d input feature, p output feature. A program takes one
sample of one layer and one pair (i <= j) of tiles of positions: both Gram tiles in registers (loops
over d, then over p), their product summed, pairs off the diagonal counted twice. Nothing of size t x t
is written: six sums a pair, which a second launch adds in fixed order (one configuration, one result:
`runtime.autotuned`); where one tile holds every position there is no second launch. With n tiles of
positions a and g are read n times, from L2 after the first. The sums of g over a tile's positions, of
which a bias's gradients are made, come of the same read.

One grid for all layers: a launch costs the host as much as a small layer's norm costs the device. The
layers' addresses are arguments, as in scaled_sums.

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

from fastclip.kernels.alignment import to_copy
from fastclip.kernels.ghost_configs import CONFIGS, LONGEST, usable
from fastclip.kernels.ghost_sums import (
    STATS,
    Use,
    bounds_of,
    finish,
    pairs_of,
    raised,
    restart,
    room_for,
)
from fastclip.kernels.gram_tile import gram_pair, pair_of, store_pair
from fastclip.kernels.known import Known
from fastclip.kernels.products import layers_of, one_of
from fastclip.kernels.rounding import by_tf32, product_mode
from fastclip.kernels.runtime import alike, autotuned, cdiv, launched, next_power_of_2, takes
from fastclip.kernels.work import work_class

_KNOWN: Known[tuple[tuple[float, ...], int]] = Known()
"""Of groups of a kind, if their operands lie well: the bounds, and the room for their sums."""
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
    """The sums of one pair of tiles, or the norm itself where there is one tile; LENGTH: positions as a
    power of two, those of more than any tile as one number."""
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
    # A launch begins where the configuration of the one before it ended: what a trial of smaller tiles
    # wrote beyond lies beyond the columns that are added.
    stats = norms.new_empty(STATS, rows, room)
    sums = norms.new_empty(rows, cdiv(t, _SMALLEST), p) if biases else norms
    code = known and _norms_kernel.repeat(same, *operands, stats, norms, sums)
    if code:
        count = pairs_of(use, use, code.constants["BLOCK_T"])
    else:
        count = _launch(use, operands, stats, norms, sums, layers, biases, bounds, same)
        _KNOWN[same] = bounds, room
    if count > 1:
        norms = finish(stats, count, bounds)
    if not biases:
        return norms.view(layers, b), None
    tiles = (isqrt(8 * count + 1) - 1) // 2
    bias = sums[:, 0] if tiles == 1 else sums[:, :tiles].sum(1)
    return norms.view(layers, b), bias.view(layers, b, p)


def _launch(
    use: Use, operands: Sequence[Tensor], stats: Tensor, norms: Tensor, sums: Tensor, layers: int,
    biases: bool, bounds: Sequence[float], same: Hashable,
) -> int:  # fmt: skip
    """The number of pairs of tiles; `repeat` finds the launch by `same`."""
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
    """Whether a launch takes them as they are, for several positions of a sample."""
    if not takes(a, g) or a.shape[1] < 2 or not a.numel() or not g.numel():
        return False
    return not any(to_copy(x, cdiv(a.shape[1], _SMALLEST)) for x in (a, g))

"""Squared norms of one linear layer, of one use or of several uses of its weight.

Of several uses the Grams are those of their concatenation along t: the uses' own terms, and twice their
cross terms. A program takes one sample and one pair of tiles, as in ghost_norms, where bounds are
explained, too; each pair of uses is a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.alignment import aligned, stretches, to_copy
from fastclip.kernels.ghost_configs import CONFIGS, usable
from fastclip.kernels.ghost_norms import ghost_norms
from fastclip.kernels.ghost_sums import (
    STATS,
    Use,
    bounds_of,
    finish,
    pairs_of,
    restart,
    room_for,
)
from fastclip.kernels.gram_tile import gram_pair, pair_of, store_pair
from fastclip.kernels.one_position import one_position_norm
from fastclip.kernels.rounding import product_mode
from fastclip.kernels.runtime import autotuned, cdiv, launched, next_power_of_2, takes
from fastclip.kernels.work import work_class

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
    """Sums of every pair of tiles of two uses, or of one (y is x); the number of pairs.

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
    """Norms of uses that lie well, none of them empty, with one bound for all: uses may cancel."""
    if len(uses) == 1:
        return ghost_norms(uses, False)[0][0]
    pairs = [(x, y) for k, x in enumerate(uses) for y in uses[k:]]
    # A launch begins where the configuration of the one before it ended: what a trial of smaller
    # tiles wrote beyond is written over, or lies beyond the columns that are added.
    first, columns = uses[0][0], 0
    stats = torch.empty(
        STATS, len(first), sum(room_for(x, y) for x, y in pairs), dtype=torch.float32,
        device=first.device,
    )  # fmt: skip
    for x, y in pairs:
        columns += _launch(x, y, stats[:, :, columns:])
    return finish(stats, columns, bounds_of(uses))


def ghost_norm_concat(parts: Sequence[Use]) -> Tensor:
    """Squared norm of sum_k g_k^T a_k over the uses of one parameter, [b].

    Nothing is copied, unless there are many uses, or they lie badly (`alignment`).

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
        return aligned(x[samples]) if size else x[samples]  # of all uses, or their n would differ

    return torch.cat([
        _pair_norms([(ready(a, sizes[0], part), ready(g, sizes[1], part)) for a, g in uses])
        for part in stretches(b, sum(sizes) * len(uses))
    ])  # fmt: skip


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
    stats = norms.new_empty(STATS, a1.shape[0], room_for(x, y))
    pairs = _launch(x, y, stats)
    return stats[0, :, :pairs].sum(1) / 2

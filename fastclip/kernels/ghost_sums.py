"""Sums of a ghost norm's tiles, and the norm that they give, raised by its bounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.products import ordered_sum
from fastclip.kernels.runtime import launched, next_power_of_2
from fastclip.ops import linear
from fastclip.ops.bounds import UnfinishedNorm

STATS = 6
"""Sums of KH, |KH|, K^2, H^2; traces of K, H."""


@triton.jit
def raised(  # type: ignore[no-untyped-def]
    total, absolute, kk, hh, trace_k, trace_h, c, m, w_k, w_h, lost_k, lost_h, lost
):  # fmt: skip
    """The norm and its bounds (`_bounds`); NaN stays NaN, which tl.maximum would drop."""
    bound = c * trace_k * trace_h + lost_k * trace_h + lost_h * trace_k + m * absolute
    norm_h = tl.minimum(tl.sqrt_rn(hh + lost), trace_h)  # the trace where the squares overflow
    norm_k = tl.minimum(tl.sqrt_rn(kk + lost), trace_k)
    bound += tl.where(w_k > 0, w_k * trace_k * norm_h, 0.0)
    bound += tl.where(w_h > 0, w_h * trace_h * norm_k, 0.0)
    return tl.where(total < 0, 0.0, total) + bound


@launched(do_not_specialize=["columns", "stats_s", "stats_b"])
def _finish_kernel(  # type: ignore[no-untyped-def]
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


def room_for(a: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Memory for the sums of so many pairs of tiles, [6, b, pairs], and for the norms, [b]."""
    b, device = a.shape[0], a.device
    stats = torch.empty(STATS, b, pairs, dtype=torch.float32, device=device)
    return stats, torch.empty(b, dtype=torch.float32, device=device)


@dataclass
class GhostSums(UnfinishedNorm):
    """The sums of a norm's pairs of tiles, in the first columns of stats [6, b, ...]."""

    stats: Tensor
    columns: int
    bounds: tuple[float, ...]

    @property
    def kind(self) -> Hashable:
        return GhostSums, self.stats.shape, self.stats.device, self.columns, self.bounds

    @classmethod
    def finished(cls, norms: Sequence[GhostSums]) -> Sequence[Tensor]:
        first, columns = norms[0], norms[0].columns
        stats, b = first.stats, first.stats.shape[1]
        if len(norms) > 1:  # [6, l * b, columns]
            stats = torch.stack([norm.stats for norm in norms], 1).flatten(1, 2)
        found = linear.finish_ghost_norm(stats, columns, first.bounds)
        return found.view(-1, b).unbind()


def finish_ghost_norm(stats: Tensor, columns: int, bounds: Sequence[float]) -> Tensor:
    """Squared norms [b] of sums [6, b, >= columns] of tiles: fastclip.ops.finish_ghost_norm."""
    found = stats.new_empty(stats.shape[1])
    _finish_kernel[(len(found),)](
        stats, found, columns, *bounds, *stats.stride()[:2],
        BLOCK=min(1024, max(32, next_power_of_2(columns))),
    )  # fmt: skip
    return found


def finish(found: GhostSums | Tensor) -> Tensor:
    """The norm [b]."""
    if isinstance(found, GhostSums):
        return finish_ghost_norm(found.stats, found.columns, found.bounds)
    return found

"""Clipped sums of several linear layers of one kind in one launch; scaled_sum is that of one.

The last wave of a launch leaves multiprocessors empty. Here one grid has the tiles of all layers, so
that there is one such wave for a group, and `splits` are chosen for all its tiles. Addresses are
arguments, not a table in memory: no copy to the device, and 16 is known to divide each of them. A
program has one tile, as in scaled_sum, whose arithmetic and order this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.alignment import to_copy
from fastclip.kernels.known import Known
from fastclip.kernels.products import layers_of, one_of
from fastclip.kernels.rounding import by_tf32
from fastclip.kernels.runtime import (
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    takes,
)
from fastclip.kernels.scaled_sum import (
    CONFIGS,
    SIDE,
    form_of,
    splits_for,
    usable_here,
)
from fastclip.kernels.sum_tile import sum_tile
from fastclip.kernels.work import work_class

_SPLITS: Known[int] = Known()
"""Of groups of a kind."""


@autotuned(
    CONFIGS,
    key=["d", "p", "bucket", "MODE", "BY_SAMPLE", "work"],
    prune=usable_here,
)
@launched(do_not_specialize=["b", "splits", "bucket", "work", "layers"])
def _layers_kernel(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11,
    g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11,
    scale, out, d, p, b, t, splits, bucket, work, a_b, a_t, a_d, g_b, g_t, g_p, scale_b, layers, out_l,
    BY_SAMPLE: tl.constexpr, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    REST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    TAILS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(p, BLOCK_P) * tl.cdiv(d, BLOCK_D)
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer, split = part // splits, part % splits
    sum_tile(
        one_of(layer, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11),
        one_of(layer, g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11),
        scale, out + (split * layers + layer).to(tl.int64) * out_l, d, p, b, t, split, splits, tile,
        a_b, a_t, a_d, g_b, g_t, g_p, scale_b, BY_SAMPLE, MODE, WHOLE_T, WHOLE_SIDES,
        BLOCK_P, BLOCK_D, BLOCK_T, REST if TAILS else 0,
    )  # fmt: skip


def scaled_sums(pairs: Sequence[tuple[Tensor, Tensor]], scale: Tensor) -> list[Tensor]:
    """scaled_sum of layers of one kind, cut together in one launch: fastclip.ops.scaled_sums.

    One grid for all: the last wave, which leaves multiprocessors empty, is that of the group.
    """
    layers, (a, g) = len(pairs), pairs[0]
    same = alike(a, g, scale), by_tf32(a, g), layers
    operands = layers_of(pairs) if layers > 1 else None
    if operands is None:
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    splits = _SPLITS.get(same)
    if splits is not None:
        out = torch.empty(splits, layers, p, d, dtype=torch.float32, device=a.device)
        if _layers_kernel.repeat(same, *operands, scale, out):
            return _each(out)
    if not (takes(a, g) and runs_on(a, scale)) or not (b and t and d and p):
        return NotImplemented
    if to_copy(a, cdiv(p, SIDE)) or to_copy(g, cdiv(d, SIDE)):
        return NotImplemented
    constants, steps, store = form_of(a, g)
    splits = splits_for(p, d, steps, a.device, store, layers)
    out = torch.empty(splits, layers, p, d, dtype=torch.float32, device=a.device)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (layers * splits * cdiv(p, meta["BLOCK_P"]) * cdiv(d, meta["BLOCK_D"]),)

    _layers_kernel[grid](
        *operands, scale, out, d, p, b, t, splits, next_power_of_2(t), work_class(steps),
        *a.stride(), *g.stride(), scale.stride(0), layers, p * d, **constants, same=same,
    )  # fmt: skip
    _SPLITS[same] = splits
    return _each(out)


def _each(out: Tensor) -> list[Tensor]:
    """Of every layer, from the parts' sums [splits, layers, p, d]."""
    return list((out[0] if len(out) == 1 else out.sum(0)).unbind())

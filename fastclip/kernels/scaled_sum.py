"""Clipped sums of a linear layer: sum_b s_b g_b^T a_b, in one pass over a and g.

    W_pd = sum_b s_b sum_t g_btp a_btd

Index letters: b sample, t position, d input feature, p output feature. A matrix product over the
positions of all samples: a program takes a tile of W and one of `splits` stretches of (b, t), as many
as leave little of the GPU idle (`work.splits_of`). Partial sums are added in fixed order (one
configuration and GPU, one result: `runtime.autotuned`). With n_p by n_d tiles, a is read n_p times
and g n_d times, from L2 after the first.

A sample's contribution must not exceed its sensitivity, and the scales leave 2^-18 for rounding.
s_b g_b rounded to bfloat16 (2^-8 a value, alike for equal values) would break it, and so would two
bfloat16 halves (2^-17). So nothing is rounded before a product:
- 16-bit operands are multiplied as they are (exactly, on tensor cores), up to 128 positions of one
  sample after the other, and each such float32 sum is scaled by one multiply-add a value;
- float32 operands, and fewer than 16 positions (a tile then holds many samples), are scaled in
  float32 as they are loaded; 16-bit operands are then multiplied as three tf32 products, which
  keep 21 bits of s_b g_b and all of a_b.

A sample of scale 0 contributes 0 even where its operands are not finite: what comes of them is not
added. They are read all the same: loads that waited for the scale would come one step later.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.alignment import WIDE, aligned, stretches, to_copy
from fastclip.kernels.instantiated_norm import usable
from fastclip.kernels.known import Known
from fastclip.kernels.products import generation, product_configs
from fastclip.kernels.rounding import STEP, by_tf32, product_mode
from fastclip.kernels.runtime import (
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    takes,
)
from fastclip.kernels.sum_tile import sum_tile
from fastclip.kernels.work import STORE, slots, splits_of, work_class

_FEW = 16
"""Positions from which samples are summed one after the other: the shortest native product."""
_WHOLE = 128
"""Positions of the longest tile."""
SIDE = 128
"""Rows and columns of the tiles that large products are cut into: one fills a multiprocessor."""
CONFIGS = [
    *product_configs(
        (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 4),
        (128, 128, _WHOLE, 8, 3), (16, 128, 64, 4, 4), (128, 16, 64, 4, 4),
        (64, 64, STEP, 4, 3), (64, 64, STEP, 8, 3), (128, 64, STEP, 8, 3), (128, 128, STEP, 8, 3),
        (64, 64, STEP, 8, 2), (16, 64, STEP, 4, 3), (64, 16, STEP, 4, 3),
        TAILS=False,
    ),
    *product_configs((128, 128, _WHOLE, 8, 3), TAILS=True),
]  # fmt: skip
"""What is tried. TAILS: the REST that whole steps leave of a sample is its own product (`sum_tile`)."""
_SPILLS = {
    ("ieee", "ampere"): ((64, 64, 4, 3), (64, 64, 8, 2), (128, 128, 8, 3)),
    ("tf32x3", "ampere"): ((64, 64, 4, 3), (64, 64, 8, 2), (128, 128, 8, 3)),
    ("ieee", "hopper"): ((64, 64, 4, 3), (64, 64, 8, 3)),
    ("tf32x3", "hopper"): ((64, 64, 8, 2),),
}


def usable_here(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """As of instantiated_norm; of the largest tiles the longest, where there are positions, and memory
    on the processor (not on an Ampere), for them; tails where there are some, and nothing else for wide
    layers, for which they won each search on an H100; of exact float32 products small tiles where one
    operand lies by positions and the other by features: larger ones spill."""
    options = {**named, **kwargs}
    long = _WHOLE if options["bucket"] >= _WHOLE and generation() == "hopper" else 64
    unlike = options["MODE"] == "ieee" and (options["a_t"] == 1) != (options["g_t"] == 1)

    def suits(block: dict[str, int]) -> bool:
        if block["TAILS"] and not options["REST"]:
            return False
        if unlike and max(block["BLOCK_P"], block["BLOCK_D"]) >= SIDE:
            return False
        return block["BLOCK_T"] in (STEP, long) or min(block["BLOCK_P"], block["BLOCK_D"]) < SIDE

    kept = [c for c in usable(configs, named, _SPILLS, **kwargs) if suits(c.kwargs)]
    tails = [c for c in kept if c.kwargs["TAILS"]]
    return tails if tails and min(options["p"], options["d"]) >= 4 * SIDE else kept


@autotuned(
    CONFIGS,
    key=["d", "p", "bucket", "MODE", "BY_SAMPLE", "work"],
    prune=usable_here,
)
@launched(do_not_specialize=["b", "splits", "bucket", "work"])
def _tiles_kernel(
    a, g, scale, out, d, p, b, t, splits, bucket, work, a_b, a_t, a_d, g_b, g_t, g_p, scale_b, out_s,
    BY_SAMPLE: tl.constexpr, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    REST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    TAILS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(p, BLOCK_P) * tl.cdiv(d, BLOCK_D)
    split, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sum_tile(
        a, g, scale, out + split.to(tl.int64) * out_s, d, p, b, t, split, splits, tile,
        a_b, a_t, a_d, g_b, g_t, g_p, scale_b, BY_SAMPLE, MODE, WHOLE_T, WHOLE_SIDES,
        BLOCK_P, BLOCK_D, BLOCK_T, REST if TAILS else 0,
    )  # fmt: skip


def splits_for(
    p: int, d: int, steps: int, device: torch.device, store: int, layers: int = 1
) -> int:
    """Stretches of (b, t), each of some of the steps. Of small tiles a multiprocessor holds several."""
    sides = [min(SIDE, next_power_of_2(n)) for n in (p, d)]
    tiles = layers * cdiv(p, SIDE) * cdiv(d, SIDE)
    return splits_of(tiles, steps, slots(device, *sides), store)


def scaled_sum(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    """sum_b scale_b g_b^T a_b: fastclip.ops.scaled_sum.

    Args:
        a: [b, t, d]. g: [b, t, p]. scale: [b]; where it is 0, `a` and `g` need not be finite.

    Returns:
        [p, d], float32.
    """
    same = alike(a, g, scale), by_tf32(a, g)
    splits = _SPLITS.get(same)
    if splits is not None:
        out = _empty(splits, g.shape[2], a.shape[2], a.device)
        if _tiles_kernel.repeat(same, a, g, scale, out):
            return out if splits == 1 else out.sum(0)
    if not (takes(a, g) and runs_on(a, scale)):
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    if not (b and t and d and p):
        return torch.zeros(p, d, dtype=torch.float32, device=a.device)
    if to_copy(a, cdiv(p, SIDE)):
        return _sum(aligned(a), g, scale)[:, :d].contiguous()  # callers view it as they like
    return _sum(a, g, scale, same)


_SPLITS: Known[int] = Known()
"""Of operands of a kind, if they lie well."""


def _empty(splits: int, p: int, d: int, device: torch.device) -> Tensor:
    """Memory for as many partial sums, [splits, p, d], or for the sum, [p, d]."""
    shape = (p, d) if splits == 1 else (splits, p, d)
    return torch.empty(shape, dtype=torch.float32, device=device)


def _sum(a: Tensor, g: Tensor, scale: Tensor, same: Hashable = None) -> Tensor:
    """scaled_sum of g [b, t, p] as it lies, or of copies of as many columns as there is room for."""
    p, d = g.shape[2], a.shape[2]
    size = to_copy(g, cdiv(d, SIDE))
    if not size:
        return _product(a, g, scale, same)
    out = torch.empty(p, d, dtype=torch.float32, device=a.device)
    for part in stretches(p, size, WIDE):
        out[part] = _product(a, aligned(g[:, :, part]), scale)[: part.stop - part.start]
    return out


def form_of(a: Tensor, g: Tensor) -> tuple[dict[str, Any], int, int]:
    """Constants of a launch, steps of a tile's sum, and those that a part's own sum costs."""
    (b, t, d), p = a.shape, g.shape[2]
    mode = product_mode(a, g)
    by_sample = mode == "native" and t >= _FEW
    if mode == "native" and not by_sample:
        mode = "tf32x3"
    step = _WHOLE if next_power_of_2(t) >= _WHOLE else 64
    steps = b * cdiv(t, step) if by_sample else cdiv(b * t, STEP)
    constants = {
        "BY_SAMPLE": by_sample, "MODE": mode,
        "WHOLE_T": t % step == 0, "WHOLE_SIDES": p % SIDE == d % SIDE == 0,
        "REST": _rest(t) if by_sample else 0,
    }  # fmt: skip
    return constants, steps, STORE * 64 // step if by_sample else STORE


def _rest(t: int) -> int:
    """16 or 80, no less than what whole steps leave of t, where more than an eighth of all is saved;
    else 0. Code is compiled for each: there are only two."""
    left, rest = t % _WHOLE, 16 if t % _WHOLE <= 16 else 80
    saves = 8 * (_WHOLE - rest) > _WHOLE * cdiv(t, _WHOLE)
    return rest if t > _WHOLE // 2 and 0 < left <= rest and saves else 0


def _product(a: Tensor, g: Tensor, scale: Tensor, same: Hashable = None) -> Tensor:
    """scaled_sum of operands that lie well, none of them empty; `same`: their kind."""
    (b, t, d), p = a.shape, g.shape[2]
    constants, steps, store = form_of(a, g)
    splits = splits_for(p, d, steps, a.device, store)
    out = _empty(splits, p, d, a.device)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (splits * cdiv(p, meta["BLOCK_P"]) * cdiv(d, meta["BLOCK_D"]),)

    _tiles_kernel[grid](
        a, g, scale, out, d, p, b, t, splits, next_power_of_2(t), work_class(steps), *a.stride(),
        *g.stride(), scale.stride(0), p * d, **constants, same=same,
    )  # fmt: skip
    if same is not None:
        _SPLITS[same] = splits
    return out if splits == 1 else out.sum(0)

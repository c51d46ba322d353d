"""Clipped sums of linear layers, sum_b s_b g_b^T a_b: of one, of several, of kept gradients.

    W_pd = sum_b s_b sum_t g_btp a_btd

Index letters: b sample, t position, d input feature, p output feature. A matrix product over the
positions of all samples: a program takes a tile of W and one of `splits` stretches of (b, t). Their
number leaves little of the GPU idle (`runtime.splits_of`). Partial sums are added in fixed order (one
configuration and GPU, one result: `runtime.autotuned`). With n_p by n_d tiles, a is read n_p times
and g n_d times, from L2 after the first.

A sample's contribution must not exceed its sensitivity, and the scales leave 2^-18 for rounding.
s_b g_b rounded to bfloat16 (2^-8 per value, alike for equal values) would exceed it, and so would two
bfloat16 halves (2^-17). So nothing is rounded before a product:
- 16-bit operands are multiplied directly (exactly, on tensor cores), up to 128 positions of one
  sample at a time. Each such float32 sum is scaled by one multiply-add per value;
- float32 operands, and fewer than 16 positions (a tile then holds many samples), are scaled in
  float32 as they are loaded; 16-bit operands are then multiplied as three tf32 products, which
  keep 21 bits of s_b g_b and all of a_b.

A sample of scale 0 contributes 0 even if its operands are not finite: its results are not added. Its
operands are still read: loads that wait for the scale would come one step later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.ops.linear import as_they_lie
from fastclip.ops.triton.instantiated_norm import usable
from fastclip.ops.triton.runtime import (
    STORE,
    Known,
    alike,
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    slots,
    splits_of,
    takes,
    work_class,
)
from fastclip.ops.triton.tiles import (
    STEP,
    WIDE,
    aligned,
    by_tf32,
    generation,
    layers_of,
    multiply,
    one_of,
    product_configs,
    product_mode,
    stretches,
    to_copy,
)

# -------------------------------------------------------------------------------------------------
# One tile of a clipped sum over one stretch of (b, t), launched by scaled_sum and scaled_sums.
#
# Index letters: b sample, t position, d input feature, p output feature.
#
# The positions of a step are a power of two, and a sample's last step may be nearly empty: a ViT's
# 197 are one step of 128 and 69 positions of another. With a TAIL these are taken separately, after
# the whole steps of all samples, as 64 and 16 positions.


@triton.jit
def sum_tile(
    a, g, scale, out, d, p, b, t, split, splits, tile, a_b, a_t, a_d, g_b, g_t, g_p, scale_b,
    BY_SAMPLE: tl.constexpr, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Sum of s_b g_b^T a_b over one of `splits` stretches, stored.

    Args:
        WHOLE_T: BLOCK_T divides t. WHOLE_SIDES: the tile lies within p and d. TAIL: 16 or 80, no less
            than the positions beyond a sample's last whole step, which are taken separately, or 0.
    """
    tl.static_assert(TAIL == 0 or BLOCK_T == 128)  # a TAIL is its rest
    tiles_d = tl.cdiv(d, BLOCK_D)
    i, j = tile // tiles_d, tile % tiles_d
    rows, cols = i * BLOCK_P + tl.arange(0, BLOCK_P), j * BLOCK_D + tl.arange(0, BLOCK_D)
    g += rows[:, None].to(tl.int64) * g_p
    a += cols[None, :].to(tl.int64) * a_d
    in_p, in_d = rows[:, None] < p, cols[None, :] < d
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    if not BY_SAMPLE:
        acc = _of_rows(
            acc,
            a,
            g,
            scale,
            in_p,
            in_d,
            b,
            t,
            split,
            splits,
            a_b,
            a_t,
            g_b,
            g_t,
            scale_b,
            MODE,
            BLOCK_T,
        )
    else:
        acc = _of_steps(
            acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
            MODE, WHOLE_T, WHOLE_SIDES, BLOCK_T, TAIL,
        )  # fmt: skip
        if TAIL:
            acc = _of_tails(
                acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
                MODE, WHOLE_SIDES, BLOCK_T, TAIL,
            )  # fmt: skip
    to = out + rows[:, None].to(tl.int64) * d + cols[None, :]
    tl.store(to, acc, mask=in_p & in_d)


@triton.jit
def _of_steps(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr, BLOCK_T: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Scaled products of one sample's positions each, without those of a TAIL.

    It has few instructions per step: tensor cores wait for the processors that issue them.
    """
    if TAIL:
        t = t // BLOCK_T * BLOCK_T
    local = tl.arange(0, BLOCK_T)
    chunks = tl.maximum(tl.cdiv(t, BLOCK_T), 1)  # of a sample
    steps = b * tl.cdiv(t, BLOCK_T)
    share = tl.cdiv(steps, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, steps)
    sample, t0 = (first // chunks).to(tl.int64), first % chunks * BLOCK_T
    g_at = g + local[None, :].to(tl.int64) * g_t
    a_at = a + local[:, None].to(tl.int64) * a_t
    g_from, a_from = sample * g_b + t0.to(tl.int64) * g_t, sample * a_b + t0.to(tl.int64) * a_t
    scale += sample * scale_b
    for _ in range(first, stop):
        factor = tl.load(scale).to(tl.float32)  # early: the product hides how long that takes
        in_t = local < t - t0
        part = _tile_product(
            tl.zeros_like(acc), g_at + g_from, a_at + a_from, in_t, in_p, in_d,
            MODE, WHOLE_T or TAIL > 0, WHOLE_SIDES,
        )  # fmt: skip
        acc = tl.where(factor == 0, acc, tl.fma(part, factor, acc))
        ends = t0 + BLOCK_T >= t
        g_from += tl.where(ends, g_b - t0.to(tl.int64) * g_t, BLOCK_T * g_t)
        a_from += tl.where(ends, a_b - t0.to(tl.int64) * a_t, BLOCK_T * a_t)
        scale += tl.where(ends, scale_b, 0)
        t0 = tl.where(ends, 0, t0 + BLOCK_T)
    return acc


@triton.jit
def _of_tails(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, WHOLE_SIDES: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """The same for positions beyond the whole steps."""
    share = tl.cdiv(b, splits)
    first, stop = split * share, tl.minimum((split + 1) * share, b)
    t0 = (t // BLOCK_T * BLOCK_T).to(tl.int64)
    rest = t - t0
    g += t0 * g_t + first.to(tl.int64) * g_b
    a += t0 * a_t + first.to(tl.int64) * a_b
    scale += first.to(tl.int64) * scale_b
    for _ in range(first, stop):
        factor = tl.load(scale).to(tl.float32)
        part = tl.zeros_like(acc)
        if TAIL > 16:
            part = _piece(part, g, a, rest, in_p, in_d, a_t, g_t, MODE, WHOLE_SIDES, 0, 64)
        part = _piece(part, g, a, rest, in_p, in_d, a_t, g_t, MODE, WHOLE_SIDES, TAIL - 16, 16)
        acc = tl.where(factor == 0, acc, tl.fma(part, factor, acc))
        g += g_b
        a += a_b
        scale += scale_b
    return acc


@triton.jit
def _piece(
    part, g, a, rest, in_p, in_d, a_t, g_t, MODE: tl.constexpr, WHOLE_SIDES: tl.constexpr,
    FIRST: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """part + the product of so many of a tail's positions, if there are any."""
    local = FIRST + tl.arange(0, LENGTH)
    return _tile_product(
        part, g + local[None, :].to(tl.int64) * g_t, a + local[:, None].to(tl.int64) * a_t,
        local < rest, in_p, in_d, MODE, False, WHOLE_SIDES,
    )  # fmt: skip


@triton.jit
def _tile_product(
    part, g, a, in_t, in_p, in_d, MODE: tl.constexpr, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr
):  # fmt: skip
    """part + g a, of the tiles at these addresses."""
    g_tile = _loaded(g, in_t[None, :], in_p, WHOLE_T, WHOLE_SIDES)
    a_tile = _loaded(a, in_t[:, None], in_d, WHOLE_T, WHOLE_SIDES)
    return multiply(g_tile, a_tile, part, MODE)


@triton.jit
def _loaded(at, in_t, in_side, WHOLE_T: tl.constexpr, WHOLE_SIDES: tl.constexpr):
    """A tile, 0 beyond the operand's ends, which are checked if they can lie in it."""
    if WHOLE_T and WHOLE_SIDES:
        tile = tl.load(at)
    elif WHOLE_T:
        tile = tl.load(at, mask=in_side, other=0.0)
    elif WHOLE_SIDES:
        tile = tl.load(at, mask=in_t, other=0.0)
    else:
        tile = tl.load(at, mask=in_t & in_side, other=0.0)
    return tile


@triton.jit
def _of_rows(
    acc, a, g, scale, in_p, in_d, b, t, split, splits, a_b, a_t, g_b, g_t, scale_b,
    MODE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Products of rows of any samples, scaled as they are loaded."""
    local = tl.arange(0, BLOCK_T)
    share = tl.cdiv(tl.cdiv(b * t, BLOCK_T), splits) * BLOCK_T
    first, stop = split * share, tl.minimum((split + 1) * share, b * t)
    for start in range(first, stop, BLOCK_T):
        row = start + local
        sample, at = (row // t).to(tl.int64), (row % t).to(tl.int64)
        factor = tl.load(scale + sample * scale_b, mask=row < stop, other=0.0).to(tl.float32)
        alive = factor != 0  # the others are not even read
        g_at = g + (sample * g_b + at * g_t)[None, :]
        a_at = a + (sample * a_b + at * a_t)[:, None]
        g_tile = tl.load(g_at, mask=in_p & alive[None, :], other=0.0).to(tl.float32)
        a_tile = tl.load(a_at, mask=in_d & alive[:, None], other=0.0)
        acc = multiply(g_tile * factor[None, :], a_tile, acc, MODE)
    return acc


# -------------------------------------------------------------------------------------------------


_FEW = 16
"""Positions from which samples are summed separately: the shortest native product."""
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
"""Configurations to try. TAILS: the REST that whole steps leave of a sample is its own product."""
_SPILLS = {
    ("ieee", "ampere"): ((64, 64, 4, 3), (64, 64, 8, 2), (128, 128, 8, 3)),
    ("tf32x3", "ampere"): ((64, 64, 4, 3), (64, 64, 8, 2), (128, 128, 8, 3)),
    ("ieee", "hopper"): ((64, 64, 4, 3), (64, 64, 8, 3)),
    ("tf32x3", "hopper"): ((64, 64, 8, 2),),
}


def usable_here(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Returns usable configurations, as in instantiated_norm. Of the largest tiles it keeps the longest
    if positions and on-chip memory suffice (not on Ampere). Tails are kept if there are any, and alone
    for wide layers, for which they won each search on an H100. For exact float32 products it keeps small
    tiles if one operand lies by positions and the other by features: larger ones spill."""
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
    """Returns the number of stretches of (b, t). A multiprocessor holds several small tiles."""
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
        return _sum(aligned(a), g, scale)[:, :d].contiguous()  # callers take any view of it
    return _sum(a, g, scale, same)


_SPLITS: Known[int] = Known()
"""The splits for operands of a kind with suitable layout."""


def _empty(splits: int, p: int, d: int, device: torch.device) -> Tensor:
    """Returns memory for partial sums, [splits, p, d], or for the sum, [p, d]."""
    shape = (p, d) if splits == 1 else (splits, p, d)
    return torch.empty(shape, dtype=torch.float32, device=device)


def _sum(a: Tensor, g: Tensor, scale: Tensor, same: Hashable = None) -> Tensor:
    """Computes scaled_sum of g [b, t, p] directly, or of copies of as many columns as fit."""
    p, d = g.shape[2], a.shape[2]
    size = to_copy(g, cdiv(d, SIDE))
    if not size:
        return _product(a, g, scale, same)
    out = torch.empty(p, d, dtype=torch.float32, device=a.device)
    for part in stretches(p, size, WIDE):
        out[part] = _product(a, aligned(g[:, :, part]), scale)[: part.stop - part.start]
    return out


def form_of(a: Tensor, g: Tensor) -> tuple[dict[str, Any], int, int]:
    """Returns constants of a launch, steps of a tile's sum, and the cost of a part's sum in steps."""
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
    """Returns 16 or 80, at least the rest of t after whole steps, if that saves more than an eighth of
    all; else 0. Code is compiled for each, so there are only two."""
    left, rest = t % _WHOLE, 16 if t % _WHOLE <= 16 else 80
    saves = 8 * (_WHOLE - rest) > _WHOLE * cdiv(t, _WHOLE)
    return rest if t > _WHOLE // 2 and 0 < left <= rest and saves else 0


def _product(a: Tensor, g: Tensor, scale: Tensor, same: Hashable = None) -> Tensor:
    """Computes scaled_sum of non-empty operands with suitable layout; `same`: their kind."""
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


# -------------------------------------------------------------------------------------------------
# Clipped sums of several linear layers of one kind in one launch; scaled_sum is that of one.
#
# The last wave of a launch leaves multiprocessors empty. Here one grid has the tiles of all layers,
# with one such wave per group, and `splits` are chosen for all its tiles. Addresses are arguments
# instead of a table in memory: nothing is copied to the device, and each is known to be divisible by
# 16. A program has one tile, with the arithmetic and order of scaled_sum.


_GROUP_SPLITS: Known[int] = Known()
"""The splits for groups of a kind."""


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
    """Computes scaled_sum of layers of one kind in one launch: fastclip.ops.scaled_sums.

    All layers share one grid, and one last wave that leaves multiprocessors empty.
    """
    layers, (a, g) = len(pairs), pairs[0]
    same = alike(a, g, scale), by_tf32(a, g), layers
    operands = layers_of(pairs) if layers > 1 else None
    if operands is None:
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    splits = _GROUP_SPLITS.get(same)
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
    _GROUP_SPLITS[same] = splits
    return _each(out)


def _each(out: Tensor) -> list[Tensor]:
    """Returns the sum of every layer, from the parts' sums [splits, layers, p, d]."""
    return list((out[0] if len(out) == 1 else out.sum(0)).unbind())


# -------------------------------------------------------------------------------------------------
# Clipped sum of per-sample gradients that are in memory: each is read once.
#
#     out[n] = sum_b s_b G[b, n]
#
# A program takes BLOCK entries of all samples, and adds sample by sample: equal gradients give equal
# bits. Values of a sample of scale 0 are not added, even if they are not finite. PyTorch's product
# needs another pass over all gradients for that.


BLOCK = 1024
_WARPS = 4


@triton.jit
def _added(acc, value, factor):
    return tl.where(factor == 0, acc, tl.fma(value.to(tl.float32), factor, acc))


@launched(do_not_specialize=["b"])
def _sum_kernel(x, scale, out, b, n, x_b, scale_b, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x += at
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, b, 4):
        # Four samples are asked for before the first is used: their latencies overlap.
        b0, b1 = tl.cast(first, tl.int64), tl.minimum(first + 1, b - 1).to(tl.int64)
        b2, b3 = (
            tl.minimum(first + 2, b - 1).to(tl.int64),
            tl.minimum(first + 3, b - 1).to(tl.int64),
        )
        x0, x1 = tl.load(x + b0 * x_b, mask=inside), tl.load(x + b1 * x_b, mask=inside)
        x2, x3 = tl.load(x + b2 * x_b, mask=inside), tl.load(x + b3 * x_b, mask=inside)
        f0 = tl.load(scale + b0 * scale_b)
        f1 = tl.load(scale + b1 * scale_b, mask=first + 1 < b, other=0.0)
        f2 = tl.load(scale + b2 * scale_b, mask=first + 2 < b, other=0.0)
        f3 = tl.load(scale + b3 * scale_b, mask=first + 3 < b, other=0.0)
        acc = _added(_added(acc, x0, f0.to(tl.float32)), x1, f1.to(tl.float32))
        acc = _added(_added(acc, x2, f2.to(tl.float32)), x3, f3.to(tl.float32))
    tl.store(out + at, acc, mask=inside)


def kept_sum(gradients: Tensor, scale: Tensor) -> Tensor:
    """As fastclip.ops.kept_sum: gradients [b, *shape], scale [b] -> [*shape]."""
    same = alike(gradients, scale)
    known = _KNOWN.get(same)
    if known is not None:
        shape, back = known
        out = torch.empty(shape, dtype=torch.float32, device=gradients.device)
        if _sum_kernel.repeat(same, gradients, scale, out):
            return out if back is None else out.permute(back).contiguous()
    if not runs_on(gradients, scale) or gradients.dtype != torch.float32:
        return NotImplemented
    rows, back = as_they_lie(gradients)
    shape = rows.shape[1:]
    b, n = len(rows), shape.numel()
    if not b or not n or not rows[0].is_contiguous():
        return NotImplemented
    out = torch.empty(shape, dtype=torch.float32, device=gradients.device)
    _sum_kernel[(cdiv(n, BLOCK),)](
        rows, scale, out, b, n, rows.stride(0), scale.stride(0), BLOCK=BLOCK, num_warps=_WARPS,
        same=same,
    )  # fmt: skip
    if back == sorted(back):
        back = None
    _KNOWN[same] = shape, back
    return out if back is None else out.permute(back).contiguous()


_KNOWN: Known[tuple[torch.Size, list[int] | None]] = Known()
"""For gradients of a kind, the shape of their sum in memory, and its permutation to theirs."""

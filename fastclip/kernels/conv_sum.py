"""Clipped sums of Conv2d (Conv1d as height 1): one pass over x and g as they lie, never unfolding.

    W[o, (c, kh, kw)] = sum_b s_b sum_t g_b[o, t] patch_b[t, (c, kh, kw)]

Index letters and patches as in conv_norm; splits, and what is rounded when, as in scaled_sum. An
implicit GEMM over the positions of all samples: a program takes a tile of W and one of `splits`
stretches of (b, t); partial sums are added in fixed order. Nothing is rounded before a product:
- 16-bit operands are multiplied as they are, a few positions of one sample after the other, and each
  such float32 sum is scaled by one multiply-add: tensor cores truncate, and over a large map that
  would come to more than the slack of the scales (2^-18);
- float32 operands, and maps of fewer than FEW positions (a tile then holds many samples), are scaled
  in float32 as they are loaded; 16-bit operands are then multiplied as three tf32 products.

A sample of scale 0 contributes 0 even where its operands are not finite: what comes of them is not
added. They are read all the same: loads that waited for the scale would come one step later.
Depthwise convolutions, of one row and a few columns a group, stay with the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.conv_arguments import REACH, arguments
from fastclip.kernels.patches import columns_of, loads_wide, pixel, tiles_of
from fastclip.kernels.products import multiply
from fastclip.kernels.rounding import STEP, product_mode
from fastclip.kernels.runtime import autotuned, cdiv, launched, runs_on
from fastclip.kernels.work import slots, splits_of, work_class
from fastclip.ops.conv import ConvGeometry

FEW = 16
"""Positions from which samples are summed one after the other: the shortest native product."""
_CONFIGS = [
    triton.Config({"BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for k, warps, stages in (
        (64, 8, 5), (64, 8, 4), (64, 4, 4), (64, 4, 3), (128, 8, 3), (32, 8, 4), (32, 4, 5),
        (STEP, 8, 2),
    )
]  # fmt: skip


def _usable(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Of float32 products, steps of the size that bounds count on, which spill with more stages. Of
    16-bit ones, tiles that leave room for two sums in the registers, no longer than the map, whose
    loads are wide."""
    if kwargs["MODE"] != "native":
        return [c for c in configs if c.num_stages == 2]
    tile, longest = kwargs["BLOCK_O"] * kwargs["BLOCK_N"], max(32, named["bucket"])
    fits = [c for c in configs if tile <= 64 * 32 * c.num_warps and c.num_stages > 2]
    return loads_wide([c for c in fits if c.kwargs["BLOCK_K"] <= longest], kwargs)


@autotuned(
    _CONFIGS,
    key=["c", "o", "sxc", "bucket", "BLOCK_O", "BLOCK_N", "KH", "KW", "SH", "MODE", "BY_SAMPLE",
         "work"],
    prune=_usable,
)  # fmt: skip
@launched(do_not_specialize=["b", "splits", "bucket", "work"])
def _tiles(X, G, SCALE, OUT, b, splits, work, c, o, h, w, positions, width, groups, bucket, row_tiles,
           col_tiles, out_s, sxb, sxc, sxh, sxw, sgb, sgo, sgt, scale_b, BY_SAMPLE: tl.constexpr,
           KH: tl.constexpr, KW: tl.constexpr,
           SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
           DH: tl.constexpr, DW: tl.constexpr, MODE: tl.constexpr,
           ONE_TAP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr):  # fmt: skip
    """A tile of one group's W over a stretch of (b, t): OUT [splits, groups * o, columns]."""
    pid = tl.program_id(0)
    col_tile, row_tile = pid % col_tiles, pid // col_tiles % row_tiles
    of = pid // (col_tiles * row_tiles)
    split, k = of // groups, (of % groups).to(tl.int64)
    row = row_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    channel, is_column, column, dh, dw = columns_of(
        col_tile, c, KH, KW, PH, PW, DH, DW, ONE_TAP, BLOCK_N
    )
    X += k * c * sxc
    G += k * o * sgo
    is_row = row[:, None] < o
    local = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    if BY_SAMPLE:
        chunks = tl.cdiv(positions, BLOCK_K)  # of a sample
        share = tl.cdiv(b * chunks, splits)
        first, stop = split * share, tl.minimum((split + 1) * share, b * chunks)
        sample, start = (first // chunks).to(tl.int64), first % chunks * BLOCK_K
        for _ in range(first, stop):
            factor = tl.load(SCALE + sample * scale_b).to(tl.float32)  # early, as in scaled_sum
            at = start + local
            inside = at < positions
            offset, seen = pixel(at[:, None], dh, dw, h, w, width, sxh, sxw, SH, SW)
            seen = seen & inside[:, None] & is_column[None, :]
            x_at = X + sample * sxb + (offset + channel[None, :] * sxc)
            g_at = G + sample * sgb + (row[:, None] * sgo + at[None, :] * sgt)
            patch = tl.load(x_at, mask=seen, other=0.0)
            g = tl.load(g_at, mask=is_row & inside[None, :], other=0.0)
            part = multiply(g, patch, tl.zeros([BLOCK_O, BLOCK_N], tl.float32), MODE)
            acc = tl.where(factor == 0, acc, tl.fma(part, factor, acc))
            start += BLOCK_K
            sample += (start >= positions).to(tl.int64)
            start = tl.where(start >= positions, 0, start)
    else:
        share = tl.cdiv(tl.cdiv(b * positions, BLOCK_K), splits) * BLOCK_K
        first, stop = split * share, tl.minimum((split + 1) * share, b * positions)
        for start in range(first, stop, BLOCK_K):
            sample, at = ((start + local) // positions).to(tl.int64), (start + local) % positions
            inside = start + local < stop
            factor = tl.load(SCALE + sample * scale_b, mask=inside, other=0.0).to(tl.float32)
            alive = factor != 0  # the others are not even read
            offset, seen = pixel(at[:, None], dh, dw, h, w, width, sxh, sxw, SH, SW)
            seen = seen & alive[:, None] & is_column[None, :]
            x_at = X + (sample * sxb)[:, None] + (offset + channel[None, :] * sxc)
            g_at = G + (sample * sgb)[None, :] + (row[:, None] * sgo + at[None, :] * sgt)
            patch = tl.load(x_at, mask=seen, other=0.0)
            g = tl.load(g_at, mask=is_row & alive[None, :], other=0.0).to(tl.float32)
            acc = multiply(g * factor[None, :], patch, acc, MODE)
    to = OUT + split.to(tl.int64) * out_s + (k * o + row)[:, None] * (c * KH * KW) + column[None, :]
    tl.store(to, acc, mask=is_row & is_column[None, :])


def conv_sum(x: Tensor, g: Tensor, scale: Tensor, geometry: ConvGeometry) -> Tensor:
    """sum_b scale_b times the weight gradient of sample b: fastclip.ops.conv_sum.

    Args:
        x: [b, c, *space]. g: [b, o, *out], both of any strides. scale: [b].

    Returns:
        [*weight_shape], float32.
    """
    of_group = (geometry.weight_shape[0] // geometry.groups, geometry.weight_shape[1])
    if (geometry.groups > 1 and 1 in of_group) or not runs_on(x, g, scale):
        return NotImplemented
    call = arguments(x, g, geometry)
    if call is None or call[2][4] * len(x) >= REACH // 2:
        return NotImplemented
    x, g, sizes, constants = call
    if not x.numel() or not g.numel():
        return torch.zeros(geometry.weight_shape, dtype=torch.float32, device=x.device)
    c, o, *_, positions, _, groups, _ = sizes
    b, taps, mode = len(x), constants["KH"] * constants["KW"], product_mode(x, g)
    by_sample = mode == "native" and positions >= FEW
    if mode == "native" and not by_sample:
        mode = "tf32x3"
    side = 128 if by_sample else 64
    blocks, (row_tiles, col_tiles) = tiles_of(c, o, taps, side, side)
    tiles = groups * row_tiles * col_tiles
    steps = b * cdiv(positions, side) if by_sample else cdiv(b * positions, 256)
    splits = splits_of(tiles, steps, slots(x.device, blocks["BLOCK_O"], blocks["BLOCK_N"]))
    out = torch.empty(splits, groups * o, taps, c, dtype=torch.float32, device=x.device)
    _tiles[(splits * tiles,)](
        x, g, scale, out, b, splits, work_class(steps), *sizes, row_tiles, col_tiles, out.stride(0),
        *x.stride(), *g.stride(), scale.stride(0), BY_SAMPLE=by_sample, MODE=mode,
        **blocks, **constants,
    )  # fmt: skip
    total = out[0] if splits == 1 else out.sum(0)
    return total.transpose(1, 2).contiguous().view(geometry.weight_shape)

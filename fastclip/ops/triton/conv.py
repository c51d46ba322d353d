"""Per-sample norms and clipped sums of Conv2d (Conv1d as height 1), never unfolding.

    W_b[o, (c, kh, kw)] = sum_t g_b[o, t] patch_b[t, (c, kh, kw)],   norm_b = ||W_b||^2
    patch[t, (c, kh, kw)] = x[c, stride t + dilation (kh, kw) - padding], gathered as it is loaded

Index letters: b sample, k group, o output and c input channel of the group, t output position.
conv_norm is an implicit GEMM: a program holds a tile of W_b in registers, loops over t, squares and
sums. With `keep` it also stores W_b. x is read o / BLOCK_O times per tap and g once per tile of columns,
mostly from the cache.
conv_ghost_norm, for small maps, holds a pair i <= j of tiles of positions of both Grams, patch
patch^T and g^T g; pairs off the diagonal count twice. Any strides are taken. 16-bit maps that cannot
be loaded 16 bytes at a time are first copied channels-last. A few sums per tile are written, and a
second launch adds them in fixed order.

Neither result is below the exact value: the bounds are those of fastclip.ops.conv, raised for the
accumulators of tensor cores as in ghost_norm and instantiated_norm.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.core.numerics import GRAM_ERROR_FACTOR, PRODUCT_ERROR_FACTOR, lost_squares
from fastclip.ops.conv import ConvGeometry, by_matrices
from fastclip.ops.triton.runtime import (
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    slots,
    splits_of,
    work_class,
)
from fastclip.ops.triton.tiles import (
    STEP,
    TILE_SUM,
    UNIT,
    WIDE,
    generation,
    multiply,
    one_sided,
    ordered_sum,
    pair_of,
    product_mode,
    stays,
    summed,
)

# -------------------------------------------------------------------------------------------------
# Arguments of the kernels of convolutions: maps of two dimensions, laid out for wide loads.


REACH = 1 << 31
"""Offsets inside a sample are 32-bit."""


def arguments(
    x: Tensor, g: Tensor, geo: ConvGeometry
) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, Any]] | None:
    """Returns x [b, c, h, w], g [b, o, t], the kernels' sizes and constants; None if out of reach."""
    if len(geo.kernel) > 2 or not runs_on(x, g):
        return None
    window = [geo.kernel, geo.stride, geo.padding, geo.dilation]
    if len(geo.kernel) == 1:
        x, g = x.unsqueeze(2), g.unsqueeze(2)
        window = [(neutral, *n) for neutral, n in zip((1, 1, 0, 1), window, strict=True)]
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = window
    (h, w), (height, width) = x.shape[2:], g.shape[2:]
    g = g.flatten(2)  # a view, unless the pixels of g lie in no regular order
    for y in (x, g):
        if sum((n - 1) * s for n, s in zip(y.shape[1:], y.stride()[1:], strict=True)) >= REACH:
            return None
    groups, positions = geo.groups, height * width
    x = _wide(x, groups)
    g = _wide(g.unsqueeze(2), groups, positions % WIDE == 0).squeeze(2)
    channels = x.shape[1] // groups, g.shape[1] // groups
    sizes = (*channels, h, w, positions, width, groups, next_power_of_2(positions))
    constants = {
        "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw,
    }  # fmt: skip
    return x, g, sizes, constants


def conv_operands(x: Tensor, g: Tensor, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """As fastclip.ops.conv_operands. It copies operands that `arguments` would copy, or whose layout
    does not suit the kernels of linear maps, unless an input is copied into matrices anyway."""
    if len(geometry.kernel) > 2 or not runs_on(x, g):
        return NotImplemented
    pointwise = geometry.is_pointwise and max(geometry.stride) == 1  # its matrix is a view
    cut = by_matrices(geometry) and not pointwise
    laid = x if cut else _map(x, geometry.groups, positions=by_matrices(geometry))
    return laid, _map(g, geometry.groups, positions=True)


def _map(x: Tensor, groups: int, *, positions: bool) -> Tensor:
    """Returns x [b, c, *space] as laid out by `_wide`; positions: its kernels only use these."""
    whole = x.unsqueeze(2) if x.dim() == 3 else x
    h, w = whole.shape[2:]
    regular = whole.stride(2) == w * whole.stride(3) or h == 1
    laid = _wide(whole, groups, positions and regular and h * w % WIDE == 0)
    return laid.squeeze(2) if x.dim() == 3 else laid


def _wide(x: Tensor, groups: int, along: bool = False) -> Tensor:
    """Returns x [b, c, h, w], or a channels-last copy if it has 16 bits per value and neither its
    channels nor its positions (`along`) can be loaded 16 bytes at a time. The copy reads and writes x
    once, but the kernels read it once per tap and tile."""
    lies_well = x.stride(1) == 1 or (along and x.stride(3) == 1)
    if x.element_size() != 2 or lies_well or x.shape[1] // groups % WIDE:
        return x
    if x.shape[1:].numel() >= REACH:  # a map with repeated entries, as a mean's gradient
        return x
    return x.contiguous(memory_format=torch.channels_last)


def sees_all(geo: ConvGeometry, space: tuple[int, int], out: tuple[int, int]) -> bool:
    """Whether every pixel lies in some patch."""
    dims = len(geo.kernel)
    window = (space[-dims:], out[-dims:], geo.kernel, geo.stride, geo.padding, geo.dilation)
    return all(_covers(*one) for one in zip(*window, strict=True))


@functools.lru_cache(maxsize=1024)
def _covers(
    pixels: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> bool:
    places = (stride * t + dilation * k - padding for t in range(outputs) for k in range(kernel))
    return len({p for p in places if 0 <= p < pixels}) == pixels


# -------------------------------------------------------------------------------------------------
# Finding the patches of a map, and cutting a weight's gradient into tiles.
#
# Columns of a gradient W [o, columns] are ordered (tap, channel). With enough channels a tile of them
# belongs to one tap, and bounds are tested once per position.


@triton.jit
def pixel(at, dh, dw, h, w, width, sxh, sxw, SH: tl.constexpr, SW: tl.constexpr):
    """Offset of the pixel under output positions `at` at a tap's shift, and whether there is one."""
    ih, iw = (at // width) * SH + dh, (at % width) * SW + dw
    return ih * sxh + iw * sxw, (ih >= 0) & (ih < h) & (iw >= 0) & (iw < w)


@triton.jit
def columns_of(tile, c, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
               DH: tl.constexpr, DW: tl.constexpr, ONE_TAP: tl.constexpr,
               BLOCK_N: tl.constexpr):  # fmt: skip
    """A tile of columns: their channels, whether there are such, their numbers, [BLOCK_N]; and the
    shifts of their taps, one or [1, BLOCK_N]."""
    if ONE_TAP:
        tap = tile // tl.cdiv(c, BLOCK_N)
        channel = (tile % tl.cdiv(c, BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
        dh, dw = (tap // KW) * DH - PH, (tap % KW) * DW - PW
        return channel, channel < c, tap * c + channel, dh, dw
    else:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        tap = (column // c)[None, :]
        dh, dw = (tap // KW) * DH - PH, (tap % KW) * DW - PW
        return column % c, column < c * KH * KW, column, dh, dw


def loads_wide(configs: list[Any], options: Mapping[str, Any]) -> list[Any]:
    """Returns, for 16-bit products, the configurations with 16 bytes of either operand per thread and
    step; all if there are none."""
    side = min(options["BLOCK_O"], options["BLOCK_N"])
    wide = [c for c in configs if 2 * side * c.kwargs["BLOCK_K"] >= 16 * 32 * c.num_warps]
    return wide or configs


def tiles_of(
    c: int, o: int, taps: int, rows: int, columns: int
) -> tuple[dict[str, int | bool], tuple[int, int]]:
    """The kernels' constants for tiles of W [o, taps * c] of at most so many rows and columns, and how
    many tiles of rows and of columns there are."""
    one_tap = c >= 16 or taps == 1
    block_o = min(rows, max(16, next_power_of_2(o)))
    number = c if one_tap else c * taps
    widest = columns if c * taps >= 512 else 64  # enough tiles to fill the device if there are few
    block_n = min(widest, max(16, next_power_of_2(number)))
    tiles = cdiv(o, block_o), cdiv(number, block_n) * (taps if one_tap else 1)
    return {"ONE_TAP": one_tap, "BLOCK_O": block_o, "BLOCK_N": block_n}, tiles


# -------------------------------------------------------------------------------------------------


GHOST_TILE = 32  # the smallest tile of positions that is tried
_SPILLS = {("ieee", "ampere"): [(64, 4, 3)], ("ieee", "hopper"): [(64, 8, 3)],
           ("tf32x3", "hopper"): [(32, 4, 3)]}  # fmt: skip
_NARROW_SPILLS = ((16, 128, 8), (32, 64, 4))
"""The same for tiles of W in 16 bits: (shorter side, BLOCK_K, warps)."""
MAX_GHOST = 4096  # positions beyond which a Gram is out of the question


def _usable_norm(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Returns usable configurations. Exact float32 products are added STEP at a time, as the bounds
    assume. Tiles of more than 64 numbers per thread spill; for float32 only those left here do not."""
    options = {**named, **kwargs}
    tile = options.get("BLOCK_O", 0) * options.get("BLOCK_N", 0)
    fits = [c for c in configs if tile <= 64 * 32 * c.num_warps]
    modes = {options["MODE"], options.get("G_MODE", options["MODE"])}
    if modes == {"native"}:
        fits = [c for c in fits if c.num_warps < 16]
        return _narrow(loads_wide(fits, options), options) if tile else fits
    steps = [c for c in fits if c.kwargs["BLOCK_K"] == STEP and c.num_stages == 3]
    mode = "ieee" if "ieee" in modes else "tf32x3"
    if tile:
        warps = 16 if (mode, generation()) == ("ieee", "ampere") else 8
        return [c for c in steps if c.num_warps == warps]
    return [c for c in steps if stays(c, mode, _SPILLS, "BLOCK_P")]


def _narrow(configs: list[Any], options: Mapping[str, Any]) -> list[Any]:
    side = min(options["BLOCK_O"], options["BLOCK_N"])
    return [c for c in configs if (side, c.kwargs["BLOCK_K"], c.num_warps) not in _NARROW_SPILLS]


def _config(warps: int, stages: int, **sizes: int) -> triton.Config:
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


@autotuned(
    [
        _config(8, 3, BLOCK_K=64), _config(4, 3, BLOCK_K=64), _config(8, 2, BLOCK_K=128),
        _config(4, 4, BLOCK_K=STEP), _config(8, 3, BLOCK_K=STEP), _config(8, 4, BLOCK_K=STEP),
        _config(16, 3, BLOCK_K=STEP),
    ],
    key=["c", "o", "sxc", "bucket", "BLOCK_O", "BLOCK_N", "KH", "KW", "SH", "MODE", "KEEP",
         "work"],
    prune=_usable_norm,
)  # fmt: skip
@launched(do_not_specialize=["bucket", "out_s", "work"])
def _norm_tiles(X, G, OUT, GRADS, c, o, h, w, positions, width, groups, bucket, row_tiles, col_tiles,
           out_s, work, sxb, sxc, sxh, sxw, sgb, sgo, sgt, KEEP: tl.constexpr, KH: tl.constexpr,
           KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
           PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
           MODE: tl.constexpr, ONE_TAP: tl.constexpr, BLOCK_O: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Sums of squares of a tile of one sample's and group's W, of its patches and of its g."""
    pid = tl.program_id(0)
    col_tile, row_tile = pid % col_tiles, pid // col_tiles % row_tiles
    of = pid // (col_tiles * row_tiles)
    b, k = (of // groups).to(tl.int64), (of % groups).to(tl.int64)
    row = row_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    channel, is_column, column, dh, dw = columns_of(
        col_tile, c, KH, KW, PH, PW, DH, DW, ONE_TAP, BLOCK_N
    )
    X += b * sxb + k * c * sxc
    G += b * sgb + k * o * sgo
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    squares_x = tl.zeros([BLOCK_N], tl.float32)
    squares_g = tl.zeros([BLOCK_O], tl.float32)
    for start in range(0, positions, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        offset, seen = pixel(at[:, None], dh, dw, h, w, width, sxh, sxw, SH, SW)
        seen = seen & (at[:, None] < positions) & is_column[None, :]
        patch = tl.load(X + (offset + channel[None, :] * sxc), mask=seen, other=0.0)
        there = (row[:, None] < o) & (at[None, :] < positions)
        g = tl.load(G + (row[:, None] * sgo + at[None, :] * sgt), mask=there, other=0.0)
        acc = multiply(g, patch, acc, MODE)
        if row_tile == 0:  # the first tiles pass over every patch, and over all of g
            squares_x += tl.sum(patch.to(tl.float32) * patch.to(tl.float32), 0)
        if col_tile == 0:
            squares_g += tl.sum(g.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(OUT + pid, tl.sum(acc * acc))
    if KEEP:
        to = GRADS + ((of.to(tl.int64) * o + row[:, None]) * (c * KH * KW) + column[None, :])
        tl.store(to, acc, mask=(row[:, None] < o) & is_column[None, :])
    tl.store(OUT + out_s + pid, tl.sum(squares_x))
    tl.store(OUT + 2 * out_s + pid, tl.sum(squares_g))


@launched(do_not_specialize=["out_s"])
def _finish_tiles(OUT, UNSEEN, NORMS, columns, factor, margin, out_s, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    at = OUT + b * columns
    norm = tl.sqrt_rn(ordered_sum(at, columns, 1, BLOCK, False))
    if UNSEEN is None:
        size_x = tl.sqrt_rn(ordered_sum(at + out_s, columns, 1, BLOCK, False))
    else:
        size_x = tl.load(UNSEEN + b)
    size_g = tl.sqrt_rn(ordered_sum(at + 2 * out_s, columns, 1, BLOCK, False))
    norm = norm * factor + margin * size_x * size_g
    tl.store(NORMS + b, norm * norm)


@autotuned(
    [
        _config(4, 3, BLOCK_P=64, BLOCK_K=64), _config(8, 3, BLOCK_P=64, BLOCK_K=64),
        _config(4, 3, BLOCK_P=32, BLOCK_K=64), _config(4, 2, BLOCK_P=32, BLOCK_K=128),
        _config(4, 3, BLOCK_P=64, BLOCK_K=STEP), _config(4, 3, BLOCK_P=32, BLOCK_K=STEP),
        _config(8, 3, BLOCK_P=64, BLOCK_K=STEP),
    ],
    key=["c", "o", "sxc", "bucket", "KH", "KW", "SH", "MODE", "G_MODE", "work"],
    prune=_usable_norm,
)  # fmt: skip
@launched(do_not_specialize=["bucket", "out_s", "work"])
def _pairs(X, G, OUT, c, o, h, w, positions, width, groups, bucket, room, out_s, work,
           sxb, sxc, sxh, sxw, sgb, sgo, sgt, KH: tl.constexpr,
           KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
           PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
           MODE: tl.constexpr, G_MODE: tl.constexpr, BLOCK_P: tl.constexpr,
           BLOCK_K: tl.constexpr):  # fmt: skip
    """Sums over a pair of tiles of positions of one sample and group; OUT has `room` for each."""
    tiles = tl.cdiv(positions, BLOCK_P)
    pairs = tiles * (tiles + 1) // 2
    pair = tl.program_id(0) % pairs
    i, j = pair_of(pair)
    of = (tl.program_id(0) // pairs).to(tl.int64)
    X += of // groups * sxb + of % groups * c * sxc
    G += of // groups * sgb + of % groups * o * sgo
    p = i * BLOCK_P + tl.arange(0, BLOCK_P)
    q = j * BLOCK_P + tl.arange(0, BLOCK_P)
    k_tile = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    h_tile = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    blocks = tl.cdiv(c, BLOCK_K)
    for step in range(0, blocks * KH * KW):
        tap = step // blocks
        dh, dw = (tap // KW) * DH - PH, (tap % KW) * DW - PW
        channel = (step % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
        at_p, seen_p = pixel(p, dh, dw, h, w, width, sxh, sxw, SH, SW)
        at_q, seen_q = pixel(q, dh, dw, h, w, width, sxh, sxw, SH, SW)
        mask_p = (seen_p & (p < positions))[:, None] & (channel < c)[None, :]
        mask_q = (seen_q & (q < positions))[None, :] & (channel < c)[:, None]
        x_p = tl.load(X + (at_p[:, None] + channel[None, :] * sxc), mask=mask_p, other=0.0)
        x_q = tl.load(X + (at_q[None, :] + channel[:, None] * sxc), mask=mask_q, other=0.0)
        k_tile = multiply(x_p, x_q, k_tile, MODE)
    for start in range(0, o, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        mask_p = (p < positions)[:, None] & (row < o)[None, :]
        mask_q = (q < positions)[None, :] & (row < o)[:, None]
        g_p = tl.load(G + (p[:, None] * sgt + row[None, :] * sgo), mask=mask_p, other=0.0)
        g_q = tl.load(G + (q[None, :] * sgt + row[:, None] * sgo), mask=mask_q, other=0.0)
        h_tile = multiply(g_p, g_q, h_tile, G_MODE)
    OUT += of * room + pair
    product, times = k_tile * h_tile, tl.where(i == j, 1.0, 2.0)
    diagonal = p[:, None] == q[None, :]
    tl.store(OUT, times * tl.sum(product))
    tl.store(OUT + out_s, times * tl.sum(tl.abs(product)))
    tl.store(OUT + 2 * out_s, times * tl.sum(k_tile * k_tile))
    tl.store(OUT + 3 * out_s, times * tl.sum(h_tile * h_tile))
    tl.store(OUT + 4 * out_s, tl.sum(tl.where(diagonal, k_tile, 0.0)))
    tl.store(OUT + 5 * out_s, tl.sum(tl.where(diagonal, h_tile, 0.0)))


@launched(do_not_specialize=["out_s"])
def _finish_pairs(OUT, NORMS, groups, pairs, room, c, m, w_k, w_h, lost_k, lost_h, out_s,
                  BLOCK: tl.constexpr):  # fmt: skip
    """The norm of a sample: of its groups, each clamped at 0 and raised by its bound. Of a group's
    `room` the first `pairs` were written."""
    norm = tl.full([], 0.0, tl.float32)
    for k in range(0, groups):
        at = OUT + (tl.program_id(0).to(tl.int64) * groups + k) * room
        total = ordered_sum(at, pairs, 1, BLOCK, False)
        trace_k = ordered_sum(at + 4 * out_s, pairs, 1, BLOCK, False)
        trace_h = ordered_sum(at + 5 * out_s, pairs, 1, BLOCK, False)
        bound = c * trace_k * trace_h + lost_k * trace_h + lost_h * trace_k
        bound += m * ordered_sum(at + out_s, pairs, 1, BLOCK, False)
        if w_k > 0:
            bound += w_k * trace_k * tl.sqrt_rn(ordered_sum(at + 3 * out_s, pairs, 1, BLOCK, False))
        if w_h > 0:
            bound += w_h * trace_h * tl.sqrt_rn(ordered_sum(at + 2 * out_s, pairs, 1, BLOCK, False))
        norm += tl.where(total < 0, 0.0, total) + bound  # NaN stays, as with no maximum
    tl.store(NORMS + tl.program_id(0), norm)


def conv_norm(
    x: Tensor, g: Tensor, geometry: ConvGeometry, keep: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """As fastclip.ops.conv_norm: x [b, c, *space], g [b, o, *out] of any strides -> [b]; with `keep`,
    also the per-sample gradients, float32, with adjacent channels."""
    call = arguments(x, g, geometry)
    if call is None:
        return NotImplemented
    x, g, sizes, constants = call
    c, o, h, w, positions, width, groups, _ = sizes
    b, taps = x.shape[0], constants["KH"] * constants["KW"]
    norms = torch.zeros(b, dtype=torch.float32, device=x.device)
    if not x.numel() or not g.numel():
        return (norms, norms.new_zeros(b, *geometry.weight_shape)) if keep else norms
    mode = product_mode(x, g)
    native = mode == "native"  # larger float32 tiles spill
    side = 128 if native or generation() == "hopper" else 64
    blocks, (row_tiles, col_tiles) = tiles_of(c, o, taps, side, 128 if native else 64)
    tiles = groups * row_tiles * col_tiles
    out = norms.new_empty(3, b, tiles)
    grads = norms.new_empty(b, groups * o, taps, c) if keep else norms
    _norm_tiles[(b * tiles,)](
        x, g, out, grads, *sizes, row_tiles, col_tiles, b * tiles, work_class(b * tiles),
        *x.stride(), *g.stride(), KEEP=keep, MODE=mode, **blocks, **constants,
    )  # fmt: skip
    unseen = None
    if not sees_all(geometry, (h, w), (positions // width, width)):
        # Pixels in no patch are not part of the gradient. A non-finite one must still be noticed, as
        # in the reference.
        unseen = taps**0.5 * torch.linalg.vector_norm(x, dim=(1, 2, 3), dtype=torch.float32)
    m, wide = one_sided(positions, mode)
    _finish_tiles[(b,)](
        out, unseen, norms, tiles, 1 + UNIT * (m + TILE_SUM / 2),
        UNIT * (PRODUCT_ERROR_FACTOR + positions * wide), b * tiles, BLOCK=_block(tiles),
    )  # fmt: skip
    return (norms, grads.transpose(2, 3).unflatten(3, geometry.kernel)) if keep else norms


def conv_ghost_norm(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """As fastclip.ops.conv_ghost_norm: x [b, c, *space], g [b, o, *out] of any strides -> [b]."""
    call = arguments(x, g, geometry)
    if call is None or call[2][4] > MAX_GHOST:
        return NotImplemented
    x, g, sizes, constants = call
    c, o, _, _, positions, _, groups, _ = sizes
    b, features = x.shape[0], c * constants["KH"] * constants["KW"]
    norms = torch.zeros(b, dtype=torch.float32, device=x.device)
    if not x.numel() or not g.numel():
        return norms
    room, pairs = _pairs_of_tiles(positions, GHOST_TILE), 0
    out = norms.new_empty(6, b * groups, room)
    modes = product_mode(x, x), product_mode(g, g)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        nonlocal pairs
        pairs = _pairs_of_tiles(positions, meta["BLOCK_P"])
        return (b * groups * pairs,)

    _pairs[grid](
        x, g, out, *sizes, room, out.stride(0), work_class(b * groups * room), *x.stride(),
        *g.stride(), MODE=modes[0], G_MODE=modes[1], **constants,
    )  # fmt: skip
    (m_k, w_k), (m_h, w_h) = one_sided(features, modes[0]), one_sided(o, modes[1])
    alike = m_k + m_h + TILE_SUM + summed(positions)
    bounds = (UNIT * n for n in (GRAM_ERROR_FACTOR, alike, features * w_k, o * w_h))
    lost = (lost_squares(positions * n, torch.float32) for n in (features, o))
    _finish_pairs[(b,)](
        out, norms, groups, pairs, room, *bounds, *lost, out.stride(0), BLOCK=_block(pairs)
    )
    return norms


def _pairs_of_tiles(positions: int, block: int) -> int:
    tiles = cdiv(positions, block)
    return tiles * (tiles + 1) // 2


def _block(columns: int) -> int:
    return min(1024, max(32, next_power_of_2(columns)))


# -------------------------------------------------------------------------------------------------
# Clipped sums of Conv2d (Conv1d as height 1): one pass over x and g in place, never unfolding.
#
#     W[o, (c, kh, kw)] = sum_b s_b sum_t g_b[o, t] patch_b[t, (c, kh, kw)]
#
# Index letters and patches as in conv_norm; splits, and what is rounded when, as in scaled_sum. An
# implicit GEMM over the positions of all samples: a program takes a tile of W and one of `splits`
# stretches of (b, t); partial sums are added in fixed order. Nothing is rounded before a product:
# - 16-bit operands are multiplied directly, a few positions of one sample at a time. Each such
#   float32 sum is scaled by one multiply-add: tensor cores truncate, and over a large map the error
#   would exceed the margin of the scales (2^-18);
# - float32 operands, and maps of fewer than FEW positions (a tile then holds many samples), are
#   scaled in float32 as they are loaded; 16-bit operands are then multiplied as three tf32 products.
#
# A sample of scale 0 contributes 0 even if its operands are not finite: its results are not added.
# Its operands are still read: loads that wait for the scale would come one step later. Depthwise
# convolutions, with one row and a few columns per group, use the reference.


FEW = 16
"""Positions from which samples are summed separately: the shortest native product."""
_CONFIGS = [
    triton.Config({"BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for k, warps, stages in (
        (64, 8, 5), (64, 8, 4), (64, 4, 4), (64, 4, 3), (128, 8, 3), (32, 8, 4), (32, 4, 5),
        (STEP, 8, 2),
    )
]  # fmt: skip


def _usable_sum(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Returns usable configurations. For float32 products: steps of the size that the bounds assume,
    which spill with more stages. For 16-bit ones: tiles with wide loads, no longer than the map, that
    leave room for two sums in the registers."""
    if kwargs["MODE"] != "native":
        return [c for c in configs if c.num_stages == 2]
    tile, longest = kwargs["BLOCK_O"] * kwargs["BLOCK_N"], max(32, named["bucket"])
    fits = [c for c in configs if tile <= 64 * 32 * c.num_warps and c.num_stages > 2]
    return loads_wide([c for c in fits if c.kwargs["BLOCK_K"] <= longest], kwargs)


@autotuned(
    _CONFIGS,
    key=["c", "o", "sxc", "bucket", "BLOCK_O", "BLOCK_N", "KH", "KW", "SH", "MODE", "BY_SAMPLE",
         "work"],
    prune=_usable_sum,
)  # fmt: skip
@launched(do_not_specialize=["b", "splits", "bucket", "work"])
def _sum_tiles(X, G, SCALE, OUT, b, splits, work, c, o, h, w, positions, width, groups, bucket,
           row_tiles, col_tiles, out_s, sxb, sxc, sxh, sxw, sgb, sgo, sgt, scale_b,
           BY_SAMPLE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
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
    _sum_tiles[(splits * tiles,)](
        x, g, scale, out, b, splits, work_class(steps), *sizes, row_tiles, col_tiles, out.stride(0),
        *x.stride(), *g.stride(), scale.stride(0), BY_SAMPLE=by_sample, MODE=mode,
        **blocks, **constants,
    )  # fmt: skip
    total = out[0] if splits == 1 else out.sum(0)
    return total.transpose(1, 2).contiguous().view(geometry.weight_shape)

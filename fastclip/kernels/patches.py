"""How kernels of convolutions find the patches of a map, and cut a weight's gradient into tiles.

Columns of a gradient W [o, columns] are ordered (tap, channel). Where there are channels enough a
tile of them belongs to one tap, so that bounds are tested once a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from fastclip.kernels.runtime import cdiv, next_power_of_2


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
    """Of 16-bit products, the configurations that give each thread 16 bytes of either operand to load
    in a step; all, where none does."""
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
    widest = (
        columns if c * taps >= 512 else 64
    )  # enough tiles to fill the device where there are few
    block_n = min(widest, max(16, next_power_of_2(number)))
    tiles = cdiv(o, block_o), cdiv(number, block_n) * (taps if one_tap else 1)
    return {"ONE_TAP": one_tap, "BLOCK_O": block_o, "BLOCK_N": block_n}, tiles

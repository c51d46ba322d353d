"""How convolutions come to their kernels: maps of two dimensions, laid out for wide loads."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastclip.kernels.alignment import WIDE
from fastclip.kernels.runtime import next_power_of_2, runs_on
from fastclip.ops.conv import ConvGeometry
from fastclip.ops.conv_matrices import by_matrices

REACH = 1 << 31
"""Offsets inside a sample are 32-bit."""


def arguments(
    x: Tensor, g: Tensor, geo: ConvGeometry
) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, Any]] | None:
    """x [b, c, h, w], g [b, o, t], the kernels' sizes and constants; None where out of reach."""
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
    """As fastclip.ops.conv_operands: what `arguments` would copy, copied, and what lies as badly for the
    kernels of linear maps; of an input that is copied into matrices anyway, nothing."""
    if len(geometry.kernel) > 2 or not runs_on(x, g):
        return NotImplemented
    pointwise = geometry.is_pointwise and max(geometry.stride) == 1  # its matrix is a view
    cut = by_matrices(geometry) and not pointwise
    laid = x if cut else _map(x, geometry.groups, positions=by_matrices(geometry))
    return laid, _map(g, geometry.groups, positions=True)


def _map(x: Tensor, groups: int, *, positions: bool) -> Tensor:
    """x [b, c, *space] as `_wide` lays it; positions: its kernels know these alone."""
    whole = x.unsqueeze(2) if x.dim() == 3 else x
    h, w = whole.shape[2:]
    regular = whole.stride(2) == w * whole.stride(3) or h == 1
    laid = _wide(whole, groups, positions and regular and h * w % WIDE == 0)
    return laid.squeeze(2) if x.dim() == 3 else laid


def _wide(x: Tensor, groups: int, along: bool = False) -> Tensor:
    """x [b, c, h, w], or the same channels-last if it has 16 bits a value, and neither its channels
    nor its positions (`along`) can be loaded 16 bytes at a time as they lie. The copy reads and writes
    x once, where the kernels read it once a tap and tile."""
    lies_well = x.stride(1) == 1 or (along and x.stride(3) == 1)
    if x.element_size() != 2 or lies_well or x.shape[1] // groups % WIDE:
        return x
    if (
        x.shape[1:].numel() >= REACH
    ):  # of a map that repeats what it holds, as a mean's gradient does
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

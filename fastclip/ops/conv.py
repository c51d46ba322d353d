"""Per-sample norms of convolutions of any rank from the Gram of their pixels, without unfolding it.

Index letters: b sample, c input channel, o output channel; `x` is already padded explicitly where
the padding is not zeros, so `padding` here is the symmetric number of zeros in each dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastclip.ops.bounds import GramNorm, dot_room
from fastclip.ops.dispatch import host_operation, operation
from fastclip.ops.grams import (
    gram_norm,
    gram_size,
    half_dot,
    half_gram,
    row_dot,
    strips_of,
    trace,
)
from fastclip.ops.numerics import widen
from fastclip.ops.precision import in_full_float32


@dataclass(frozen=True)
class ConvGeometry:
    """Shape of a convolution: weight [o, c / groups, *kernel] and how it slides.

    Whatever integers come, it holds Python's: unsigned ones of NumPy, which torch takes, have no -1.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __post_init__(self) -> None:
        for name in ("weight_shape", "stride", "padding", "dilation"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        object.__setattr__(self, "groups", int(self.groups))

    @cached_property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]

    @cached_property
    def is_pointwise(self) -> bool:
        return all(k == 1 for k in self.kernel) and not any(self.padding)

    @cached_property
    def is_apart(self) -> bool:
        """No pixel is in two patches and none is padding: a linear map of the patches."""
        sides = zip(self.kernel, self.stride, self.dilation, strict=True)
        apart = all(k == 1 or (k <= s and d == 1) for k, s, d in sides)
        return apart and self.groups == 1 and not any(self.padding)


@operation
def conv_operands(x: Tensor, g: Tensor, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """x and g in the memory format in which norms and sums read them, so that it is changed once."""
    return x, g


def strided(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The pixels of x [b, c, *space] that a pointwise convolution looks at."""
    index: list[Any] = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    return x[tuple(index)]


@operation
@in_full_float32
def conv_ghost_norm(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Squared norm of each sample's weight gradient from the pixel Gram.

    With P = X^T X over pixels, the Gram of the patches is a sum of shifted copies of P,
    patch[p, q] = sum_delta P[s p + dil delta, s q + dil delta]: k^dims times less matmul than
    unfolding. The sum over delta is taken one dimension at a time.

    Args:
        x: layer input, [b, c, *space]. g: gradient of the output, [b, o, *out].

    Returns:
        [b].
    """
    if not x.shape[0]:
        return widen(x).new_zeros(0)
    norms = conv_ghost_parts(x, g, geometry).raised()
    return norms.view(-1, geometry.groups).sum(1)


@in_full_float32
def conv_ghost_parts(x: Tensor, g: Tensor, geometry: ConvGeometry) -> GramNorm:
    """What `conv_ghost_norm` makes of its arguments, [b * groups], to be raised with others."""
    x, g = widen(x), widen(g)
    b, out, groups = x.shape[0], g.shape[2:], geometry.groups
    if geometry.is_pointwise:
        x = strided(x, geometry.stride)
    pixels = x.reshape(b * groups, x.shape[1] // groups, -1).transpose(1, 2)
    g = g.reshape(b * groups, g.shape[1] // groups, -1).transpose(1, 2)
    out_channels, in_channels = geometry.weight_shape[:2]
    d, p = torch.Size(geometry.kernel).numel() * in_channels, out_channels // groups
    if geometry.is_pointwise:
        return gram_norm(half_gram(pixels), g, d)
    pixels, outputs = half_gram(pixels), half_gram(g)
    total, norm_x, sizes = patch_products(pixels, outputs, tuple(x.shape[2:]), tuple(out), geometry)
    # A Gram of patches is a sum of as many pieces of one of pixels as there are taps.
    taps, t = d // in_channels, outputs.shape[1]
    absolute = (taps * sizes).to(total.dtype)
    dots = dot_room(in_channels, p, g) + taps / 4
    return GramNorm(total, norm_x, trace(outputs), absolute, t, t * d, t * p, dots)


@host_operation
@in_full_float32
def patch_products(
    pixels: Tensor, outputs: Tensor, space: tuple[int, ...], out: tuple[int, ...],
    geometry: ConvGeometry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Inner product of the patches' Gram with another one, and its trace; and how large both Grams are.

    Args:
        pixels: `half_gram` of the pixels, [n, prod(space), prod(space)]. outputs: another one,
            [n, prod(out), prod(out)].
        space: of the input. out: of the output.

    Returns:
        [n] and [n]; and no less than the product of the Frobenius norms of `pixels` and `outputs`,
        float64 [n].
    """
    sizes = gram_size(pixels) * gram_size(outputs)
    patches = _slide(pixels, space, out, geometry)
    whole = strips_of(pixels.shape[1]) == strips_of(outputs.shape[1]) == 1
    return (row_dot if whole else half_dot)(patches, outputs), trace(patches), sizes


def _slide(pixels: Tensor, space: Sequence[int], out: Sequence[int], geo: ConvGeometry) -> Tensor:
    """Pixel Gram [n, prod(space), prod(space)] to patch Gram [n, prod(out), prod(out)].

    Padding is never stored: an offset adds only where its window lies inside the image.
    """
    dims = len(space)
    grams = pixels.view(-1, *space, *space)
    for axis in range(dims):
        sizes = list(grams.shape)
        sizes[1 + axis] = sizes[1 + dims + axis] = out[axis]
        total = None
        for to, of in windows(axis, space[axis], out[axis], geo):
            index: list[slice] = [slice(None)] * (1 + 2 * dims)
            index[1 + axis] = index[1 + dims + axis] = of
            window = grams[tuple(index)]
            if total is None and list(window.shape) == sizes:
                total = window.clone()
                continue
            total = grams.new_zeros(sizes) if total is None else total
            index[1 + axis] = index[1 + dims + axis] = to
            total[tuple(index)] += window
        grams = grams.new_zeros(sizes) if total is None else total
    positions = torch.Size(out).numel()
    return grams.reshape(-1, positions, positions)


def windows(axis: int, space: int, out: int, geo: ConvGeometry) -> list[tuple[slice, slice]]:
    """Of every offset of the kernel: which outputs see the image, and where; the widest first."""
    found = []
    for offset in range(geo.kernel[axis]):
        stride, start = geo.stride[axis], offset * geo.dilation[axis] - geo.padding[axis]
        first = max(0, -(start // stride))  # smallest o with stride * o + start >= 0
        last = min(out - 1, (space - 1 - start) // stride)
        if last >= first:
            of = slice(stride * first + start, stride * last + start + 1, stride)
            found.append((slice(first, last + 1), of))
    return sorted(found, key=lambda pair: pair[0].start - pair[0].stop)


def conv_unit_ghost_norm(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """The same from the pixel Gram: the rows are one more dimension, along which the kernel is 1."""
    o, c, *kernel = geometry.weight_shape
    deeper = ConvGeometry(
        (o, c, 1, *kernel), (1, *geometry.stride), (0, *geometry.padding), (1, *geometry.dilation),
        geometry.groups,
    )  # fmt: skip
    return conv_ghost_norm(x.transpose(1, 2), g.transpose(1, 2), deeper)

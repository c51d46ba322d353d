"""Per-sample norms and clipped sums of convolutions of any rank, without unfolding the input.

Index letters: b sample, c input channel, o output channel; `x` is already padded explicitly where
the padding is not zeros, so `padding` here is the symmetric number of zeros in each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastclip.ops.bounds import GramNorm, ProductNorm, dot_room, product_slack
from fastclip.ops.dispatch import computes_reference, host_operation, operation
from fastclip.ops.grams import (
    LastInput,
    gram_norm,
    gram_size,
    half_dot,
    half_gram,
    row_dot,
    strips_of,
    trace,
)
from fastclip.ops.numerics import drop_zeroed, row_norm_sq, samples_at_once, widen
from fastclip.ops.precision import in_full_float32


@dataclass(frozen=True)
class ConvGeometry:
    """Shape of a convolution: weight [o, c / groups, *kernel] and how it slides."""

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]

    @property
    def is_pointwise(self) -> bool:
        return all(k == 1 for k in self.kernel) and not any(self.padding)


@operation
def conv_operands(x: Tensor, g: Tensor, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """x and g in the memory format in which norms and sums read them, so that it is changed once."""
    return x, g


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
        x = _stride(x, geometry.stride)
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
    dots = dot_room(in_channels, p) + taps / 4
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


def conv_per_sample_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Every sample's weight gradient, [b, *weight_shape], in the accumulation type."""
    return wide_conv_gradients(widen(x), widen(g), geometry)


def kept_conv_gradients(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[Tensor, ProductNorm]:
    """The same with their norms, to be raised with others."""
    found, total, of_x, of_g = conv_gradients_with_norms(widen(x), widen(g), geometry, last_input)
    return found, ProductNorm(total, of_x, of_g, torch.Size(geometry.kernel).numel())


@host_operation
def conv_gradients_with_norms(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`wide_conv_gradients`, and squared norms [b]: of them, of x and of g."""
    found = wide_conv_gradients(x, g, geometry)
    return found, row_norm_sq(found), last_input.norm_sq(x), row_norm_sq(g)


@host_operation
@in_full_float32
def wide_conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """`conv_per_sample_gradients` of operands in their accumulation type: samples as groups."""
    b, groups = x.shape[0], geometry.groups
    out_channels, in_channels = geometry.weight_shape[:2]
    if not b:
        return x.new_zeros(0, *geometry.weight_shape)
    if geometry.is_pointwise:
        x = _stride(x, geometry.stride)
        a = x.reshape(b * groups, in_channels, -1)
        gradient = torch.bmm(g.reshape(b * groups, out_channels // groups, -1), a.transpose(1, 2))
        return gradient.view(b, *geometry.weight_shape)
    if _slides_faster(x, geometry):
        return _slid(x, g, geometry)
    x = x.reshape(1, b * groups * in_channels, *x.shape[2:])
    g = g.reshape(1, b * out_channels, *g.shape[2:])
    gradient = _weight_gradient(x, g, geometry, groups=b * groups, out_channels=b * out_channels)
    return gradient.reshape(b, *geometry.weight_shape)


def _slides_faster(x: Tensor, geometry: ConvGeometry) -> bool:
    """Depthwise, on a CPU: a convolution with g for its kernel takes a tenth of torch's own gradient."""
    return geometry.weight_shape[1] == 1 and x.device.type == "cpu"


def _slid(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Every sample's weight gradient where a channel sees one channel: g slides over x."""
    b, dims = x.shape[0], len(geometry.kernel)
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    image = x.reshape(1, b * geometry.groups, *x.shape[2:])
    kernel = g.reshape(b * geometry.weight_shape[0], 1, *g.shape[2:])
    # strides and dilations change places; what lies behind the kernel is left out
    taps = conv(
        image, kernel, None, geometry.dilation, geometry.padding, geometry.stride,
        b * geometry.groups,
    )  # fmt: skip
    corner: tuple[Any, ...] = (..., *(slice(k) for k in geometry.kernel))
    taps = taps[corner]
    return taps.reshape(b, *geometry.weight_shape)


def _stride(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The pixels of x [b, c, *space] that a pointwise convolution looks at."""
    index: list[Any] = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    return x[tuple(index)]


@operation
@in_full_float32
def conv_norm(
    x: Tensor, g: Tensor, geometry: ConvGeometry, keep: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Squared norm of each sample's weight gradient, [b], by instantiating it a few at a time; with
    `keep`, that and the gradients, [b, *weight_shape], all of them."""
    taps = torch.Size(geometry.kernel).numel()
    if keep:
        gradients = conv_per_sample_gradients(x, g, geometry)
        return (row_norm_sq(gradients).sqrt() + product_slack(x, g, taps)).square(), gradients
    rows = samples_at_once(torch.Size(geometry.weight_shape).numel(), x.device)
    parts = [
        row_norm_sq(conv_per_sample_gradients(xs, gs, geometry))
        for xs, gs in zip(x.split(rows), g.split(rows), strict=True)
    ]
    if not parts:
        return widen(x).new_zeros(0)
    return (torch.cat(parts).sqrt() + product_slack(x, g, taps)).square()


@in_full_float32
def conv_unit_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """The sums of the weight gradients of n rows each: x [u, n, c, *space], g [u, n, o, *out].

    Returns:
        [u, *weight_shape].
    """
    x, g = widen(x), widen(g)
    (u, n), groups = x.shape[:2], geometry.groups
    out_channels, in_channels = geometry.weight_shape[:2]
    if not u or n == 1 or (not geometry.is_pointwise and _slides_faster(x, geometry)):
        rows = conv_per_sample_gradients(x.flatten(0, 1), g.flatten(0, 1), geometry)
        return rows.unflatten(0, (u, n)).sum(1)
    if geometry.is_pointwise:
        x = _stride(x.flatten(0, 1), geometry.stride).unflatten(0, (u, n))
        a, b = (
            y.reshape(u, n, groups, channels, -1).permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)
            for y, channels in ((x, in_channels), (g, out_channels // groups))
        )
        return torch.bmm(b, a.transpose(1, 2)).view(u, *geometry.weight_shape)
    if x.device.type == "cpu":  # a tenth of the time that samples as groups take
        pairs = zip(x, g, strict=True)
        return torch.stack([_weight_gradient(*p, geometry, groups, out_channels) for p in pairs])
    x, g = (y.transpose(0, 1).flatten(1, 2) for y in (x, g))
    gradient = _weight_gradient(x, g, geometry, groups=u * groups, out_channels=u * out_channels)
    return gradient.reshape(u, *geometry.weight_shape)


def conv_gradients_apart(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """`conv_per_sample_gradients` of a few samples after the other: the same numbers each time."""
    native = x.element_size() == g.element_size() == 2 and not computes_reference(x)
    step = samples_at_once(torch.Size(geometry.weight_shape).numel(), x.device)
    for xs, gs in zip(x.split(step), g.split(step), strict=True):
        if native:
            yield conv_norm(xs, gs, geometry, keep=True)[1]
        else:
            yield conv_per_sample_gradients(xs, gs, geometry)


def conv_unit_gradients_apart(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """`conv_unit_gradients` of a few units after the other: the same numbers each time."""
    step = samples_at_once(torch.Size(geometry.weight_shape).numel(), x.device)
    for xs, gs in zip(x.split(step), g.split(step), strict=True):
        yield conv_unit_gradients(xs, gs, geometry)


def conv_unit_ghost_norm(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """The same from the pixel Gram: the rows are one more dimension, along which the kernel is 1."""
    o, c, *kernel = geometry.weight_shape
    deeper = ConvGeometry(
        (o, c, 1, *kernel), (1, *geometry.stride), (0, *geometry.padding), (1, *geometry.dilation),
        geometry.groups,
    )  # fmt: skip
    return conv_ghost_norm(x.transpose(1, 2), g.transpose(1, 2), deeper)


@operation
@in_full_float32
def conv_sum(x: Tensor, g: Tensor, scale: Tensor, geometry: ConvGeometry) -> Tensor:
    """sum_b scale_b times the weight gradient of sample b, of weight_shape; scale is [b]."""
    x, g = drop_zeroed(scale, widen(x), widen(g))
    if not x.shape[0]:
        return x.new_zeros(geometry.weight_shape)
    g = g * scale.to(g.dtype).view(-1, *[1] * (g.dim() - 1))
    if _slides_faster(x, geometry):
        return _slid(x, g, geometry).sum(0)
    return _weight_gradient(x, g, geometry, geometry.groups, geometry.weight_shape[0])


def _weight_gradient(
    x: Tensor, g: Tensor, geo: ConvGeometry, groups: int, out_channels: int
) -> Tensor:
    # Only the shape of the weight enters its own gradient.
    weight = x.new_empty(1).expand(out_channels, *geo.weight_shape[1:])
    return torch.ops.aten.convolution_backward(
        g.contiguous(), x.contiguous(), weight, None, geo.stride, geo.padding, geo.dilation,
        False, [0] * len(geo.stride), groups, [False, True, False],
    )[1]  # fmt: skip

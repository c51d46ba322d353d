"""Per-sample gradients of convolutions of any rank, their norms and their clipped sums.

Index letters and padding: fastclip.ops.conv.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.ops.bounds import ProductNorm, product_slack
from fastclip.ops.conv import ConvGeometry, strided
from fastclip.ops.dispatch import computes_reference, host_operation, operation
from fastclip.ops.grams import LastInput
from fastclip.ops.kept import whole
from fastclip.ops.numerics import drop_zeroed, row_norm_sq, samples_at_once, widen
from fastclip.ops.precision import in_full_float32

_LARGE = 2**18
"""Pairs of channels from which their weights do not stay in a cache."""


def conv_per_sample_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Every sample's weight gradient, [b, *weight_shape], in the accumulation type."""
    return wide_conv_gradients(widen(x), widen(g), geometry)


def kept_conv_gradients(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[list[Tensor], ProductNorm]:
    """The same in parts, some samples after the other, with their norms, to be raised with others."""
    found, total, of_x, of_g = conv_gradients_with_norms(widen(x), widen(g), geometry, last_input)
    return found, ProductNorm(total, of_x, of_g, torch.Size(geometry.kernel).numel())


@host_operation
def conv_gradients_with_norms(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """`wide_conv_gradients`, in parts, and squared norms [b]: of them, of x and of g."""
    found = wide_conv_gradients(x, g, geometry)
    return [found], row_norm_sq(found), last_input.norm_sq(x), row_norm_sq(g)


@host_operation
@in_full_float32
def wide_conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """`conv_per_sample_gradients` of operands in their accumulation type: samples as groups."""
    b, groups = x.shape[0], geometry.groups
    out_channels, in_channels = geometry.weight_shape[:2]
    if not b:
        return x.new_zeros(0, *geometry.weight_shape)
    if geometry.is_pointwise:
        x = strided(x, geometry.stride)
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


@operation
@in_full_float32
def conv_norm(
    x: Tensor, g: Tensor, geometry: ConvGeometry, keep: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Squared norm of each sample's weight gradient, [b], by instantiating it a few at a time; with
    `keep`, that and the gradients, [b, *weight_shape], all of them."""
    if keep:
        parts, norm = kept_conv_gradients(x, g, geometry, LastInput())
        return norm.raised(), whole(parts)
    taps = torch.Size(geometry.kernel).numel()
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
        x = strided(x.flatten(0, 1), geometry.stride).unflatten(0, (u, n))
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
    if _multiplies_faster(x, g, geometry):
        return _multiplied(x, g, geometry)
    return _weight_gradient(x, g, geometry, geometry.groups, geometry.weight_shape[0])


def _multiplies_faster(x: Tensor, g: Tensor, geometry: ConvGeometry) -> bool:
    """On a CPU, where the weights are many and the patches few: torch's own gradient has a form of its
    own for them, which takes longer to write and to read again than the patches."""
    out_channels, channels = geometry.weight_shape[:2]
    if x.device.type != "cpu" or geometry.groups > 1 or out_channels * channels < _LARGE:
        return False
    patch = torch.Size(geometry.weight_shape[1:]).numel()
    if not geometry.is_pointwise:
        if x.dim() != 4:
            return False
        patch *= 3  # they are cut out and laid side by side
    positions = g.shape[0] * g.shape[2:].numel()
    return positions * (patch + out_channels) <= 2 * torch.Size(geometry.weight_shape).numel()


def _multiplied(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """The weight gradient of all samples as one product, over all of their positions."""
    if geometry.is_pointwise:
        patches = strided(x, geometry.stride).flatten(2)
    else:
        patches = F.unfold(x, geometry.kernel, geometry.dilation, geometry.padding, geometry.stride)
    left, right = (y.transpose(0, 1).flatten(1) for y in (g.flatten(2), patches))
    return torch.mm(left, right.t()).view(geometry.weight_shape)


def _weight_gradient(
    x: Tensor, g: Tensor, geo: ConvGeometry, groups: int, out_channels: int
) -> Tensor:
    # Only the shape of the weight enters its own gradient.
    weight = x.new_empty(1).expand(out_channels, *geo.weight_shape[1:])
    return torch.ops.aten.convolution_backward(
        g.contiguous(), x.contiguous(), weight, None, geo.stride, geo.padding, geo.dilation,
        False, [0] * len(geo.stride), groups, [False, True, False],
    )[1]  # fmt: skip

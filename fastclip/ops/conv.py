"""Per-sample norms, gradients and clipped sums of convolutions of any rank.

Index letters: b sample, c input channel, o output channel. `x` is already padded explicitly if the
padding is not zeros, so `padding` here is the symmetric number of zeros in each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.core.numerics import drop_zeroed, in_full_float32, row_norm_sq, samples_at_once, widen
from fastclip.ops.dispatch import computes_reference, host_operation, operation
from fastclip.ops.grams import (
    GramNorm,
    LastInput,
    ProductNorm,
    dot_room,
    gram_norm,
    gram_size,
    half_dot,
    half_gram,
    product_margin,
    row_dot,
    strips_of,
    trace,
)
from fastclip.ops.linear import whole


@dataclass(frozen=True)
class ConvGeometry:
    """Shape of a convolution: weight [o, c / groups, *kernel] and how it slides.

    It holds Python integers: torch also takes unsigned ones of NumPy, which have no -1.
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
        """Whether no pixel is in two patches and none is padding: a linear map of the patches."""
        sides = zip(self.kernel, self.stride, self.dilation, strict=True)
        apart = all(k == 1 or (k <= s and d == 1) for k, s, d in sides)
        return apart and self.groups == 1 and not any(self.padding)


@operation
def conv_operands(x: Tensor, g: Tensor, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """Returns x and g in the memory format of norms and sums, which is then changed once."""
    return x, g


def strided(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns the pixels of x [b, c, *space] that a pointwise convolution reads."""
    index: list[Any] = [slice(None), slice(None), *(slice(None, None, s) for s in stride)]
    return x[tuple(index)]


@operation
@in_full_float32
def conv_ghost_norm(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns the squared norm of each sample's weight gradient from the pixel Gram.

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
    """Returns the norms of `conv_ghost_norm`, [b * groups], to be raised with others."""
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
    # A Gram of patches is a sum of pieces of a Gram of pixels, one per tap.
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
    """Returns the inner product of the patches' Gram with another, its trace and the size of both.

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
    """Converts a pixel Gram [n, prod(space), prod(space)] to a patch Gram [n, prod(out), prod(out)].

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
    """Returns for each offset of the kernel which outputs see the image, and where; the widest first."""
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
    """Does the same from the pixel Gram: a unit's samples are one more dimension, with kernel size 1."""
    o, c, *kernel = geometry.weight_shape
    deeper = ConvGeometry(
        (o, c, 1, *kernel), (1, *geometry.stride), (0, *geometry.padding), (1, *geometry.dilation),
        geometry.groups,
    )  # fmt: skip
    return conv_ghost_norm(x.transpose(1, 2), g.transpose(1, 2), deeper)


# -------------------------------------------------------------------------------------------------
# A convolution as linear maps of its patches: matrices [b, t, d] of inputs and [b, t, p] of
# gradients.
#
# If no pixel is in two patches, they are cut out. Otherwise nothing is unfolded. Row i of the kernel
# sees kw pixels of c channels at a position, which are adjacent in a map whose channels are last. If
# rows are padded to the same width in the map and in the gradient, with zeros there, one stride leads
# from position to position, also from the end of a row of the map to the next:
#
#     a_i[t, (j, c)] = x[s_h h + d_h i - p_h, s_w w + j - p_w, c],   t = h W + w
#
# So W_b[:, :, i] = g_b^T a_i: one linear map per row of the kernel, or per tap if it is dilated. Index
# letters: b sample, t position, c input and o output channel, i and j row and column of the kernel.


_WIDE = 16
"""Channels of 16 bits are padded to a multiple of this, and kernels load them 16 bytes at a time."""


def by_matrices(geometry: ConvGeometry) -> bool:
    """Whether a convolution is few linear maps: it has no groups, and at most two dimensions."""
    return geometry.groups == 1 and len(geometry.kernel) < 3


def matrices(geometry: ConvGeometry) -> int:
    """Returns the number of matrices of `kernel_rows`."""
    (kh, kw), _, _, (_, dw) = _in_two_dimensions(geometry)
    return kh if dw == 1 else kh * kw


def patches_apart(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns the patches of x [b, c, *space] if `geometry.is_apart`, [b, t, c * taps]. It is a view for
    pointwise convolutions without strides."""
    if geometry.is_pointwise and max(geometry.stride) == 1:
        return x.flatten(2).transpose(1, 2)
    dims = len(geometry.kernel)
    for axis, (k, s) in enumerate(zip(geometry.kernel, geometry.stride, strict=True), 2):
        x = x.unfold(axis, k, s)
    positions, taps = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
    x = x.permute(0, *positions, 1, *taps)
    return x.reshape(
        len(x), x.shape[1 : 1 + dims].numel(), torch.Size(geometry.weight_shape[1:]).numel()
    )


def kernel_rows(x: Tensor, g: Tensor, geometry: ConvGeometry) -> tuple[list[Tensor], Tensor]:
    """Returns the matrices of a convolution that is `by_matrices`.

    A sample's zeros lie between its own values and after them: no view reaches another sample's.

    Args:
        x: [b, c, *space]. g: gradient of the output, [b, o, *out].

    Returns:
        The inputs of each row of the kernel, or of each tap, in the kernel's order, each [b, t, d]:
        views of one copy of x. And g as [b, t, o], zero at padded positions.
    """
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = _in_two_dimensions(geometry)
    if x.dim() == 3:
        x, g = x.unsqueeze(2), g.unsqueeze(2)
    (b, c, h, w), (_o, height, width) = x.shape, g.shape[1:]
    channels = -(-c // _WIDE) * _WIDE if x.element_size() == 2 else c
    high, wide = _steps(height, kh, sh, dh), _steps(width, kw, sw, dw)
    # row r of the padded map is row r // sh of plane r % sh
    planes = x.new_zeros(b, sh, high, wide * sw, channels)
    last, right = min(h, high * sh - ph), min(w, wide * sw - pw)
    image = x[..., :right].permute(0, 2, 3, 1)  # [b, h, w, c]
    for plane in range(sh):
        first = (plane - ph) % sh  # of the rows of x, in this plane
        rows = image[:, first:last:sh]
        at = (first + ph) // sh
        planes[:, plane, at : at + rows.shape[1], pw : pw + right, :c] = rows
    positions = (height - 1) * wide + width
    runs = [(0, kw * channels)] if dw == 1 else [(j * dw * channels, channels) for j in range(kw)]
    size, step = planes.stride(2), (planes.stride(0), sw * channels, 1)
    found = []
    for i in range(kh):
        row, plane = divmod(i * dh, sh)
        begin = planes.storage_offset() + plane * planes.stride(1) + row * size
        found += [planes.as_strided((b, positions, n), step, begin + j) for j, n in runs]
    return found, _laid(g, wide)[:, :positions]


def of_kernel_rows(blocks: Sequence[Tensor], geometry: ConvGeometry) -> Tensor:
    """Returns weights [..., *weight_shape] from the results for the matrices of `kernel_rows`.

    Args:
        blocks: of every matrix, [..., o, d].
    """
    o, c = geometry.weight_shape[:2]
    (kh, kw), lead = _in_two_dimensions(geometry)[0], blocks[0].shape[:-2]
    channels = sum(x.shape[-1] for x in blocks) // (kh * kw)
    taps = torch.cat(list(blocks), -1) if len(blocks) > 1 else blocks[0]
    taps = taps.view(*lead, o, kh * kw, channels)[..., :c]
    return taps.transpose(-1, -2).contiguous().view(*lead, *geometry.weight_shape)


def _in_two_dimensions(geometry: ConvGeometry) -> list[tuple[int, ...]]:
    """Returns kernel, stride, padding and dilation; one dimension becomes a map of height 1."""
    window = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    if len(geometry.kernel) == 2:
        return list(window)
    return [(neutral, *n) for neutral, n in zip((1, 1, 0, 1), window, strict=True)]


def _steps(out: int, kernel: int, stride: int, dilation: int) -> int:
    """Returns the number of strides that cover the inputs of `out` positions of a kernel."""
    return out - 1 + -(-((kernel - 1) * dilation + 1) // stride)


def _laid(g: Tensor, wide: int) -> Tensor:
    """Returns g [b, o, h, w] as [b, h * wide, o], zero beyond w."""
    b, o, height, width = g.shape
    if wide == width:
        return g.flatten(2).transpose(1, 2)
    laid = g.new_zeros(b, height, wide, o)
    laid[:, :, :width] = g.permute(0, 2, 3, 1)
    return laid.flatten(1, 2)


# -------------------------------------------------------------------------------------------------
# Per-sample gradients of convolutions of any rank, their norms and their clipped sums.
#
# Index letters and padding: fastclip.ops.conv.


_LARGE = 2**18
"""Pairs of channels from which their weights do not fit into a cache."""


def conv_per_sample_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns per-sample weight gradients, [b, *weight_shape], in the accumulation type."""
    return wide_conv_gradients(widen(x), widen(g), geometry)


def kept_conv_gradients(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[list[Tensor], ProductNorm]:
    """Returns the same in parts of some samples, with their norms, to be raised with others."""
    found, total, of_x, of_g = conv_gradients_with_norms(widen(x), widen(g), geometry, last_input)
    return found, ProductNorm(total, of_x, of_g, torch.Size(geometry.kernel).numel())


@host_operation
def conv_gradients_with_norms(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Returns `wide_conv_gradients` in parts, and squared norms [b] of them, of x and of g."""
    found = wide_conv_gradients(x, g, geometry)
    return [found], row_norm_sq(found), last_input.norm_sq(x), row_norm_sq(g)


@host_operation
@in_full_float32
def wide_conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """`conv_per_sample_gradients` of operands in their accumulation type, with samples as groups."""
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
    """Whether sliding g is faster: depthwise on a CPU, where it takes a tenth of torch's time."""
    return geometry.weight_shape[1] == 1 and x.device.type == "cpu"


def _slid(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns per-sample weight gradients if each channel sees one channel: g slides over x."""
    b, dims = x.shape[0], len(geometry.kernel)
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    image = x.reshape(1, b * geometry.groups, *x.shape[2:])
    kernel = g.reshape(b * geometry.weight_shape[0], 1, *g.shape[2:])
    # strides and dilations are exchanged; entries behind the kernel are left out
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
    """Returns squared norms of per-sample weight gradients, [b], by instantiating a few at a time; with
    `keep`, also all gradients, [b, *weight_shape]."""
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
    return (torch.cat(parts).sqrt() + product_margin(x, g, taps)).square()


@in_full_float32
def conv_unit_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns sums of the weight gradients of n samples each: x [u, n, c, *space], g [u, n, o, *out].

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
    if x.device.type == "cpu":  # a tenth of the time with samples as groups
        pairs = zip(x, g, strict=True)
        return torch.stack([_weight_gradient(*p, geometry, groups, out_channels) for p in pairs])
    x, g = (y.transpose(0, 1).flatten(1, 2) for y in (x, g))
    gradient = _weight_gradient(x, g, geometry, groups=u * groups, out_channels=u * out_channels)
    return gradient.reshape(u, *geometry.weight_shape)


def conv_gradients_apart(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """Yields `conv_per_sample_gradients` of a few samples at a time, with the same numbers each time."""
    native = x.element_size() == g.element_size() == 2 and not computes_reference(x)
    step = samples_at_once(torch.Size(geometry.weight_shape).numel(), x.device)
    for xs, gs in zip(x.split(step), g.split(step), strict=True):
        if native:
            yield conv_norm(xs, gs, geometry, keep=True)[1]
        else:
            yield conv_per_sample_gradients(xs, gs, geometry)


def conv_unit_gradients_apart(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Iterator[Tensor]:
    """Yields `conv_unit_gradients` of a few units at a time, with the same numbers each time."""
    step = samples_at_once(torch.Size(geometry.weight_shape).numel(), x.device)
    for xs, gs in zip(x.split(step), g.split(step), strict=True):
        yield conv_unit_gradients(xs, gs, geometry)


@operation
@in_full_float32
def conv_sum(x: Tensor, g: Tensor, scale: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns sum_b scale_b times the weight gradient of sample b, of weight_shape; scale is [b]."""
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
    """Whether a product is faster: on a CPU, with many weights and few patches. Torch's own gradient
    writes and reads them in another format, which takes longer than the patches."""
    out_channels, channels = geometry.weight_shape[:2]
    if x.device.type != "cpu" or geometry.groups > 1 or out_channels * channels < _LARGE:
        return False
    patch = torch.Size(geometry.weight_shape[1:]).numel()
    if not geometry.is_pointwise:
        if x.dim() != 4:
            return False
        patch *= 3  # they are cut out and joined
    positions = g.shape[0] * g.shape[2:].numel()
    return positions * (patch + out_channels) <= 2 * torch.Size(geometry.weight_shape).numel()


def _multiplied(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """Computes the weight gradient of all samples as one product, over all of their positions."""
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

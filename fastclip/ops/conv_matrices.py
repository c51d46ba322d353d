"""A convolution as linear maps of its patches: matrices [b, t, d] of inputs and [b, t, p] of gradients.

Where no pixel is in two patches, they are cut out. Elsewhere nothing is unfolded: what row i of the
kernel sees at a position, kw pixels of c channels, lies side by side in a map whose channels are last,
and one stride leads from position to position, also from the end of a row of the map to the next, if
rows are padded to the same width in the map and in the gradient, with zeros there:

    a_i[t, (j, c)] = x[s_h h + d_h i - p_h, s_w w + j - p_w, c],   t = h W + w

So W_b[:, :, i] = g_b^T a_i: a linear map for every row of the kernel, and, of a dilated kernel, for
every tap. Index letters: b sample, t position, c input and o output channel, i and j row and column of
the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip.ops.conv import ConvGeometry

_WIDE = 16
"""Channels of 16 bits are filled up to a multiple of this: so kernels load them 16 bytes at a time."""


def by_matrices(geometry: ConvGeometry) -> bool:
    """Whether a convolution is few linear maps: it has no groups, and at most two dimensions."""
    return geometry.groups == 1 and len(geometry.kernel) < 3


def matrices(geometry: ConvGeometry) -> int:
    """How many `kernel_rows` gives."""
    (kh, kw), _, _, (_, dw) = _in_two_dimensions(geometry)
    return kh if dw == 1 else kh * kw


def patches_apart(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """The patches of x [b, c, *space] where `geometry.is_apart`, [b, t, c * taps]; of pointwise
    convolutions without strides a view."""
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
    """Matrices of a convolution that is `by_matrices`.

    A sample's zeros stand between its own numbers and after them: no view reaches another sample's.

    Args:
        x: [b, c, *space]. g: gradient of the output, [b, o, *out].

    Returns:
        What every row of the kernel sees, or every tap, in the order of the kernel, each [b, t, d]:
        views of one copy of x; and g as [b, t, o], zero at positions that are none.
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
    """The weight, or weights, [..., *weight_shape] of what the matrices of `kernel_rows` give.

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
    """Kernel, stride, padding and dilation; of one dimension as a map of height 1."""
    window = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    if len(geometry.kernel) == 2:
        return list(window)
    return [(neutral, *n) for neutral, n in zip((1, 1, 0, 1), window, strict=True)]


def _steps(out: int, kernel: int, stride: int, dilation: int) -> int:
    """Strides that hold all that `out` positions of a kernel see."""
    return out - 1 + -(-((kernel - 1) * dilation + 1) // stride)


def _laid(g: Tensor, wide: int) -> Tensor:
    """g [b, o, h, w] as [b, h * wide, o], zero beyond w."""
    b, o, height, width = g.shape
    if wide == width:
        return g.flatten(2).transpose(1, 2)
    laid = g.new_zeros(b, height, wide, o)
    laid[:, :, :width] = g.permute(0, 2, 3, 1)
    return laid.flatten(1, 2)

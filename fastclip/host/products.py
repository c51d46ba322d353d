"""Launchers of fastclip._host's products on a CPU: per-sample gradients with their norms, half Grams,
and the backward passes of LayerNorm and GroupNorm.

They compute a sample on one thread, in vectors of the best instructions that the processor has, and
decline fewer samples than threads, other types than float32, what does not lie in memory, and shapes
that do not belong together, which are the reference's to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip import _host
from fastclip._torch import invents
from fastclip.host.plain import all_lie_here
from fastclip.memory import lies_on_host, loop_threads, pointer
from fastclip.ops.bounds import GramNorm, column, dot_room
from fastclip.ops.conv import ConvGeometry
from fastclip.ops.grams import LastInput, strips_of

LANES: int = next(iter(_host.product_lanes()), 0)
"""Numbers of a vector; 0 where the processor has none that serve."""
PART = 2 << 20
"""Bytes of gradients that lie together: smaller than activations, into whose places they go."""


Gradients = tuple[list[Tensor], Tensor, Tensor, Tensor]
"""Of all samples, in parts; squared norms [b]: of them, and of both operands."""


def _takes(*operands: Tensor) -> bool:
    return _lie_here(*operands) and len(operands[0]) >= loop_threads()


def _lie_here(*operands: Tensor) -> bool:
    return all_lie_here(operands) and not invents()


def _operand(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [b, r, n] with numbers of a row side by side, and how it lies there."""
    of_sample, of_row, of_number = x.stride()
    if of_number != 1:
        x = x.contiguous()
        of_sample, of_row, _ = x.stride()
    return x, (x.data_ptr(), of_sample, of_row)


def _positions(x: Tensor) -> tuple[Tensor, tuple[int, int, int], bool]:
    """x [b, t, d], how it lies in memory, and whether that is as [b, d, t]."""
    of_sample, of_position, of_number = x.stride()
    if of_number != 1 and of_position == 1:
        return x, (x.data_ptr(), of_sample, of_number), True
    return *_operand(x), False


def wide_gradients(a: Tensor, g: Tensor) -> Tensor:
    """fastclip.ops.linear.wide_gradients."""
    found = _linear_gradients(a, g, len(a))
    return found if found is NotImplemented else found[0][0]


def gradients_with_norms(a: Tensor, g: Tensor, last_input: LastInput) -> Gradients:
    """fastclip.ops.linear.gradients_with_norms, all of it in one go."""
    return _linear_gradients(a, g, _together(a.shape[-1] * g.shape[-1]))


def _linear_gradients(a: Tensor, g: Tensor, each: int) -> Gradients:
    if not _takes(a, g) or a.dim() != 3 or g.dim() != 3 or a.shape[:2] != g.shape[:2]:
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    (a, of_a), (g, of_g) = _operand(a), _operand(g)
    found, norms = _parts(b, each, p, d), _empty(b, 3, dtype=torch.float64)
    _host.linear_gradients(
        of_a, of_g, _addresses(found), len(found[0]), norms.data_ptr(), b, t, d, p, LANES,
        loop_threads(),
    )  # fmt: skip
    total, first, second = norms.float().unbind(1)
    return found, total, first, second


def wide_conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """fastclip.ops.conv_gradients.wide_conv_gradients."""
    found = _conv_gradients(x, g, geometry, len(x))
    return found if found is NotImplemented else found[0][0]


def conv_gradients_with_norms(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> Gradients:
    """fastclip.ops.conv_gradients.conv_gradients_with_norms, where channels are of one group."""
    return _conv_gradients(x, g, geometry, _together(torch.Size(geometry.weight_shape).numel()))


def _conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry, each: int) -> Gradients:
    if geometry.groups > 1 or not _takes(x, g) or not _slides(x, g, geometry):
        return NotImplemented
    x, g, b = x.contiguous(), g.contiguous(), len(x)
    out_channels, channels = geometry.weight_shape[:2]
    sizes = [
        _three(x.shape[2:], 1), _three(g.shape[2:], 1), _three(geometry.kernel, 1),
        _three(geometry.stride, 1), _three(geometry.padding, 0), _three(geometry.dilation, 1),
    ]  # fmt: skip
    found, norms = _parts(b, each, *geometry.weight_shape), _empty(b, 3, dtype=torch.float64)
    _host.conv_gradients(
        x.data_ptr(), g.data_ptr(), _addresses(found), len(found[0]), norms.data_ptr(), b, channels,
        out_channels, sizes, LANES, loop_threads(),
    )  # fmt: skip
    total, first, second = norms.float().unbind(1)
    return found, total, first, second


def parted_sum(parts: Sequence[Tensor], scale: Tensor) -> Tensor:
    """fastclip.ops.kept.parted_sum, of parts that lie in memory."""
    if type(parts) is not list or not parts or not (lies_on_host(scale) and _lie_here(*parts)):
        return NotImplemented
    (each, *shape), lengths = parts[0].shape, [len(part) for part in parts]
    alike = all(part.is_contiguous() and list(part.shape[1:]) == shape for part in parts)
    in_order = lengths[:-1] == [each] * (len(parts) - 1) and lengths[-1] <= each
    if not (alike and in_order and scale.shape == (sum(lengths),)):
        return NotImplemented
    scale, found = scale.to(torch.float32).contiguous(), _empty(*shape)
    _host.weighted_sum(
        _addresses(parts), each, scale.data_ptr(), found.data_ptr(), len(scale), found.numel(), LANES,
        loop_threads(),
    )  # fmt: skip
    return found


def layer_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """fastclip.ops.layer_norm_backward, from one read of x and g."""
    if x.dim() != 3 or mean.shape != x.shape[:2]:
        return NotImplemented
    b, t, c = x.shape
    loop = _host.layer_norm_backward
    return _norm_backward(loop, (x, g, mean, rstd), weight, c, need_input, (b, t, c))


def group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """fastclip.ops.group_norm_backward, from one read of x and g."""
    if x.dim() != 3 or mean.dim() != 2 or len(mean) != len(x):
        return NotImplemented
    (b, c, t), k = x.shape, mean.shape[1]
    if not k or c % k:
        return NotImplemented
    loop = _host.group_norm_backward
    return _norm_backward(loop, (x, g, mean, rstd), weight, c, need_input, (b, c, k, t))


def _norm_backward(
    loop: Callable[..., None], given: tuple[Tensor, ...], weight: Tensor | None, c: int,
    need_input: bool, sizes: tuple[int, ...],
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """What a loop makes of x, g, mean and rstd, where c numbers of a sample have weights."""
    x, g, mean, rstd = given
    given = given if weight is None else (*given, weight)
    if not _takes(*given) or x.shape != g.shape or mean.shape != rstd.shape:
        return NotImplemented
    if weight is not None and weight.shape != (c,):
        return NotImplemented
    laid = [one.contiguous() for one in given]
    dx, (dw, db) = _empty(*x.shape) if need_input else None, _empty(2, len(x), c)
    addresses = [*_addresses(laid), *[0] * (5 - len(laid)), pointer(dx), *_addresses((dw, db))]
    loop(*addresses, *sizes, LANES, loop_threads())
    return dx, dw, db


def wide_gram(x: Tensor) -> Tensor:
    """fastclip.ops.grams.wide_gram, of which half is computed, and no other half is left out."""
    if not _takes(x) or x.dim() != 3:
        return NotImplemented
    b, t, d = x.shape
    x, of_x, side_by_side = _positions(x)
    found = _empty(b, t, t)
    _host.half_gram(
        of_x, side_by_side, found.data_ptr(), b, t, d, strips_of(t), LANES,
        loop_threads(),
    )  # fmt: skip
    return found


def gram_dots(gram_a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fastclip.ops.grams.gram_dots; the Gram of g is never in memory."""
    if not _takes(gram_a, g) or g.dim() != 3 or gram_a.shape != (*g.shape[:2], g.shape[1]):
        return NotImplemented
    b, t, p = g.shape
    gram_a = gram_a.contiguous()
    g, of_g, side_by_side = _positions(g)
    found = _empty(b, 4, dtype=torch.float64)
    _host.gram_dots(
        gram_a.data_ptr(), of_g, side_by_side, found.data_ptr(), b, t, p, LANES,
        loop_threads(),
    )  # fmt: skip
    product, absolute, trace_a, trace_g = found.float().unbind(1)
    return product, absolute, trace_a, trace_g


def gram_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> GramNorm:
    """fastclip.ops.grams.gram_norms, of one call; no Gram is kept."""
    flat, (b, *_) = [x for pair in pairs for x in pair], pairs[0][0].shape
    sizes = [(*a.shape, *g.shape) for a, g in pairs]
    alike = all(len(own) == 6 and own[0] == own[3] == b and own[1] == own[4] for own in sizes)
    if not alike or b < loop_threads() or not all_lie_here(flat) or invents():
        return NotImplemented
    of_a, of_g = ([_positions(x) for x in side] for side in zip(*pairs, strict=True))
    found = _empty(len(pairs), b, 4, dtype=torch.float64)
    strips = {t: strips_of(t) for _, t, *_ in {*sizes}}
    layers = [
        (*a[1:], *g[1:], (t, d, p, strips[t]))
        for a, g, (_, t, d, _, _, p) in zip(of_a, of_g, sizes, strict=True)
    ]
    _host.gram_norms(layers, found.data_ptr(), b, LANES, loop_threads())
    product, absolute, trace_a, trace_g = found.float().unbind(2)
    room = {(d, p): dot_room(d, p, product) for _, _, d, _, _, p in {*sizes}}
    numbers = zip(*((t, t * d, t * p, room[d, p]) for _, t, d, _, _, p in sizes), strict=True)
    columns = [column(own, product.dtype, product.device) for own in numbers]
    return GramNorm(product, trace_a, trace_g, absolute, *columns)


def _slides(x: Tensor, g: Tensor, geometry: ConvGeometry) -> bool:
    """x and g are input and output of such a convolution."""
    out_channels, channels = geometry.weight_shape[:2]
    sides = zip(
        x.shape[2:],
        geometry.kernel,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        strict=False,
    )
    out = [(n + 2 * pad - d * (k - 1) - 1) // s + 1 for n, k, s, pad, d in sides]
    same = tuple(g.shape) == (len(x), out_channels, *out)
    return same and x.shape[1] == channels and x.dim() == 2 + len(geometry.kernel) <= 5


def _together(size: int) -> int:
    """Samples of a part whose gradients have `size` numbers."""
    return max(1, PART // (4 * max(1, size)))


def _parts(samples: int, each: int, *shape: int) -> list[Tensor]:
    """Room for the gradients of the samples, some after the other."""
    return [_empty(min(each, samples - first), *shape) for first in range(0, samples, each)]


def _addresses(parts: Sequence[Tensor]) -> list[int]:
    return [part.data_ptr() for part in parts]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _three(sizes: tuple[int, ...], of_others: int) -> tuple[int, ...]:
    """Of three dimensions, the first of which there may not be."""
    return (of_others,) * (3 - len(sizes)) + tuple(sizes)


_ALL: list[Callable[..., Any]] = [
    wide_gradients, gradients_with_norms, wide_conv_gradients, conv_gradients_with_norms, parted_sum,
    wide_gram, gram_dots, gram_norms, layer_norm_backward, group_norm_backward,
]  # fmt: skip
PRODUCTS = {launcher.__name__: launcher for launcher in _ALL} if LANES else {}
"""Operation of fastclip.ops -> launcher."""

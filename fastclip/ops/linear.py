"""Per-sample norms and clipped sums of a linear map: sample b's gradient is g_b^T a_b."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.core.numerics import (
    PRODUCT_ERROR_FACTOR,
    drop_zeroed,
    in_full_float32,
    lost_squares,
    row_norm_sq,
    samples_at_once,
    unit_roundoff,
    wide_sum,
    widen,
)
from fastclip.ops.dispatch import computes_reference, host_operation, operation
from fastclip.ops.grams import (
    GramNorm,
    LastInput,
    ProductNorm,
    dot_room,
    gram_bound,
    gram_norm,
    product_margin,
    raised_by_signs,
)

# -------------------------------------------------------------------------------------------------
# Clipped sums of per-sample gradients in memory.


@operation
@in_full_float32
def kept_sum(gradients: Tensor, scale: Tensor) -> Tensor:
    """Sums scale_b gradients_b over b for gradients [b, *shape], scale [b], in a wide type: [*shape].

    A scale rounded to 16 bits would be too large by up to 2^-8, and a tiny one by a factor of two.
    """
    (gradients,) = drop_zeroed(scale, widen(gradients))
    rows, back = as_they_lie(gradients)
    total = scale.to(rows.dtype) @ rows.reshape(len(scale), rows.shape[1:].numel())
    return total.view(rows.shape[1:]).permute(back).contiguous()


def as_they_lie(gradients: Tensor) -> tuple[Tensor, list[int]]:
    """Permutes gradients [b, *shape] to the order of memory, which avoids copies.

    Returns:
        The gradients, and the permutation that brings a sum of them, without b, back to `shape`.
    """
    axes = sorted(range(1, gradients.dim()), key=gradients.stride, reverse=True)
    return gradients.permute(0, *axes), sorted(range(len(axes)), key=axes.__getitem__)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Joins gradients of all samples from parts."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


@host_operation
def parted_sum(parts: Iterable[Tensor], scale: Tensor) -> Tensor:
    """Returns `kept_sum` of gradients in parts of some samples; scale is [b], for all."""
    total, first = None, 0
    for gradients in parts:
        own = kept_sum(gradients, scale[first : first + len(gradients)])
        total = own if total is None else total.add_(own)
        first += len(gradients)
    assert total is not None
    return total


@in_full_float32
def kept_sums(gradients: Tensor, scales: Tensor) -> Tensor:
    """Does the same for k parameters of one size, [k, b, n], with scales [b] or [k, b]: [k, n]."""
    gradients = widen(gradients)
    if scales.dim() == 1:
        (rows,) = drop_zeroed(scales, gradients.transpose(0, 1))
        return torch.matmul(scales.to(rows.dtype), rows.transpose(0, 1))
    (rows,) = drop_zeroed(scales.flatten(), gradients.flatten(0, 1))
    return torch.bmm(scales.to(rows.dtype)[:, None], rows.view(gradients.shape))[:, 0]


# -------------------------------------------------------------------------------------------------


LAYERS_TOGETHER = 12
"""The maximal number of layers whose norms, or sums, a kernel computes in one launch."""


@operation
@in_full_float32
def ghost_norm(a: Tensor, g: Tensor) -> Tensor:
    """Returns the squared norm of g_b^T a_b through the Grams.

    Args:
        a: layer input, [b, t, d].
        g: gradient of the layer's output, [b, t, p].

    Returns:
        [b], float32 (float64 for float64 inputs), never below the exact value.
    """
    found = ghost_parts(a, g, LastInput())
    return found.raised() if isinstance(found, GramNorm) else found


@in_full_float32
def ghost_parts(a: Tensor, g: Tensor, last_input: LastInput) -> GramNorm | Tensor:
    """Returns `ghost_norm` of a [b, t, d] and g [b, t, p], to be raised with that of other layers."""
    if a.shape[1] == 1:
        return single_norm(a, g)
    return gram_norm(last_input.gram(a), g, a.shape[2])


@operation
def ghost_norms(
    pairs: Sequence[tuple[Tensor, Tensor]], biases: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns `ghost_norm` of several layers of one kind, and per-sample gradients of their biases.

    Args:
        pairs: (a, g) of each layer, at most LAYERS_TOGETHER. biases: they have one.

    Returns:
        [l, b]; with `biases` sum_t g of each layer, [l, b, p], from one read of g, else None.
    """
    norms = torch.stack([ghost_norm(a, g) for a, g in pairs])
    return norms, torch.stack([wide_sum(g, 1) for _, g in pairs]) if biases else None


@operation
def ghost_norm_concat(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns squared norms of the summed gradients of several uses of one weight, sum_u g_u^T a_u.

    Args:
        parts: (a, g) of each use, a [b, t_u, d] and g [b, t_u, p].

    Returns:
        [b], as `ghost_norm` of the uses concatenated along t.
    """
    a, g = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return ghost_norm(a, g)


def single_norm(a: Tensor, g: Tensor) -> Tensor:
    """Returns ||a_b||^2 ||g_b||^2, the squared norm for t = 1: a [b, 1, d], g [b, 1, p] -> [b]. It is
    never below the exact value, even if squares underflow."""
    norm_a = row_norm_sq(a) + lost_squares(a.shape[2], a.dtype)
    return norm_a * (row_norm_sq(g) + lost_squares(g.shape[2], g.dtype))


@operation
@in_full_float32
def instantiated_norm(a: Tensor, g: Tensor, keep: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the squared norm of g_b^T a_b by computing it, a few samples at a time.

    Args:
        a: layer input, [b, t, d].
        g: gradient of the layer's output, [b, t, p].
        keep: also return the per-sample gradients.

    Returns:
        [b]; with `keep`, that and the per-sample gradients [b, p, d].
    """
    if keep:
        parts, norm = kept_gradients(a, g, LastInput())
        return norm.raised(), whole(parts)
    a, g = widen(a), widen(g)
    b, rows = len(a), samples_at_once(a.shape[2] * g.shape[2], a.device)
    parts = [
        row_norm_sq(per_sample_gradients(x, y))
        for x, y in zip(a.split(rows), g.split(rows), strict=True)
    ]
    norms = torch.cat(parts) if b else a.new_zeros(0)
    return (norms.sqrt() + product_margin(a, g)).square()


def per_sample_gradients(a: Tensor, g: Tensor) -> Tensor:
    """Returns g_b^T a_b for a [b, t, d] and g [b, t, p]: [b, p, d], in the accumulation type."""
    return wide_gradients(widen(a), widen(g))


@host_operation
@in_full_float32
def wide_gradients(a: Tensor, g: Tensor) -> Tensor:
    """`per_sample_gradients` of operands in their accumulation type."""
    return torch.bmm(g.transpose(1, 2), a)


def kept_gradients(a: Tensor, g: Tensor, last_input: LastInput) -> tuple[list[Tensor], ProductNorm]:
    """Returns `per_sample_gradients` of a [b, t, d], g [b, t, p], and norms to be raised with others.

    Returns:
        Gradients in parts of some samples; the norms of all samples.
    """
    found, *norms = gradients_with_norms(widen(a), widen(g), last_input)
    return found, ProductNorm(*norms)


@host_operation
def gradients_with_norms(
    a: Tensor, g: Tensor, last_input: LastInput
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Returns `wide_gradients` in parts, and squared norms [b] of them, of a and of g."""
    found = wide_gradients(a, g)
    return [found], row_norm_sq(found), last_input.norm_sq(a), row_norm_sq(g)


def gradients_apart(a: Tensor, g: Tensor) -> Iterator[Tensor]:
    """Yields `per_sample_gradients` of a few samples at a time, with the same numbers each time.

    A kernel's 16-bit products are exact, and float32 before they are added.
    """
    native = a.element_size() == g.element_size() == 2 and not computes_reference(a)
    step = samples_at_once(a.shape[2] * g.shape[2], a.device)
    for x, y in zip(a.split(step), g.split(step), strict=True):
        yield instantiated_norm(x, y, keep=True)[1] if native else per_sample_gradients(x, y)


@operation
@in_full_float32
def scaled_sum(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    """sum_b scale_b g_b^T a_b.

    Args:
        a: layer input, [b, t, d].
        g: gradient of the layer's output, [b, t, p].
        scale: [b]; a sample of scale 0 contributes 0 even where `a` or `g` is not finite.

    Returns:
        [p, d], in the accumulation type.
    """
    a, g = drop_zeroed(scale, widen(a), widen(g))
    factor = scale.to(a.dtype)[:, None, None]
    if a.shape[2] < g.shape[2]:
        a = a * factor
    else:
        g = g * factor
    return g.flatten(0, 1).t() @ a.flatten(0, 1)


@operation
def scaled_sums(pairs: Sequence[tuple[Tensor, Tensor]], scale: Tensor) -> list[Tensor]:
    """`scaled_sum` of several layers; the results may be parts of one buffer.

    Args:
        pairs: (a, g) of each layer, at most LAYERS_TOGETHER. scale: [b].
    """
    return [scaled_sum(a, g, scale) for a, g in pairs]


# -------------------------------------------------------------------------------------------------
# A linear map over rows in any order: sample i's gradient is the sum of g_n a_n^T over its own
# rows.
#
# Index letters: n row, b sample, d input feature, p output feature. A row of owner -1 belongs to
# no sample. The rows of a sample are counted on a CPU only: on a GPU this would wait for the device.


_LEAST, _BLOCK = 16, 512
"""Rows that one product combines with the rows behind them, at least and at most."""
_SCRATCH_BYTES = 32 << 20


@in_full_float32
def routed_norm(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Returns squared norms of per-sample gradients, [b], never below the exact values.

    It uses Grams of neighboring rows, which are sorted by sample first.

    Args:
        a: [n, d]. g: [n, p]. owner: the sample of each row, int64 [n]. batch_size: b.
    """
    d, p, most = a.shape[1], g.shape[1], _most(owner)
    owner, order = owner.sort(stable=True)
    a, g = widen(a)[order], widen(g)[order]
    terms, absolute = _terms(a, g, owner, most)
    total, absolute, count, norm_a, norm_g = (
        sum_by_sample(x, owner, batch_size)
        for x in (terms, absolute, torch.ones_like(terms), row_norm_sq(a), row_norm_sq(g))
    )
    total = total.clamp_min(0)
    bound = gram_bound(total, count, norm_a, norm_g, count * d, count * p)
    return raised_by_signs(total, absolute, dot_room(d, p, a), count) + bound


def routes_apart(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> bool:
    """Whether the gradients themselves are less work than the Grams of `routed_norm`."""
    n, d, p, most = len(a), a.shape[1], g.shape[1], _most(owner)
    return n * min(n, _block(n, most) + most) * (d + p) > batch_size * most * d * p


def routed_margin(a: Tensor, g: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Returns the rounding margins of `routed_gradients_apart`'s norms, [b]; see `product_margin`."""
    norm_a, norm_g = (sum_by_sample(row_norm_sq(x), owner, batch_size) for x in (a, g))
    size = (norm_a * norm_g).sqrt()
    return PRODUCT_ERROR_FACTOR * unit_roundoff(size.dtype) * size


def sum_by_sample(x: Tensor, owner: Tensor, batch_size: int) -> Tensor:
    """Sums rows [n, ...] per sample: [b, ...]; those of owner -1 are left out."""
    total = x.new_zeros(batch_size + 1, *x.shape[1:])
    return total.index_add_(0, owner + 1, x)[1:]


def _most(owner: Tensor) -> int:
    """Returns a bound on the rows of a sample."""
    if owner.device.type != "cpu" or not len(owner):
        return len(owner)
    return max(1, int((owner + 1).bincount(minlength=2)[1:].max()))


def _block(n: int, most: int) -> int:
    return max(1, min(n, _BLOCK, max(most, _LEAST)))


def _terms(a: Tensor, g: Tensor, owner: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns each row's terms in its sample's squared norm, alone and with the rows behind it, [n], and
    the sum of their absolute values.

    Rows are sorted by sample. Blocks of them are combined with the rows up to `most` away.
    """
    n, block = len(a), _block(len(a), most)
    reach = block + most - 1
    scratch = 4 * block * reach * a.element_size()
    step = block * max(1, _SCRATCH_BYTES // max(1, scratch))
    parts, sizes = [], []
    for first in range(0, n, step):
        left = n - first
        blocks = -(-min(step, left) // block)
        width = reach if blocks > 1 else min(reach, left)
        last = first + (blocks - 1) * block + width
        lacking = max(0, last - n)
        rows, gradients, whose = (
            F.pad(x[first:last], [0, 0] * (x.dim() - 1) + [0, lacking], value=none).unfold(
                0, width, block
            )
            for x, none in ((a, 0.0), (g, 0.0), (owner, -2))
        )  # [blocks, d, width], [blocks, p, width], [blocks, width]
        products = (rows[..., :block].mT @ rows) * (gradients[..., :block].mT @ gradients)
        same = (whose[:, :block, None] == whose[:, None]).triu()
        products = products.masked_fill(~same, 0)  # other samples' rows need not be finite
        alone = products.diagonal(dim1=1, dim2=2)  # of one row, not negative
        parts.append((2 * products.sum(2) - alone).flatten())
        sizes.append((2 * products.abs().sum(2) - alone).flatten())
    if not parts:
        return a.new_zeros(0), a.new_zeros(0)
    return torch.cat(parts)[:n], torch.cat(sizes)[:n]


def routed_gradients_apart(
    a: Tensor, g: Tensor, owner: Tensor, batch_size: int
) -> Iterator[Tensor]:
    """Yields per-sample gradients in the accumulation type, a few samples at a time.

    Yields:
        [., p, d], b samples in all, with the same numbers each time.
    """
    d, p, most = a.shape[1], g.shape[1], _most(owner)
    if not batch_size:
        yield widen(a).new_zeros(0, p, d)
    sorted_owner, order = owner.sort(stable=True)
    samples = torch.arange(batch_size, dtype=torch.int64, device=owner.device)
    first = torch.searchsorted(sorted_owner, samples)
    last = torch.searchsorted(sorted_owner, samples, right=True)
    place = first[:, None] + torch.arange(most, dtype=torch.int64, device=owner.device)
    none = len(a)  # a row of zeros
    rows = F.pad(order, (0, most), value=none)[place].masked_fill(place >= last[:, None], none)
    a, g = F.pad(a, (0, 0, 0, 1)), F.pad(g, (0, 0, 0, 1))
    each = max(1, _SCRATCH_BYTES // max(1, (most * (d + p) + d * p) * a.element_size()))
    for i in rows.split(each):
        if len(i):
            yield per_sample_gradients(a[i], g[i])

"""Per-sample norms and clipped sums of a linear map: sample b's gradient is g_b^T a_b."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip.ops.dispatch import operation
from fastclip.ops.numerics import (
    CANCELLATION,
    CANCELLED_ERROR_FACTOR,
    GRAM_ERROR_FACTOR,
    drop_zeroed,
    lost_squares,
    product_slack,
    row_norm_sq,
    unit_roundoff,
    widen,
)
from fastclip.ops.precision import in_full_float32

_SCRATCH_BYTES = 8 << 20
_SHORT = 4096  # entries up to which a batched dot product beats a product and a sum


@in_full_float32
def gram(x: Tensor) -> Tensor:
    """Gram matrix of the positions of each sample: x [b, t, d] -> [b, t, t]."""
    x = widen(x)
    return torch.bmm(x, x.transpose(1, 2))


@in_full_float32
def gram_product(gram_a: Tensor, gram_g: Tensor, d: int, p: int) -> Tensor:
    """sum_{t,s} (a_t.a_s)(g_t.g_s) from two Grams [b, t, t], raised by its rounding bound; [b].

    With large, nearly orthogonal terms the sum cancels and can come out far too small, even
    negative. It is clamped at 0 and raised by `gram_bound`, so that the norm is never
    under-estimated. d and p are the lengths of the dot products.
    """
    t = gram_a.shape[1]
    total = row_dot(gram_a, gram_g).clamp_min(0)
    bound = gram_bound(total, t, trace(gram_a), trace(gram_g), t * d, t * p)
    # Terms of one sign round alike: the products of long rows come out low by up to (d + p) / 45 u
    # (measured: 650 u at 29184), where a sum of both signs errs by a few u of `bound`.
    return total * (1 + (d + p) / 32 * unit_roundoff(total.dtype)) + bound


def gram_bound(
    total: Tensor, t: int | Tensor, norm_a: Tensor, norm_g: Tensor, a_entries: int | Tensor,
    g_entries: int | Tensor,
) -> Tensor:  # fmt: skip
    """What rounding and underflow can hide of a product of Grams, [b].

    c * u * ||A||^2 ||G||^2, where c grows with how much of that has cancelled, and for squares below
    the range of the type their number times its smallest number: the Gram of one operand is off by at
    most that, entry by entry.

    Args:
        total: the product, as computed, of Grams [b, t, t]. t: positions, of all samples or of each.
        norm_a, norm_g: ||A_b||^2 and ||G_b||^2, [b].
        a_entries, g_entries: how many numbers A_b and G_b hold.
    """
    dtype = norm_a.dtype
    product = norm_a * norm_g
    left = CANCELLATION * t * (total / product)  # NaN where both are 0 or inf: no share of c then
    cancelled = (1 / (1 + left)).nan_to_num(0.0)
    c = GRAM_ERROR_FACTOR + (CANCELLED_ERROR_FACTOR - GRAM_ERROR_FACTOR) * cancelled
    rounding = c * unit_roundoff(dtype) * product
    return rounding + lost_squares(1, dtype) * (a_entries * norm_g + g_entries * norm_a)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of the samples, x and y [b, t, s] -> [b]."""
    if x.shape[1] * x.shape[2] <= _SHORT:
        return torch.bmm(x.flatten(1)[:, None], y.flatten(1)[:, :, None]).view(-1)
    return (x * y).sum((1, 2))


def trace(grams: Tensor) -> Tensor:
    """Trace of each matrix, [b, t, t] -> [b]."""
    return grams.diagonal(dim1=1, dim2=2).sum(1)


@operation
@in_full_float32
def ghost_norm(a: Tensor, g: Tensor) -> Tensor:
    """Squared norm of g_b^T a_b through the Grams.

    Args:
        a: layer input, [b, t, d].
        g: gradient of the layer's output, [b, t, p].

    Returns:
        [b], float32 (float64 for float64 inputs), never below the exact value.
    """
    if a.shape[1] == 1:
        return single_norm(a, g)
    return gram_product(gram(a), gram(g), a.shape[2], g.shape[2])


@operation
def ghost_norm_concat(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Squared norm of the sum of the gradients of several uses of one weight, sum_u g_u^T a_u.

    Args:
        parts: (a, g) of each use, a [b, t_u, d] and g [b, t_u, p].

    Returns:
        [b], as `ghost_norm` of the uses concatenated along t.
    """
    a, g = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return ghost_norm(a, g)


def single_norm(a: Tensor, g: Tensor) -> Tensor:
    """||a_b||^2 ||g_b||^2, the squared norm where t = 1; never below it, squares that underflow
    included: a [b, 1, d], g [b, 1, p] -> [b]."""
    norm_a = row_norm_sq(a) + lost_squares(a.shape[2], a.dtype)
    return norm_a * (row_norm_sq(g) + lost_squares(g.shape[2], g.dtype))


@operation
@in_full_float32
def instantiated_norm(a: Tensor, g: Tensor, keep: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Squared norm of g_b^T a_b by computing it, a few samples at a time.

    Args:
        a: layer input, [b, t, d].
        g: gradient of the layer's output, [b, t, p].
        keep: also return the per-sample gradients.

    Returns:
        [b]; with `keep`, that and the per-sample gradients [b, p, d].
    """
    a, g = widen(a), widen(g)
    if keep:
        grads = per_sample_gradients(a, g)
        return (row_norm_sq(grads).sqrt() + product_slack(a, g)).square(), grads
    b, _, d = a.shape
    rows = max(1, _SCRATCH_BYTES // max(1, d * g.shape[2] * a.element_size()))
    parts = [
        row_norm_sq(per_sample_gradients(x, y))
        for x, y in zip(a.split(rows), g.split(rows), strict=True)
    ]
    norms = torch.cat(parts) if b else a.new_zeros(0)
    return (norms.sqrt() + product_slack(a, g)).square()


@in_full_float32
def per_sample_gradients(a: Tensor, g: Tensor) -> Tensor:
    """g_b^T a_b for a [b, t, d] and g [b, t, p]: [b, p, d], in the accumulation type."""
    return torch.bmm(widen(g).transpose(1, 2), widen(a))


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

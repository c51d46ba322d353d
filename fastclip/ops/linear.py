"""Per-sample norms and clipped sums of a linear map: sample b's gradient is g_b^T a_b."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastclip.ops.bounds import GramNorm, ProductNorm, product_slack
from fastclip.ops.dispatch import computes_reference, host_operation, operation
from fastclip.ops.grams import LastInput, gram_norm
from fastclip.ops.kept import whole
from fastclip.ops.numerics import (
    drop_zeroed,
    lost_squares,
    row_norm_sq,
    samples_at_once,
    wide_sum,
    widen,
)
from fastclip.ops.precision import in_full_float32

LAYERS_TOGETHER = 12
"""Most layers whose norms, or sums, a kernel computes in one launch."""


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
    found = ghost_parts(a, g, LastInput())
    return found.raised() if isinstance(found, GramNorm) else found


@in_full_float32
def ghost_parts(a: Tensor, g: Tensor, last_input: LastInput) -> GramNorm | Tensor:
    """What `ghost_norm` makes of a [b, t, d] and g [b, t, p], to be raised with that of other layers."""
    if a.shape[1] == 1:
        return single_norm(a, g)
    return gram_norm(last_input.gram(a), g, a.shape[2])


@operation
def ghost_norms(
    pairs: Sequence[tuple[Tensor, Tensor]], biases: bool
) -> tuple[Tensor, Tensor | None]:
    """`ghost_norm` of several layers of one kind, and the per-sample gradients of their biases.

    Args:
        pairs: (a, g) of each layer, at most LAYERS_TOGETHER. biases: they have one.

    Returns:
        [l, b]; with `biases` sum_t g of each layer, [l, b, p], of one read of g, else None.
    """
    norms = torch.stack([ghost_norm(a, g) for a, g in pairs])
    return norms, torch.stack([wide_sum(g, 1) for _, g in pairs]) if biases else None


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
    return (norms.sqrt() + product_slack(a, g)).square()


def per_sample_gradients(a: Tensor, g: Tensor) -> Tensor:
    """g_b^T a_b for a [b, t, d] and g [b, t, p]: [b, p, d], in the accumulation type."""
    return wide_gradients(widen(a), widen(g))


@host_operation
@in_full_float32
def wide_gradients(a: Tensor, g: Tensor) -> Tensor:
    """`per_sample_gradients` of operands in their accumulation type."""
    return torch.bmm(g.transpose(1, 2), a)


def kept_gradients(a: Tensor, g: Tensor, last_input: LastInput) -> tuple[list[Tensor], ProductNorm]:
    """`per_sample_gradients` of a [b, t, d], g [b, t, p] with their norms, to be raised with others.

    Returns:
        Gradients of some samples after the other, in parts; the norms of all.
    """
    found, *norms = gradients_with_norms(widen(a), widen(g), last_input)
    return found, ProductNorm(*norms)


@host_operation
def gradients_with_norms(
    a: Tensor, g: Tensor, last_input: LastInput
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """`wide_gradients`, in parts, and squared norms [b]: of them, of a and of g."""
    found = wide_gradients(a, g)
    return [found], row_norm_sq(found), last_input.norm_sq(a), row_norm_sq(g)


def gradients_apart(a: Tensor, g: Tensor) -> Iterator[Tensor]:
    """`per_sample_gradients` of a few samples after the other: the same numbers each time.

    16-bit products of a kernel's are exact, and float32 before they are added.
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

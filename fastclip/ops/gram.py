"""Squared norms from Gram matrices, and what rounding can hide of them.

Sample b's gradient is g_b^T a_b, so its squared norm is sum_{t,s} (a_t.a_s)(g_t.g_s): two Grams and an
inner product. With large, nearly orthogonal terms that sum cancels and can come out far too small, even
negative. It is clamped at 0 and raised by its rounding bound, so that a norm is never under-estimated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip.ops.numerics import (
    CANCELLATION,
    CANCELLED_ERROR_FACTOR,
    GRAM_ERROR_FACTOR,
    lost_squares,
    unit_roundoff,
    widen,
)
from fastclip.ops.precision import in_full_float32

_SHORT = 4096  # entries up to which a batched dot product beats a product and a sum


@in_full_float32
def gram(x: Tensor) -> Tensor:
    """Gram matrix of the positions of each sample: x [b, t, d] -> [b, t, t]."""
    x = widen(x)
    return torch.bmm(x, x.transpose(1, 2))


@dataclass
class GramNorm:
    """A product of Grams before it is raised: of one layer, or stacked, of l layers.

    Attributes:
        total: as computed, [b]; or [l, b], and numbers as columns [l, 1].
        norm_a, norm_g: ||A_b||^2 and ||G_b||^2, in the shape of `total`.
        positions: t. a_entries, g_entries: how many numbers A_b and G_b hold.
        terms: of the dot products in both Grams together.
    """

    total: Tensor
    norm_a: Tensor
    norm_g: Tensor
    positions: int | Tensor
    a_entries: int | Tensor
    g_entries: int | Tensor
    terms: int | Tensor

    def raised(self) -> Tensor:
        """The squared norms, never below the exact ones."""
        total = self.total.clamp_min(0)
        bound = gram_bound(
            total, self.positions, self.norm_a, self.norm_g, self.a_entries, self.g_entries
        )
        # Terms of one sign round alike: the products of long rows come out low by up to (d + p) / 45 u
        # (measured: 650 u at 29184), where a sum of both signs errs by a few u of `bound`.
        return total * (1 + self.terms * (unit_roundoff(total.dtype) / 32)) + bound


@in_full_float32
def gram_norm(gram_a: Tensor, gram_g: Tensor, d: int, p: int) -> GramNorm:
    """sum_{t,s} (a_t.a_s)(g_t.g_s) from two Grams [b, t, t] of rows of d and of p numbers."""
    t = gram_a.shape[1]
    return GramNorm(
        row_dot(gram_a, gram_g), trace(gram_a), trace(gram_g), t, t * d, t * p, d + p
    )  # fmt: skip


def gram_product(gram_a: Tensor, gram_g: Tensor, d: int, p: int) -> Tensor:
    """The same, raised by its rounding bound; [b]."""
    return gram_norm(gram_a, gram_g, d, p).raised()


def raised_together(norms: Sequence[GramNorm]) -> Tensor:
    """The squared norms of l layers, [l, b], with as many operations as those of one.

    Args:
        norms: of as many samples, of one type and on one device.
    """
    first = norms[0].total

    def column(name: str) -> Tensor:
        numbers = tuple(getattr(norm, name) for norm in norms)
        return _column(numbers, first.dtype, first.device)

    total, norm_a, norm_g = (
        torch.stack([getattr(norm, name) for norm in norms])
        for name in ("total", "norm_a", "norm_g")
    )
    numbers = map(column, ("positions", "a_entries", "g_entries", "terms"))
    return GramNorm(total, norm_a, norm_g, *numbers).raised()


@functools.lru_cache(maxsize=256)
def _column(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None]


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


class Grams:
    """Grams of the inputs that a pass has met last: layers that share an input share its Gram.

    It holds that input, so that no other tensor can come to lie in its place.
    """

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._held: tuple[Tensor, Tensor] | None = None

    def of(self, x: Tensor) -> Tensor:
        """`gram(x)`."""
        key = (x.data_ptr(), x._version, x.dtype, x.shape, x.stride())
        if self._held is None or key != self._key:
            self._key, self._held = key, (x, gram(x))
        return self._held[1]

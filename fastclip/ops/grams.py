"""Squared norms from Gram matrices, and what rounding can hide of them.

Sample b's gradient is g_b^T a_b, so its squared norm is sum_{t,s} (a_t.a_s)(g_t.g_s): two Grams and an
inner product. With large, nearly orthogonal terms that sum cancels and can come out far too small, even
negative. It is clamped at 0 and raised by its rounding bound, so that a norm is never under-estimated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.ops.bounds import GramNorm
from fastclip.ops.numerics import row_norm_sq, widen
from fastclip.ops.precision import in_full_float32

_SHORT = 4096  # entries up to which a batched dot product beats a product and a sum


@in_full_float32
def gram(x: Tensor) -> Tensor:
    """Gram matrix of the positions of each sample: x [b, t, d] -> [b, t, t]."""
    x = widen(x)
    return torch.bmm(x, x.transpose(1, 2))


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


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of the samples, x and y [b, t, s] -> [b]."""
    if x.shape[1] * x.shape[2] <= _SHORT:
        return torch.bmm(x.flatten(1)[:, None], y.flatten(1)[:, :, None]).view(-1)
    return (x * y).sum((1, 2))


def trace(grams: Tensor) -> Tensor:
    """Trace of each matrix, [b, t, t] -> [b]."""
    return grams.diagonal(dim1=1, dim2=2).sum(1)


class LastInput:
    """What is known of the layer's input that a pass has met last: layers that share it share that.

    It holds that input, so that no other tensor can come to lie in its place.
    """

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._held: Tensor | None = None
        self._gram: Tensor | None = None
        self._norm_sq: Tensor | None = None

    def gram(self, x: Tensor) -> Tensor:
        """Of `x` [b, t, d], as `gram`."""
        self._meet(x)
        if self._gram is None:
            self._gram = gram(x)
        return self._gram

    def norm_sq(self, x: Tensor) -> Tensor:
        """Of `x` [b, ...], as `row_norm_sq`."""
        self._meet(x)
        if self._norm_sq is None:
            self._norm_sq = row_norm_sq(x)
        return self._norm_sq

    def _meet(self, x: Tensor) -> None:
        key = (x.data_ptr(), x._version, x.dtype, x.shape, x.stride())
        if self._held is None or key != self._key:
            self._key, self._held, self._gram, self._norm_sq = key, x, None, None

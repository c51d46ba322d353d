"""Squared norms from Gram matrices, and what rounding can hide of them.

Sample b's gradient is g_b^T a_b, so its squared norm is sum_{t,s} (a_t.a_s)(g_t.g_s): two Grams and an
inner product. With large, nearly orthogonal terms that sum cancels and can come out far too small, even
negative. It is clamped at 0 and raised by its rounding bound, so that a norm is never under-estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastclip.ops.bounds import GramNorm, dot_room
from fastclip.ops.dispatch import host_operation
from fastclip.ops.numerics import row_norm_sq, widen
from fastclip.ops.precision import in_full_float32

_CUT_FROM, _STRIPS = 384, 4
"""Positions from which a Gram is computed in strips of rows: of shorter ones that saves little."""
_FEW = 12
"""Positions below which a library adds up columns, but not rows, one product after the other: an error
of d / 5 u where all have one sign, not of d / 18 u."""


def half_gram(x: Tensor) -> Tensor:
    """Gram matrix of the positions of each sample, on and above its diagonal: x [b, t, d] -> [b, t, t].

    It is symmetric. What lies below the diagonal is right or 0, and the same for all x of as many
    positions: short ones are whole, long ones come in strips of rows, each from its first column on,
    which is five eighths of the work.
    """
    return wide_gram(widen(x).detach())


@host_operation
@in_full_float32
def wide_gram(x: Tensor) -> Tensor:
    """`half_gram` of x in its accumulation type."""
    t = x.shape[1]
    if t < _FEW:
        x = x.contiguous()
    if strips_of(t) == 1:
        return torch.bmm(x, x.transpose(1, 2))
    found = x.new_empty(x.shape[0], t, t)
    for first, last in _strips(t):
        strip = found[:, first:last]
        torch.bmm(x[:, first:last], x[:, first:].transpose(1, 2), out=strip[:, :, first:])
        strip[:, :, :first].zero_()
    return found


def strips_of(t: int) -> int:
    """How many strips the Gram of so many positions is computed in."""
    return 1 if t < _CUT_FROM else _STRIPS


def _strips(t: int) -> list[tuple[int, int]]:
    n = strips_of(t)
    return [(t * i // n, t * (i + 1) // n) for i in range(n)]


def gram_norm(gram_a: Tensor, g: Tensor, d: int) -> GramNorm:
    """sum_{t,s} (a_t.a_s)(g_t.g_s) from a half Gram [b, t, t] of rows of d numbers, and g [b, t, p]."""
    (t, p), g = g.shape[1:], widen(g).detach()
    total, absolute, trace_a, trace_g = gram_dots(gram_a, g)
    return GramNorm(total, trace_a, trace_g, absolute, t, t * d, t * p, dot_room(d, p, g))


@host_operation
@in_full_float32
def gram_dots(gram_a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inner product of a half Gram [b, t, t] and that of g [b, t, p].

    Returns:
        [b] each: it, the same of absolute values, and the traces of both.
    """
    gram_g = wide_gram(g)
    trace_g = trace(gram_g)
    for first, last in _strips(gram_g.shape[1])[:-1]:  # of both the same half is there
        gram_g[:, first:last, last:].mul_(2)
    return *row_dots(gram_a, gram_g), trace(gram_a), trace_g


@host_operation
@in_full_float32
def gram_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> GramNorm:
    """`gram_norm` of a [b, t, d] and g [b, t, p] of l layers, as one, [l, b]; layers that follow each
    other may share `a`."""
    last = LastInput()
    found: GramNorm = GramNorm.stacked([gram_norm(last.gram(a), g, a.shape[2]) for a, g in pairs])
    return found


def half_dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of symmetric matrices, of which what lies below the diagonal is not looked at.

    Args:
        x, y: [b, t, t]. What is below the diagonal of x must be finite where x is.

    Returns:
        [b].
    """
    return row_dot(x, y.triu() + y.triu(1))


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of the samples, x and y [b, t, s] -> [b].

    Not by a batched product: that adds them up one after the other, which takes longer than a product
    and a sum, and where all have one sign errs by a sixteenth of their number in u and more.
    """
    return (x * y).sum((1, 2))


def row_dots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """`row_dot`, and the same sum of absolute values."""
    products = (x * y).flatten(1)
    return products.sum(1), torch.linalg.vector_norm(products, ord=1, dim=1)


def gram_size(gram: Tensor) -> Tensor:
    """No less than the Frobenius norm of a Gram of which a half is there, [b, t, t] -> float64 [b]."""
    size = torch.linalg.vector_norm(gram, dim=(1, 2), dtype=torch.float64)
    return size if strips_of(gram.shape[1]) == 1 else size * 2**0.5


def trace(grams: Tensor) -> Tensor:
    """Trace of each matrix, [b, t, t] -> [b]."""
    return grams.diagonal(dim1=1, dim2=2).sum(1)


@dataclass
class _Known:
    key: tuple
    x: Tensor
    gram: Tensor | None = None
    norm_sq: Tensor | None = None


class LastInput:
    """What is known of the layer's input that a pass has met last: layers that share it share that.

    It holds that input, so that no other tensor can come to lie in its place. Passes of several devices
    run on threads of their own, which may ask in turn: each goes on with what it has found.
    """

    def __init__(self) -> None:
        self._last: _Known | None = None

    def gram(self, x: Tensor) -> Tensor:
        """Of `x` [b, t, d], as `half_gram`."""
        known = self._known(x)
        if known.gram is None:
            known.gram = half_gram(x)
        return known.gram

    def norm_sq(self, x: Tensor) -> Tensor:
        """Of `x` [b, ...], as `row_norm_sq`."""
        known = self._known(x)
        if known.norm_sq is None:
            known.norm_sq = row_norm_sq(x)
        return known.norm_sq

    def _known(self, x: Tensor) -> _Known:
        if type(x) not in (Tensor, nn.Parameter) or not x.data_ptr():  # nobody knows where it lies
            return _Known((), x)
        key = (x.data_ptr(), x.device, x._version, x.dtype, x.shape, x.stride())
        last = self._last
        if last is None or last.key != key:
            last = self._last = _Known(key, x)
        return last

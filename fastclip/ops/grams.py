"""Squared norms from Gram matrices, and what rounding can hide of them.

Sample b's gradient is g_b^T a_b, so its squared norm is sum_{t,s} (a_t.a_s)(g_t.g_s): two Grams and an
inner product. With large, nearly orthogonal terms that sum cancels and can come out far too small, even
negative. It is clamped at 0 and raised by its rounding bound, so that a norm is never under-estimated.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.core.numerics import (
    CANCELED_ERROR_FACTOR,
    CANCELLATION,
    GRAM_ERROR_FACTOR,
    PRODUCT_ERROR_FACTOR,
    in_full_float32,
    lost_squares,
    row_norm_sq,
    unit_roundoff,
    widen,
)
from fastclip.ops.dispatch import host_operation

# -------------------------------------------------------------------------------------------------
# What rounding can hide of norms, and norms raised by it: no sample adds more than they tell.


_FEWEST = 1 << 14


class LaterNorm(ABC):
    """Squared norms of a parameter's gradients, whose last operations are made for a `kind` at once."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Those of one kind are finished together."""

    @abstractmethod
    def raised(self) -> Tensor:
        """The squared norms, [b], never below those of what the samples add to the clipped sum."""

    @staticmethod
    @abstractmethod
    def together(norms: Sequence[Any]) -> Tensor:
        """`raised` of l of a kind, [l, b], with as many operations as of one."""


@dataclass
class RaisedNorm(LaterNorm):
    """A squared norm before it is raised by its rounding bound: of one layer, or stacked, of l layers.

    Attributes:
        total: as computed, [b]; or [l, b], and numbers as columns [l, 1].
        norm_a, norm_g: ||A_b||^2 and ||G_b||^2 of the gradient g_b^T a_b, in the shape of `total`.
    """

    total: Tensor
    norm_a: Tensor
    norm_g: Tensor

    @property
    def kind(self) -> Hashable:
        return type(self), self.total.shape, self.total.dtype, self.total.device

    @staticmethod
    def together(norms: Sequence[Any]) -> Tensor:
        return RaisedNorm.stacked(norms).raised()

    @staticmethod
    def stacked(norms: Sequence[Any]) -> Any:
        """The norms of l of a kind as one."""
        first = norms[0]
        stacked: list[Any] = []
        for field in fields(first):
            own = [getattr(norm, field.name) for norm in norms]
            if isinstance(own[0], Tensor):
                stacked.append(torch.stack(own))
            else:
                stacked.append(column(tuple(own), first.total.dtype, first.total.device))
        return type(first)(*stacked)


@dataclass
class AddedNorm(LaterNorm):
    """The sum of the squared norms [b] of a parameter's parts: many, added up one after the other in
    float32, could come out low."""

    parts: list[Tensor]

    @property
    def kind(self) -> Hashable:
        first = self.parts[0]
        return AddedNorm, len(self.parts), first.shape, first.dtype, first.device

    def raised(self) -> Tensor:
        return AddedNorm.together([self])[0]

    @staticmethod
    def together(norms: Sequence[Any]) -> Tensor:
        parts = [part for norm in norms for part in norm.parts]
        stacked = torch.stack(parts).unflatten(0, (len(norms), -1))
        return stacked.sum(1, dtype=torch.float64).to(stacked.dtype)


@dataclass
class GramNorm(RaisedNorm):
    """A product of Grams.

    Attributes:
        absolute: a sum of the absolute values of what `total` adds up, [b], or no less.
        positions: t. a_entries, g_entries: how many numbers A_b and G_b hold.
        dots: `dot_room` of the operands.
    """

    absolute: Tensor
    positions: int | Tensor
    a_entries: int | Tensor
    g_entries: int | Tensor
    dots: float | Tensor

    def raised(self) -> Tensor:
        total = self.total.clamp_min(0)
        bound = gram_bound(
            total, self.positions, self.norm_a, self.norm_g, self.a_entries, self.g_entries
        )
        absolute = self.absolute.minimum(self.norm_a * self.norm_g)  # where it has overflowed
        return raised_by_signs(total, absolute, self.dots, self.positions) + bound


def dot_room(d: int, p: int, like: Tensor) -> float:
    """How far dot products of d and of p terms of one sign, which round alike, are off, together, in u.

    Added up one after the other they are by up to n / 4, and float64 is: MKL on AMD does not cut these
    sums (measured: 112 at 512, 1886 at 8192). Nor are those of a GPU's libraries known to be cut. Those
    of float32 on a CPU are, by the loops after 192 terms, by MKL on AMD, too (16 at 64, 48 from 192 to
    4096; of one or two positions n / 32), by others after 384. Terms of both signs err by a few u of
    `gram_bound`.

    Args:
        like: of their type, where they are computed.
    """
    if like.dtype == torch.float64 or like.device.type != "cpu":
        return (d + p) / 4
    return sum(min(n / 4, 96 + n / 32) for n in (d, p))


def raised_by_signs(
    total: Tensor, absolute: Tensor, dots: float | Tensor, positions: int | Tensor
) -> Tensor:
    """A product of Grams raised by what terms of one sign hide of it.

    Of the dot products, each of which errs in a direction of its own (`dot_room`); and of the clipped
    sum, which adds up the operands' positions and comes out high by up to positions / 4 u (255 at 1024).
    """
    return total + unit_roundoff(total.dtype) * (dots * absolute + positions / 2 * total)


@dataclass
class ProductNorm(RaisedNorm):
    """The norm of the gradients g_b^T a_b themselves, as they were computed, which are what is summed.

    Where large terms cancel, the computed product is off by up to c * u * ||A_b|| ||G_b||; added to
    its norm, the norm is never under-estimated.

    Attributes:
        taps: the size of a convolution's kernel, whose patches repeat each pixel at most so often.
    """

    taps: int | Tensor = 1

    def raised(self) -> Tensor:
        return (self.total.sqrt() + self.margin()).square()

    def margin(self) -> Tensor:
        """What rounding can hide of the norm, [b]."""
        return _margin(self.norm_a, self.norm_g, self.taps)


def product_margin(a: Tensor, g: Tensor, taps: int = 1) -> Tensor:
    """What rounding can hide of the norms of products of a and g [b, ...], [b]; see `ProductNorm`."""
    return _margin(row_norm_sq(a), row_norm_sq(g), taps)


def _margin(norm_a: Tensor, norm_g: Tensor, taps: int | Tensor) -> Tensor:
    size = (taps * norm_a * norm_g).sqrt()
    return PRODUCT_ERROR_FACTOR * unit_roundoff(size.dtype) * size


def with_lost(norm_sq: Tensor, entries: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """Squared norms [l, b] raised by all that underflow can hide of them; a sample of norm 0 keeps it.

    Beside a threshold nothing of this matters. At scales C / n it would lift contributions above C,
    since the factor of the loss multiplies what is hidden, too: norms are raised before it.

    Args:
        entries: of each parameter, l of them. What underflows are their squares and products of Grams,
            of which there are about as many at most; few entries count as `_FEWEST`.
        dtypes: in which each norm was computed.
    """
    pairs = zip(entries, dtypes, strict=True)
    lost = tuple(lost_squares(4 * max(n, _FEWEST), dtype) for n, dtype in pairs)
    raised = norm_sq + column(lost, norm_sq.dtype, norm_sq.device)
    return torch.where(norm_sq.sum(0) > 0, raised, norm_sq)


@functools.lru_cache(maxsize=256)
def column(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of l layers, [l, 1]."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None]


def gram_bound(
    total: Tensor, t: int | Tensor, norm_a: Tensor, norm_g: Tensor, a_entries: int | Tensor,
    g_entries: int | Tensor,
) -> Tensor:  # fmt: skip
    """What rounding and underflow can hide of a product of Grams, [b].

    c * u * ||A||^2 ||G||^2, where c grows with how much of that has canceled, and for squares below
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
    canceled = (1 / (1 + left)).nan_to_num(0.0)
    c = GRAM_ERROR_FACTOR + (CANCELED_ERROR_FACTOR - GRAM_ERROR_FACTOR) * canceled
    rounding = c * unit_roundoff(dtype) * product
    return rounding + lost_squares(1, dtype) * (a_entries * norm_g + g_entries * norm_a)


# -------------------------------------------------------------------------------------------------


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

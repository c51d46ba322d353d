"""Squared norms from Gram matrices, and their rounding margins.

Sample b's gradient is g_b^T a_b, so its squared norm is sum_{t,s} (a_t.a_s)(g_t.g_s): two Grams and an
inner product. With large, nearly orthogonal terms that sum cancels and can be far too small, even
negative. It is clamped at 0 and raised by its rounding bound. A norm is never underestimated.
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
# Rounding margins, and norms raised by them: no sample adds more than its norm.


_FEWEST = 1 << 14


class LaterNorm(ABC):
    """Squared norms of a parameter's gradients, whose last operations run once per `kind`."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Norms of one kind are finished together."""

    @abstractmethod
    def raised(self) -> Tensor:
        """Returns squared norms, [b], never below those of the samples' terms in the clipped sum."""

    @staticmethod
    @abstractmethod
    def together(norms: Sequence[Any]) -> Tensor:
        """Returns `raised` for l norms of a kind, [l, b], with as many operations as for one."""


@dataclass
class RaisedNorm(LaterNorm):
    """A squared norm before it is raised by its rounding bound, of one layer or of l stacked ones.

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
        """Stacks l norms of a kind."""
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
    """The sum of the squared norms [b] of a parameter's parts. Many of them, added in sequence in
    float32, could be too small."""

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
        absolute: at least the sum of the absolute values of the terms of `total`, [b].
        positions: t. a_entries, g_entries: the number of entries of A_b and G_b.
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
    """Returns the joint error of dot products of d and p terms of one sign, which round alike, in u.

    Added in sequence, the error is up to n / 4. This holds for float64: MKL on AMD does not split these
    sums (measured: 112 at 512, 1886 at 8192). Libraries of GPUs are not known to split them either. Sums
    of float32 on a CPU are split: by the loops after 192 terms, by MKL on AMD too (16 at 64, 48 from 192
    to 4096; n / 32 for one or two positions), by others after 384. Terms of both signs err by a few u of
    `gram_bound`.

    Args:
        like: a tensor of their type and device.
    """
    if like.dtype == torch.float64 or like.device.type != "cpu":
        return (d + p) / 4
    return sum(min(n / 4, 96 + n / 32) for n in (d, p))


def raised_by_signs(
    total: Tensor, absolute: Tensor, dots: float | Tensor, positions: int | Tensor
) -> Tensor:
    """Raises a product of Grams by the errors of terms of one sign.

    These are the errors of the dot products, each in its own direction (`dot_room`). And that of the
    clipped sum, which adds over positions and is too high by up to positions / 4 u (255 at 1024).
    """
    return total + unit_roundoff(total.dtype) * (dots * absolute + positions / 2 * total)


@dataclass
class ProductNorm(RaisedNorm):
    """The norm of the computed gradients g_b^T a_b, which are also summed.

    If large terms cancel, the computed product is off by up to c * u * ||A_b|| ||G_b||. This is added
    to its norm, which is then never underestimated.

    Attributes:
        taps: the size of a convolution's kernel, at most as often as its patches repeat a pixel.
    """

    taps: int | Tensor = 1

    def raised(self) -> Tensor:
        return (self.total.sqrt() + self.margin()).square()

    def margin(self) -> Tensor:
        """Returns the rounding margin of the norm, [b]."""
        return _margin(self.norm_a, self.norm_g, self.taps)


def product_margin(a: Tensor, g: Tensor, taps: int = 1) -> Tensor:
    """Returns rounding margins of the norms of products of a and g [b, ...], [b]; see `ProductNorm`."""
    return _margin(row_norm_sq(a), row_norm_sq(g), taps)


def _margin(norm_a: Tensor, norm_g: Tensor, taps: int | Tensor) -> Tensor:
    size = (taps * norm_a * norm_g).sqrt()
    return PRODUCT_ERROR_FACTOR * unit_roundoff(size.dtype) * size


def with_lost(norm_sq: Tensor, entries: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """Raises squared norms [l, b] by all that underflow can hide; a sample of norm 0 keeps 0.

    This is negligible compared with a threshold. At scales C / n it would lift contributions above C:
    the loss weight multiplies the hidden part too. So norms are raised before that weight.

    Args:
        entries: of each of l parameters. Their squares, and about as many products of Grams, may
        underflow. Few entries count as `_FEWEST`.
        dtypes: in which each norm was computed.
    """
    pairs = zip(entries, dtypes, strict=True)
    lost = tuple(lost_squares(4 * max(n, _FEWEST), dtype) for n, dtype in pairs)
    raised = norm_sq + column(lost, norm_sq.dtype, norm_sq.device)
    return torch.where(norm_sq.sum(0) > 0, raised, norm_sq)


@functools.lru_cache(maxsize=256)
def column(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers of l layers, [l, 1]."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None]


def gram_bound(
    total: Tensor, t: int | Tensor, norm_a: Tensor, norm_g: Tensor, a_entries: int | Tensor,
    g_entries: int | Tensor,
) -> Tensor:  # fmt: skip
    """Returns what rounding and underflow can hide of a product of Grams, [b].

    This is c * u * ||A||^2 ||G||^2, where c grows with the canceled part. For squares below the range of
    the type it is their number times the type's smallest number: the Gram of one operand is off by at
    most that, entry by entry.

    Args:
        total: the product, as computed, of Grams [b, t, t]. t: positions, of all samples or of each.
        norm_a, norm_g: ||A_b||^2 and ||G_b||^2, [b].
        a_entries, g_entries: the number of entries of A_b and G_b, per sample.
    """
    dtype = norm_a.dtype
    product = norm_a * norm_g
    left = CANCELLATION * t * (total / product)  # NaN if both are 0 or inf: no part of c then
    canceled = (1 / (1 + left)).nan_to_num(0.0)
    c = GRAM_ERROR_FACTOR + (CANCELED_ERROR_FACTOR - GRAM_ERROR_FACTOR) * canceled
    rounding = c * unit_roundoff(dtype) * product
    return rounding + lost_squares(1, dtype) * (a_entries * norm_g + g_entries * norm_a)


# -------------------------------------------------------------------------------------------------


_CUT_FROM, _STRIPS = 384, 4
"""Positions from which a Gram is computed in strips of rows: shorter ones save little."""
_FEW = 12
"""Positions below which a library adds columns (not rows) in sequence: an error of d / 5 u instead of
d / 18 u if all have one sign."""


def half_gram(x: Tensor) -> Tensor:
    """Computes the Gram of each sample's positions, on and above its diagonal: x [b, t, d] -> [b, t, t].

    It is symmetric. Entries below the diagonal are correct or 0, in the same places for all x with as
    many positions. Short ones are whole. Long ones come in strips of rows, each from its diagonal on,
    which is five eighths of the work.
    """
    return wide_gram(widen(x).detach())


@host_operation
@in_full_float32
def wide_gram(x: Tensor) -> Tensor:
    """Computes `half_gram` of x in its accumulation type."""
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
    """Returns the number of strips for the Gram of so many positions."""
    return 1 if t < _CUT_FROM else _STRIPS


def _strips(t: int) -> list[tuple[int, int]]:
    n = strips_of(t)
    return [(t * i // n, t * (i + 1) // n) for i in range(n)]


def gram_norm(gram_a: Tensor, g: Tensor, d: int) -> GramNorm:
    """Returns sum_{t,s} (a_t.a_s)(g_t.g_s) from a half Gram [b, t, t] of rows of d, and g [b, t, p]."""
    (t, p), g = g.shape[1:], widen(g).detach()
    total, absolute, trace_a, trace_g = gram_dots(gram_a, g)
    return GramNorm(total, trace_a, trace_g, absolute, t, t * d, t * p, dot_room(d, p, g))


@host_operation
@in_full_float32
def gram_dots(gram_a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the inner product of a half Gram [b, t, t] and that of g [b, t, p].

    Returns:
        [b] each: the product, the same for absolute values, and the traces of both.
    """
    gram_g = wide_gram(g)
    trace_g = trace(gram_g)
    for first, last in _strips(gram_g.shape[1])[:-1]:  # both have the same half
        gram_g[:, first:last, last:].mul_(2)
    return *row_dots(gram_a, gram_g), trace(gram_a), trace_g


@host_operation
@in_full_float32
def gram_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> GramNorm:
    """Returns `gram_norm` for a [b, t, d] and g [b, t, p] of l layers, stacked, [l, b]. Consecutive
    layers may share `a`."""
    last = LastInput()
    found: GramNorm = GramNorm.stacked([gram_norm(last.gram(a), g, a.shape[2]) for a, g in pairs])
    return found


def half_dot(x: Tensor, y: Tensor) -> Tensor:
    """Computes the inner product of symmetric matrices, without reading below the diagonals.

    Args:
        x, y: [b, t, t]. Entries below the diagonal of x must be finite if x is.

    Returns:
        [b].
    """
    return row_dot(x, y.triu() + y.triu(1))


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Computes the inner product per sample, x and y [b, t, s] -> [b].

    It is not a batched product. That adds in sequence, which takes longer than a product and a sum. If
    all terms have one sign, it errs by a sixteenth of their number in u and more.
    """
    return (x * y).sum((1, 2))


def row_dots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `row_dot`, and the same sum of absolute values."""
    products = (x * y).flatten(1)
    return products.sum(1), torch.linalg.vector_norm(products, ord=1, dim=1)


def gram_size(gram: Tensor) -> Tensor:
    """Returns at least the Frobenius norm of a half Gram, [b, t, t] -> float64 [b]."""
    size = torch.linalg.vector_norm(gram, dim=(1, 2), dtype=torch.float64)
    return size if strips_of(gram.shape[1]) == 1 else size * 2**0.5


def trace(grams: Tensor) -> Tensor:
    """Returns the trace of each matrix, [b, t, t] -> [b]."""
    return grams.diagonal(dim1=1, dim2=2).sum(1)


@dataclass
class _Known:
    key: tuple
    x: Tensor
    gram: Tensor | None = None
    norm_sq: Tensor | None = None


class LastInput:
    """What is known of the last layer input in a pass: layers with the same input share it.

    It holds that input, and no other tensor can then reuse its memory. Passes of several devices run in
    separate threads, which may alternate: each continues with what it has found.
    """

    def __init__(self) -> None:
        self._last: _Known | None = None

    def gram(self, x: Tensor) -> Tensor:
        """Returns `half_gram` of `x` [b, t, d]."""
        known = self._known(x)
        if known.gram is None:
            known.gram = half_gram(x)
        return known.gram

    def norm_sq(self, x: Tensor) -> Tensor:
        """Returns `row_norm_sq` of `x` [b, ...]."""
        known = self._known(x)
        if known.norm_sq is None:
            known.norm_sq = row_norm_sq(x)
        return known.norm_sq

    def _known(self, x: Tensor) -> _Known:
        if type(x) not in (Tensor, nn.Parameter) or not x.data_ptr():  # its memory is unknown
            return _Known((), x)
        key = (x.data_ptr(), x.device, x._version, x.dtype, x.shape, x.stride())
        last = self._last
        if last is None or last.key != key:
            last = self._last = _Known(key, x)
        return last

"""What rounding can hide of norms, and norms raised by it: no sample adds more than they tell."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fastclip.ops.numerics import (
    CANCELLATION,
    CANCELLED_ERROR_FACTOR,
    GRAM_ERROR_FACTOR,
    PRODUCT_ERROR_FACTOR,
    lost_squares,
    row_norm_sq,
    unit_roundoff,
)

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
        return (self.total.sqrt() + self.slack()).square()

    def slack(self) -> Tensor:
        """What rounding can hide of the norm, [b]."""
        return _slack(self.norm_a, self.norm_g, self.taps)


def product_slack(a: Tensor, g: Tensor, taps: int = 1) -> Tensor:
    """What rounding can hide of the norms of products of a and g [b, ...], [b]; see `ProductNorm`."""
    return _slack(row_norm_sq(a), row_norm_sq(g), taps)


def _slack(norm_a: Tensor, norm_g: Tensor, taps: int | Tensor) -> Tensor:
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

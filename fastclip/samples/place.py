"""Where the samples are in one tensor: along an axis, which other dimensions may be folded into."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Sample i holds the entries `outer * B * inner`-wise at o * B * inner + i * inner + k of `axis`.

    Windows, heads and [B * T, d] have outer 1; time-major rows [T * B, d] have inner 1; a plain batch
    has both 1.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    plain: bool = field(init=False, repr=False, compare=False)
    """One entry of the axis a sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.outer == self.inner == 1)

    @property
    def order(self) -> int:
        """1: sample by sample, -1: the samples' first entries come first; 0: both, or neither."""
        return (self.outer == 1) - (self.inner == 1)

    def like(self, other: Place) -> bool:
        """Whether it may be the same layout as this one, at other lengths."""
        return self.axis == other.axis and self.order * other.order >= 0

    def fold(self, size: int, batch: int) -> tuple[int, int] | None:
        """outer and inner for an axis of this size; None where it cannot hold the batch.

        A length that changes between steps changes the one of them that is not 1.
        """
        if self.plain:
            return (1, 1) if size == batch else None
        if not batch:
            return (self.outer, self.inner) if not size else None
        if size % batch:
            return None
        each = size // batch
        if each == self.outer * self.inner:
            return self.outer, self.inner
        if self.outer == 1:
            return 1, each
        return (each, 1) if self.inner == 1 else None

    def fits(self, x: Tensor, batch: int) -> bool:
        """Whether `x` can hold so many samples here."""
        return x.dim() > self.axis and self.fold(x.shape[self.axis], batch) is not None

    def rows(self, x: Tensor, batch: int) -> Tensor:
        """`x` with its samples along axis 0: [b, *others], or [b, outer * inner, *others] if folded."""
        if self.plain:
            return x.movedim(self.axis, 0) if self.axis else x
        found = self.fold(x.shape[self.axis], batch)
        assert found is not None
        outer, inner = found
        first = x.movedim(self.axis, 0)
        split = first.reshape(outer, batch, inner, *first.shape[1:]).transpose(0, 1)
        return split.reshape(batch, outer * inner, *first.shape[1:])

    def moved_to(self, axis: int) -> Place:
        """The same fold of another axis."""
        return self if axis == self.axis else Place(axis, self.outer, self.inner)

    def owners(self, size: int, batch: int, device: torch.device) -> Tensor:
        """The sample of every entry of the axis, int64 [size]."""
        found = self.fold(size, batch)
        assert found is not None
        entries = torch.arange(size, dtype=torch.int64, device=device)
        return entries.div(found[1], rounding_mode="floor").remainder(max(batch, 1))


def places(shape: tuple[int, ...], batch: int, axes: list[int]) -> Iterator[Place]:
    """Where `batch` samples may be in a tensor of this shape, the plainest first."""
    for axis in axes:
        size = shape[axis]
        if not size or size % batch:
            continue
        each = size // batch
        divisors = [n for n in range(1, each + 1) if not each % n]
        yield from (Place(axis, outer, each // outer) for outer in divisors)


def called(name: Hashable) -> str:
    """A layer's path, or what a use is known by."""
    return str(name) if isinstance(name, str) else str(getattr(name, "label", name))

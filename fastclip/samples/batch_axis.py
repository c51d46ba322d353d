"""The batch axis of one tensor: other dimensions may be flattened with the samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import GraphError


@dataclass(frozen=True)
class BatchAxis:
    """Sample i holds the entries `outer * B * inner`-wise at o * B * inner + i * inner + k of `axis`.

    Windows, heads and [B * T, d] have outer 1; time-major samples [T * B, d] have inner 1; a plain batch
    has both 1.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    plain: bool = field(init=False, repr=False, compare=False)
    """One entry of the axis per sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.outer == self.inner == 1)

    @property
    def order(self) -> int:
        """1: sample by sample, -1: the samples' first entries come first; 0: both, or neither."""
        return (self.outer == 1) - (self.inner == 1)

    def like(self, other: BatchAxis) -> bool:
        """Whether it may be the same layout as this one, at other lengths."""
        return self.axis == other.axis and self.order * other.order >= 0

    def fold(self, size: int, batch: int) -> tuple[int, int] | None:
        """outer and inner for an axis of this size; None if it cannot hold the batch.

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

    def samples(self, x: Tensor, batch: int) -> Tensor:
        """`x` with its samples along axis 0: [b, *others], or [b, outer * inner, *others] if
        flattened."""
        if self.plain:
            return x.movedim(self.axis, 0) if self.axis else x
        found = self.fold(x.shape[self.axis], batch)
        assert found is not None
        outer, inner = found
        first = x.movedim(self.axis, 0)
        split = first.reshape(outer, batch, inner, *first.shape[1:]).transpose(0, 1)
        return split.reshape(batch, outer * inner, *first.shape[1:])

    def moved_to(self, axis: int) -> BatchAxis:
        """The same layout along another axis."""
        return self if axis == self.axis else BatchAxis(axis, self.outer, self.inner)

    def sample_of_entry(self, size: int, batch: int, device: torch.device) -> Tensor:
        """The sample of every entry of the axis, int64 [size]."""
        found = self.fold(size, batch)
        assert found is not None
        entries = torch.arange(size, dtype=torch.int64, device=device)
        return entries.div(found[1], rounding_mode="floor").remainder(max(batch, 1))


def batch_axes(shape: tuple[int, ...], batch: int, axes: list[int]) -> Iterator[BatchAxis]:
    """The possible batch axes of `batch` samples in a tensor of this shape, the plainest first."""
    for axis in axes:
        size = shape[axis]
        if not size or size % batch:
            continue
        each = size // batch
        divisors = [n for n in range(1, each + 1) if not each % n]
        yield from (BatchAxis(axis, outer, each // outer) for outer in divisors)


def called(name: Hashable) -> str:
    """A layer's path, or the name of a use."""
    return str(name) if isinstance(name, str) else str(getattr(name, "label", name))


# -------------------------------------------------------------------------------------------------
# Gradients in which each sample is scaled by its own power of two.
#
# A backward pass is linear, and a power of two scales without rounding. So if two passes start from the
# same gradients, once unchanged and once scaled, every entry that depends on sample i alone is scaled by
# exactly its factor. An entry that depends on two samples is not. An entry without a gradient belongs to
# no sample, and contributes nothing.


NOBODY = -1


def coded_by(gradient: Tensor, axis: int, digits: Tensor) -> Tensor:
    """`gradient` with entry i of the axis times 2^digits[i]; digits is [size of the axis]."""
    shape = [1] * gradient.dim()
    shape[axis] = -1
    factor = torch.exp2(digits.to(torch.float32)).to(gradient.device, gradient.dtype)
    return gradient * factor.view(shape)


# -------------------------------------------------------------------------------------------------
# Methods that are called without tensors: the samples in them cannot be located.


def check_rows(running: Iterable[Any], layouts: Mapping[str, Any], path: Hashable | None) -> None:
    """Check that such a method does not reach a private layer itself. Its calls with samples are traced.

    Args:
        running: the calls, the outermost first. layouts: what is known about them, by their names; some
            are known to train. path: of the layer; None: it is no layer.

    Raises:
        GraphError: naming both.
    """
    blind = [call.name for call in running if call.drives and not layouts[call.name].drives]
    if blind and path is not None:
        raise GraphError(
            f"{called(path)} is reached inside {blind[-1]}, which was called without tensors, so its "
            "samples cannot be identified. Pass the batch to the method as an argument.",
            doc="batch-axis",
        )


# -------------------------------------------------------------------------------------------------
# Whether values of two runs agree except for rounding.


VALUES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far values of one sample may differ, relative to the largest of the tensor: a kernel may add up in
another order where another sample is longer."""
OTHER_BATCH = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The same in batches of another size, or at another batch_axis: parts of a float64 model may compute in
float32."""
_MASKS, _BELOW = 1e4, 1e3
"""A mask writes numbers of at least this size, and all others are so many times smaller."""


def close(first: Tensor, second: Tensor, allowed: dict[torch.dtype, float]) -> bool:
    if torch.equal(first, second):  # most are
        return True
    if not first.is_floating_point() and not first.is_complex():
        return False
    # 16-bit roundings of sums may differ in their last bit
    dtype = first.dtype.to_real()
    tolerance = allowed.get(dtype, 4 * torch.finfo(dtype).eps)
    known = torch.isfinite(first)
    if not torch.equal(known, torch.isfinite(second)):
        return False
    one, other = _unmasked(first[known], second[known])
    return not one.numel() or bool(
        (one - other).abs().max() <= tolerance * torch.maximum(one.abs().max(), other.abs().max())
    )


def _unmasked(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the numbers of a mask, which are so large that they would hide all others."""
    sizes = one.abs()
    largest = sizes.amax() if len(one) else 0.0
    if largest < _MASKS:
        return one, other
    rest = (sizes < largest) | (one != other)
    apart = bool((torch.maximum(sizes, other.abs())[rest] <= largest / _BELOW).all())
    return (one[rest], other[rest]) if apart else (one, other)

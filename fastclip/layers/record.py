"""What a layer's backward leaves behind: enough to know each sample's norm, then its clipped sum.

A record belongs to one parameter and one call of one layer. It answers three questions: the
squared norm of every sample's gradient, the weighted sum of these gradients, and, where uses of
different kinds share a parameter, the gradients themselves.

Where a gradient cancels within its sample, two ways to compute it differ by far more than the norm
of what is left. A norm from Grams is raised by more than that; one of the gradients themselves is
not, and bounds the sum only if that adds up the same numbers, computed in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip._torch import version_of
from fastclip.errors import GraphError
from fastclip.ops.units import UnitRows


def written_to() -> GraphError:
    """What a norm was taken of is not what would be summed."""
    return GraphError(
        "an activation or output gradient was modified in place between the backward pass "
        "and the clipped sum, so the recorded norm no longer bounds the contribution; do "
        "not change tensors of the forward pass before loss.backward() has returned"
    )


class Record(ABC):
    """One contribution to one parameter's gradient, for the b samples of a batch."""

    instantiates = False
    """The norms are of the gradients themselves, which `clipped_sum` then adds up."""

    def __init__(self, *operands: Tensor) -> None:
        self._operands = operands
        self._versions = [*map(version_of, operands)]

    def check_unmodified(self) -> None:
        """Raise if an operand was changed in place since the norm was taken.

        A record is made in every call of a layer, so it keeps bare versions, as a use and sums do.
        """
        if [*map(version_of, self._operands)] != self._versions:
            raise written_to()

    @property
    def nbytes(self) -> int:
        """Bytes held until the end of the backward pass."""
        return sum(x.numel() * x.element_size() for x in self._operands)

    def merge(self, other: Record) -> Record | None:
        """One record for this contribution and `other` to the same parameter, or None."""
        return None

    def settled(self) -> Record:
        """Itself, with nothing that waits for what else the pass computes."""
        return self

    @property
    def together(self) -> Any:
        """The LinearRecord whose norm and sum a kernel computes with those of others, or None."""
        return None

    @abstractmethod
    def norm_sq(self) -> Tensor:
        """Squared norms of the samples' gradients, [b]."""

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        """The same, or what it is made of, to be finished with that of other layers.

        Args:
            last_input: what is known of the one that the pass has met last.
        """
        return self.norm_sq()

    @abstractmethod
    def clipped_sum(self, scale: Tensor) -> Tensor:
        """sum_b scale_b times sample b's gradient, in the parameter's shape; scale is [b]."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradients themselves, [b, *parameter shape]."""

    def apart(self) -> Iterator[Tensor]:
        """The gradients themselves, some samples after the other: the same numbers each time."""
        yield self.per_sample()

    def slack(self) -> Tensor | None:
        """What rounding can hide of the norms of `per_sample`, [b]; None for gradients as given."""
        return None

    def of_units(self, units: UnitRows) -> Record:
        """The same with units for samples: a unit's gradient is the sum of its rows'."""
        slack = self.slack()
        return KeptRecord(
            units.total(self.per_sample()), None if slack is None else units.total(slack)
        )


def norm_apart(record: Record) -> Tensor:
    """Squared norms [b] of the gradients that `apart` gives, raised by what rounding can hide."""
    parts = [ops.row_norm_sq(gradients) for gradients in record.apart()]
    norm_sq, slack = parts[0] if len(parts) == 1 else torch.cat(parts), record.slack()
    return norm_sq if slack is None else (norm_sq.sqrt() + slack).square()


def join(records: list[Record], record: Record) -> None:
    """Add a contribution to those of the same parameter: to the first that it makes one record with."""
    for i, held in enumerate(records):
        merged = held.merge(record)
        if merged is not None:
            records[i] = merged
            return
    records.append(record)


class KeptRecord(Record):
    """Per-sample gradients that were computed outright, [b, *parameter shape].

    Args:
        hidden: what rounding can hide of their norms, [b], or these norms with it; None where they
            are as given.
    """

    def __init__(self, gradients: Tensor, hidden: Tensor | ops.ProductNorm | None = None) -> None:
        self.gradients = ops.widen(gradients)
        super().__init__(self.gradients)
        self._hidden = hidden

    def merge(self, other: Record) -> Record | None:
        if not isinstance(other, KeptRecord):
            return None
        gradients, more = self.gradients, other.gradients
        if gradients.shape != more.shape:  # of two views of a parameter
            return None
        own, added = self.slack(), other.slack()
        slack = own if added is None else added
        if own is not None and added is not None:
            slack = own + added
        return KeptRecord(gradients + more, slack)

    def norm_sq(self) -> Tensor:
        if isinstance(self._hidden, ops.ProductNorm):
            return self._hidden.raised()
        norm_sq = ops.row_norm_sq(self.gradients)
        return norm_sq if self._hidden is None else (norm_sq.sqrt() + self._hidden).square()

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        return self._hidden if isinstance(self._hidden, ops.ProductNorm) else self.norm_sq()

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.kept_sum(self.gradients, scale)

    def per_sample(self) -> Tensor:
        return self.gradients

    @property
    def as_given(self) -> bool:
        """Nothing of their norms is hidden."""
        return self._hidden is None

    def slack(self) -> Tensor | None:
        return self._hidden.slack() if isinstance(self._hidden, ops.ProductNorm) else self._hidden


class PartedRecord(KeptRecord):
    """Per-sample gradients with their norms, some samples after the other: a large piece of memory
    would not find room among what is freed meanwhile."""

    def __init__(self, parts: Sequence[Tensor], norm: ops.ProductNorm) -> None:
        Record.__init__(self, *parts)
        self.parts, self._hidden = list(parts), norm

    @property
    def gradients(self) -> Tensor:  # type: ignore[override]  # made whole only when it is read
        return ops.whole(self.parts)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.parted_sum(self.parts, scale)

    def apart(self) -> Iterator[Tensor]:
        yield from self.parts


def kept_record(parts: Sequence[Tensor], norm: ops.ProductNorm) -> KeptRecord:
    """The record of gradients that `ops.kept_gradients` has computed."""
    return KeptRecord(parts[0], norm) if len(parts) == 1 else PartedRecord(parts, norm)


class InstantiatedRecord(KeptRecord):
    """Per-sample gradients [b, *parameter shape] whose norms were taken as they were computed.

    Args:
        norm_sq: squared norms, [b], raised by what rounding can hide of them.
    """

    def __init__(self, norm_sq: Tensor, gradients: Tensor) -> None:
        super().__init__(gradients)
        self._norm_sq = norm_sq

    def norm_sq(self) -> Tensor:
        return self._norm_sq

    @property
    def as_given(self) -> bool:
        return False

    def slack(self) -> Tensor:
        return (self._norm_sq.sqrt() - ops.row_norm_sq(self.gradients).sqrt()).clamp_min(0)


class ViewedRecord(Record):
    """A record of the parameter's entries in another shape."""

    def __init__(self, record: Record, shape: torch.Size) -> None:
        super().__init__(*record._operands)
        self.record, self.shape = record, shape

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return self.record.instantiates

    def merge(self, other: Record) -> Record | None:
        if not isinstance(other, ViewedRecord) or other.shape != self.shape:
            return None
        merged = self.record.merge(other.record)
        return None if merged is None else ViewedRecord(merged, self.shape)

    def norm_sq(self) -> Tensor:
        return self.record.norm_sq()

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        return self.record.norm_parts(last_input)

    @property
    def together(self) -> Any:
        return self.record.together

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return self.record.clipped_sum(scale).view(self.shape)

    def per_sample(self) -> Tensor:
        own = self.record.per_sample()
        return own.view(len(own), *self.shape)

    def apart(self) -> Iterator[Tensor]:
        for own in self.record.apart():
            yield own.view(len(own), *self.shape)

    def slack(self) -> Tensor | None:
        return self.record.slack()

    def of_units(self, units: UnitRows) -> Record:
        return ViewedRecord(self.record.of_units(units), self.shape)

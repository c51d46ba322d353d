"""What a layer's backward leaves behind: enough to know each sample's norm, then its clipped sum.

A record belongs to one parameter and one call of one layer. It answers three questions: the
squared norm of every sample's gradient, the weighted sum of these gradients, and, where uses of
different kinds share a parameter, the gradients themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fastclip import ops
from fastclip.errors import GraphError


class Record(ABC):
    """One contribution to one parameter's gradient, for the b samples of a batch."""

    def __init__(self, *operands: Tensor) -> None:
        self._operands = operands
        self._versions = tuple(x._version for x in operands)

    def check_unmodified(self) -> None:
        """Raise if an operand was changed in place since the norm was taken."""
        if tuple(x._version for x in self._operands) != self._versions:
            raise GraphError(
                "an activation or output gradient was modified in place between the backward pass "
                "and the clipped sum, so the recorded norm no longer bounds the contribution; do "
                "not change tensors of the forward pass before loss.backward() has returned"
            )

    @property
    def nbytes(self) -> int:
        """Bytes held until the end of the backward pass."""
        return sum(x.numel() * x.element_size() for x in self._operands)

    def merge(self, other: Record) -> Record | None:
        """One record for this contribution and `other` to the same parameter, or None."""
        return None

    @abstractmethod
    def norm_sq(self) -> Tensor:
        """Squared norms of the samples' gradients, [b]."""

    @abstractmethod
    def clipped_sum(self, scale: Tensor) -> Tensor:
        """sum_b scale_b times sample b's gradient, in the parameter's shape; scale is [b]."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradients themselves, [b, *parameter shape]."""

    def slack(self) -> Tensor | None:
        """What rounding can hide of the norms of `per_sample`, [b]; None for gradients as given."""
        return None


def join(records: list[Record], record: Record) -> None:
    """Add a contribution to those of the same parameter: to the first that it makes one record with."""
    for i, held in enumerate(records):
        merged = held.merge(record)
        if merged is not None:
            records[i] = merged
            return
    records.append(record)


class KeptRecord(Record):
    """Per-sample gradients that were computed outright, [b, *parameter shape]."""

    def __init__(self, gradients: Tensor, slack: Tensor | None = None) -> None:
        super().__init__(gradients)
        self.gradients = gradients
        self._slack = slack

    def merge(self, other: Record) -> Record | None:
        if isinstance(other, KeptRecord):
            slack = self._slack if other._slack is None else other._slack
            if self._slack is not None and other._slack is not None:
                slack = self._slack + other._slack
            return KeptRecord(self.gradients + other.gradients, slack)
        return None

    def norm_sq(self) -> Tensor:
        norm_sq = ops.row_norm_sq(self.gradients)
        return norm_sq if self._slack is None else (norm_sq.sqrt() + self._slack).square()

    @ops.in_full_float32
    def clipped_sum(self, scale: Tensor) -> Tensor:
        (gradients,) = ops.drop_zeroed(scale, self.gradients)
        flat = gradients.reshape(len(scale), gradients.shape[1:].numel())
        return (scale.to(flat.dtype) @ flat).view(gradients.shape[1:])

    def per_sample(self) -> Tensor:
        return self.gradients

    def slack(self) -> Tensor | None:
        return self._slack


class LinearRecord(Record):
    """A linear map of a [b, t, d] with g [b, t, p]: g_b^T a_b, transposed where weights are [d, p]."""

    def __init__(
        self, a: Tensor, g: Tensor, *, ghost: bool = True, transposed: bool = False
    ) -> None:
        super().__init__(a, g)
        self.a, self.g, self.ghost, self.transposed = a, g, ghost, transposed

    def norm_sq(self) -> Tensor:
        if self.ghost:
            return ops.ghost_norm(self.a, self.g)
        norm = ops.instantiated_norm(self.a, self.g)
        assert isinstance(norm, Tensor)
        return norm

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self.transposed:
            return ops.scaled_sum(self.g, self.a, scale)
        return ops.scaled_sum(self.a, self.g, scale)

    def turned(self) -> LinearRecord:
        """The same for a weight of which this record's is the transpose."""
        return LinearRecord(self.a, self.g, ghost=self.ghost, transposed=not self.transposed)

    def per_sample(self) -> Tensor:
        pair = (self.g, self.a) if self.transposed else (self.a, self.g)
        return ops.per_sample_gradients(*pair)

    def slack(self) -> Tensor | None:
        return ops.product_slack(self.a, self.g)


class ConvRecord(Record):
    """A convolution over x [b, c, *space] with output gradient g [b, o, *out]."""

    def __init__(self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, *, ghost: bool) -> None:
        super().__init__(x, g)
        self.x, self.g, self.geometry, self.ghost = x, g, geometry, ghost

    def norm_sq(self) -> Tensor:
        norm = ops.conv_ghost_norm if self.ghost else ops.conv_norm
        return norm(self.x, self.g, self.geometry)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.conv_sum(self.x, self.g, scale, self.geometry)

    def per_sample(self) -> Tensor:
        return ops.conv_per_sample_gradients(self.x, self.g, self.geometry)

    def slack(self) -> Tensor | None:
        return ops.product_slack(self.x, self.g, torch.Size(self.geometry.kernel).numel())


class LookupRecord(Record):
    """Rows looked up in a table: entry j took row ids[j] for sample[j] and received g[j].

    `per_sample_count` is t where the entries are those of ids [b, t] in order, else None (ragged).
    """

    def __init__(
        self, ids: Tensor, sample: Tensor, g: Tensor, *, batch_size: int, num_embeddings: int,
        padding_idx: int | None = None, per_sample_count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ids, g)
        self.ids, self.sample, self.g = ids.to(torch.int64), sample, g
        self.batch_size, self.num_embeddings = batch_size, num_embeddings
        self.padding_idx, self.per_sample_count = padding_idx, per_sample_count

    @classmethod
    def from_dense(
        cls, ids: Tensor, g: Tensor, num_embeddings: int, padding_idx: int | None = None
    ) -> LookupRecord:
        """From ids [b, t] and g [b, t, d]."""
        return cls(
            *ops.flatten_lookup(ids, g), batch_size=ids.shape[0], num_embeddings=num_embeddings,
            padding_idx=padding_idx, per_sample_count=ids.shape[1],
        )  # fmt: skip

    def merge(self, other: Record) -> Record | None:
        """The entries of both: uses of one table may cancel, and are summed before any rounding."""
        if not isinstance(other, LookupRecord) or other.batch_size != self.batch_size:
            return None
        padding = self.padding_idx
        if padding == other.padding_idx:
            g, added = self.g, other.g
        else:  # without either's padding, none is left to skip
            g, added, padding = self._without_padding(), other._without_padding(), None
        counts = (self.per_sample_count, other.per_sample_count)
        if None in counts or not self.batch_size:
            return LookupRecord(
                torch.cat([self.ids, other.ids]), torch.cat([self.sample, other.sample]),
                torch.cat([g, added]), batch_size=self.batch_size,
                num_embeddings=self.num_embeddings, padding_idx=padding,
            )  # fmt: skip
        b = self.batch_size
        ids = torch.cat([self.ids.view(b, -1), other.ids.view(b, -1)], dim=1)
        rows = torch.cat([g.view(b, -1, g.shape[1]), added.view(b, -1, g.shape[1])], dim=1)
        return LookupRecord.from_dense(ids, rows, self.num_embeddings, padding)

    def norm_sq(self) -> Tensor:
        norm_sq = ops.lookup_norm(
            self.ids, self.sample, self.g, self.batch_size, self.num_embeddings, self.padding_idx
        )
        return (norm_sq.sqrt() + self.slack()).square()

    def slack(self) -> Tensor:
        return ops.lookup_slack(self.sample, self.g, self.batch_size)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.lookup_sum(
            self.ids, self.sample, self.g, scale, self.num_embeddings, self.padding_idx
        )

    def per_sample(self) -> Tensor:
        b, v = self.batch_size, self.num_embeddings
        rows, one = self.sample * v + self.ids, self.g.new_ones(b, dtype=torch.float32)
        table = ops.lookup_sum(rows, self.sample, self._without_padding(), one, b * v)
        return table.view(b, v, self.g.shape[-1])

    def dense(self) -> tuple[Tensor, Tensor] | None:
        """(ids [b, t], g [b, t, d] with padding rows zeroed), or None where samples are ragged."""
        if self.per_sample_count is None or not self.batch_size:
            return None
        shape = (self.batch_size, self.per_sample_count)
        return self.ids.view(shape), self._without_padding().view(*shape, -1)

    def _without_padding(self) -> Tensor:
        g = ops.widen(self.g)
        if self.padding_idx is None:
            return g
        return g.masked_fill((self.ids == self.padding_idx)[:, None], 0)

"""What a layer's backward leaves behind: enough to know each sample's norm, then its clipped sum.

A record belongs to one parameter and one call of one layer. It answers three questions: the
squared norm of every sample's gradient, the weighted sum of these gradients, and, where uses of
different kinds share a parameter, the gradients themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class KeptRecord(Record):
    """Per-sample gradients that were computed outright, [b, *parameter shape]."""

    def __init__(self, gradients: Tensor, slack: Tensor | None = None) -> None:
        super().__init__(gradients)
        self.gradients = gradients
        self.slack = slack
        """[b], what rounding can hide of each norm."""

    def merge(self, other: Record) -> Record | None:
        if isinstance(other, KeptRecord):
            slack = self.slack if other.slack is None else other.slack
            if self.slack is not None and other.slack is not None:
                slack = self.slack + other.slack
            return KeptRecord(self.gradients + other.gradients, slack)
        return None

    def norm_sq(self) -> Tensor:
        norm_sq = ops.row_norm_sq(self.gradients)
        return norm_sq if self.slack is None else (norm_sq.sqrt() + self.slack).square()

    @ops.in_full_float32
    def clipped_sum(self, scale: Tensor) -> Tensor:
        (gradients,) = ops.drop_zeroed(scale, self.gradients)
        flat = gradients.reshape(len(scale), -1) if len(scale) else gradients.flatten(1)
        return (scale.to(flat.dtype) @ flat).view(gradients.shape[1:])

    def per_sample(self) -> Tensor:
        return self.gradients


class LinearRecord(Record):
    """A linear map: sample b's gradient is g_b^T a_b, or its transpose where weights are [d, p]."""

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

    def per_sample(self) -> Tensor:
        pair = (self.g, self.a) if self.transposed else (self.a, self.g)
        return ops.per_sample_gradients(*pair)


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


class LookupRecord(Record):
    """Rows looked up in a table: entry j took row ids[j] for sample[j] and received g[j].

    `per_sample_count` is t where the entries are those of ids [b, t] in order, else None (ragged).
    """

    def __init__(
        self, ids: Tensor, sample: Tensor, g: Tensor, *, batch_size: int, num_embeddings: int,
        padding_idx: int | None = None, per_sample_count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ids, g)
        self.ids, self.sample, self.g = ids, sample, g
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

    def norm_sq(self) -> Tensor:
        return ops.lookup_norm(
            self.ids, self.sample, self.g, self.batch_size, self.num_embeddings, self.padding_idx
        )

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.lookup_sum(
            self.ids, self.sample, self.g, scale, self.num_embeddings, self.padding_idx
        )

    def per_sample(self) -> Tensor:
        g = self._without_padding()
        table = g.new_zeros(self.batch_size * self.num_embeddings, g.shape[1])
        table.index_add_(0, self.sample * self.num_embeddings + self.ids, g)
        return table.view(self.batch_size, self.num_embeddings, -1)

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

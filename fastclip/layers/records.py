"""Records of the layers: linear maps, convolutions, look-ups."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.record import (
    InstantiatedRecord,
    KeptRecord,
    Record,
    ViewedRecord,
    join,
    kept_record,
    norm_apart,
)
from fastclip.layers.unit_record import LaidRecord, UnitRecord
from fastclip.ops.units import Layout, UnitRows

__all__ = [
    "BiasRecord",
    "ConvRecord",
    "InstantiatedRecord",
    "KeptRecord",
    "LinearRecord",
    "LookupRecord",
    "Record",
    "ViewedRecord",
    "join",
    "kept_record",
]


class LinearRecord(LaidRecord):
    """A linear map of a [b, t, d] with g [b, t, p]: g_b^T a_b, transposed where weights are [d, p].

    Args:
        ghost: its norm is taken from Grams. keep: where samples are units, their gradients are held.
    """

    def __init__(
        self, a: Tensor, g: Tensor, *, ghost: bool = True, transposed: bool = False,
        keep: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(a, g)
        self.a, self.g, self.ghost, self.transposed = a, g, ghost, transposed
        self.keep = keep
        self._kind: Hashable = None

    def norm_sq(self) -> Tensor:
        return ops.ghost_norm(self.a, self.g) if self.ghost else norm_apart(self)

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        if self.ghost and ops.computes_reference(self.a):
            return ops.ghost_parts(self.a, self.g, last_input)
        return self.norm_sq()

    @property
    def together(self) -> LinearRecord | None:
        return self if self.ghost and not ops.computes_reference(self.a) else None

    @property
    def kind(self) -> Hashable:
        """In what records are alike that a kernel takes together."""
        if self._kind is None:
            of_each = [(x.shape, x.stride(), x.dtype, x.device) for x in (self.a, self.g)]
            self._kind = (self.transposed, *of_each)
        return self._kind

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self.ghost:
            return ops.scaled_sum(*self.pair(), scale)
        return ops.parted_sum(self.apart(), scale)

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return not self.ghost

    def pair(self) -> tuple[Tensor, Tensor]:
        """Input and gradient of the map whose weight's gradient, not transposed, this is."""
        return (self.g, self.a) if self.transposed else (self.a, self.g)

    def turned(self) -> LinearRecord:
        """The same for a weight of which this record's is the transpose."""
        return LinearRecord(self.a, self.g, ghost=self.ghost, transposed=not self.transposed)

    def per_sample(self) -> Tensor:
        return ops.per_sample_gradients(*self.pair())

    def apart(self) -> Iterator[Tensor]:
        return ops.gradients_apart(*self.pair())

    def slack(self) -> Tensor | None:
        return ops.product_slack(self.a, self.g)

    def laid(self, layout: Layout) -> list[LinearRecord]:
        pairs = zip(layout.split(self.a), layout.split(self.g), strict=True)
        return [
            LinearRecord(
                a.flatten(1, 2), g.flatten(1, 2), ghost=self.ghost, transposed=self.transposed
            )
            for a, g in pairs
        ]


class BiasRecord(Record):
    """The bias of a linear map: sum_t g for g [b, t, p], of one read with the norm of its weight."""

    def __init__(self, linear: LinearRecord) -> None:
        super().__init__(linear.g)
        self.linear = linear

    def settled(self) -> KeptRecord:
        return KeptRecord(self.per_sample())

    def norm_sq(self) -> Tensor:
        return self.settled().norm_sq()

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return self.settled().clipped_sum(scale)

    def per_sample(self) -> Tensor:
        return ops.wide_sum(self.linear.g, 1)


class ConvRecord(LaidRecord):
    """A convolution over x [b, c, *space] with output gradient g [b, o, *out]; see `LinearRecord`."""

    def __init__(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, *, ghost: bool, keep: bool = False
    ) -> None:
        super().__init__(x, g)
        self.x, self.g, self.geometry, self.ghost = x, g, geometry, ghost
        self.keep = keep

    def norm_sq(self) -> Tensor:
        if self.ghost:
            return ops.conv_ghost_norm(self.x, self.g, self.geometry)
        return norm_apart(self)

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        whole = self.ghost and self.geometry.groups == 1 and len(self.x) > 0
        if whole and ops.computes_reference(self.x):
            return ops.conv_ghost_parts(self.x, self.g, self.geometry)
        return self.norm_sq()

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self.ghost:
            return ops.conv_sum(self.x, self.g, scale, self.geometry)
        return ops.parted_sum(self.apart(), scale)

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return not self.ghost

    def per_sample(self) -> Tensor:
        return ops.conv_per_sample_gradients(self.x, self.g, self.geometry)

    def apart(self) -> Iterator[Tensor]:
        return ops.conv_gradients_apart(self.x, self.g, self.geometry)

    def slack(self) -> Tensor | None:
        return ops.product_slack(self.x, self.g, torch.Size(self.geometry.kernel).numel())

    def laid(self, layout: Layout) -> list[UnitConvRecord]:
        pairs = zip(layout.split(self.x), layout.split(self.g), strict=True)
        return [UnitConvRecord(x, g, self.geometry, ghost=self.ghost) for x, g in pairs]


class UnitConvRecord(Record):
    """A convolution over the n rows of each unit, x [u, n, c, *space] and g [u, n, o, *out]."""

    def __init__(self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, *, ghost: bool) -> None:
        super().__init__(x, g)
        self.x, self.g, self.geometry, self.ghost = x, g, geometry, ghost

    def norm_sq(self) -> Tensor:
        if self.ghost:
            return ops.conv_unit_ghost_norm(self.x, self.g, self.geometry)
        return norm_apart(self)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if not self.ghost:
            return ops.parted_sum(self.apart(), scale)
        rows = scale.repeat_interleave(self.x.shape[1])
        return ops.conv_sum(self.x.flatten(0, 1), self.g.flatten(0, 1), rows, self.geometry)

    def per_sample(self) -> Tensor:
        return ops.conv_unit_gradients(self.x, self.g, self.geometry)

    def apart(self) -> Iterator[Tensor]:
        return ops.conv_unit_gradients_apart(self.x, self.g, self.geometry)

    def slack(self) -> Tensor | None:
        return ops.product_slack(self.x, self.g, torch.Size(self.geometry.kernel).numel())


class LookupRecord(LaidRecord):
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
        if isinstance(other, UnitRecord) and other.whole is not None:
            other = other.whole
        if not isinstance(other, LookupRecord) or other.batch_size != self.batch_size:
            return None
        if other.num_embeddings != self.num_embeddings:  # two views of a table
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

    def of_units(self, units: UnitRows) -> Record:
        """Entries say whose they are; in their places in the rows they are kept for `tied_norm`."""
        whole = LookupRecord(
            self.ids, units.owners_of(self.sample), self.g, batch_size=units.count,
            num_embeddings=self.num_embeddings, padding_idx=self.padding_idx,
        )  # fmt: skip
        ragged = self.per_sample_count is None or not self.batch_size
        return whole if ragged else UnitRecord(self, units, whole)

    def laid(self, layout: Layout) -> list[LookupRecord]:
        dense = self.dense()
        assert dense is not None
        ids, g = map(layout.split, dense)
        return [
            LookupRecord.from_dense(i.flatten(1, 2), x.flatten(1, 2), self.num_embeddings)
            for i, x in zip(ids, g, strict=True)
        ]

    def _without_padding(self) -> Tensor:
        g = ops.widen(self.g)
        if self.padding_idx is None:
            return g
        return g.masked_fill((self.ids == self.padding_idx)[:, None], 0)

"""Records of contributions to a parameter: enough for per-sample norms and the clipped sum.

A record belongs to one parameter and one call of one layer. It gives the squared norm of every
sample's gradient and the weighted sum of these gradients. If uses of different kinds share a
parameter, it also gives the gradients themselves.

If a gradient cancels within its sample, two ways to compute it differ by far more than the norm of
the rest. A norm from Grams is raised by more than that. A norm of the gradients themselves is not: it
bounds the sum only if the sum adds the same numbers, computed in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.torch_names import version_of
from fastclip.errors import GraphError
from fastclip.ops.units import Layout, UnitSamples


def written_to() -> GraphError:
    """Returns the error for a tensor that changed between its norm and its clipped sum."""
    return GraphError(
        "An activation or output gradient was modified in place between the backward pass and the "
        "clipped sum, so its recorded norm is wrong. Do not change tensors of the forward pass "
        "before loss.backward() returns.",
        doc="changed-tensors",
    )


class Record(ABC):
    """One contribution to one parameter's gradient, for the b samples of a batch."""

    instantiates = False
    """Norms are those of the gradients themselves, which `clipped_sum` then adds."""

    def __init__(self, *operands: Tensor) -> None:
        self._operands = operands
        self._versions = [*map(version_of, operands)]

    def check_unmodified(self) -> None:
        """Raises GraphError if an operand was changed in place after its norm was taken.

        Each call of a layer makes a record. It keeps only versions, as uses and sums do.
        """
        if [*map(version_of, self._operands)] != self._versions:
            raise written_to()

    @property
    def nbytes(self) -> int:
        """Bytes held until the end of the backward pass."""
        return sum(x.numel() * x.element_size() for x in self._operands)

    def merge(self, other: Record) -> Record | None:
        """Returns one record for this contribution and `other` to the same parameter, or None."""
        return None

    def settled(self) -> Record:
        """Returns itself, with nothing that waits for later parts of the pass."""
        return self

    @property
    def together(self) -> Any:
        """Returns the LinearRecord that a kernel computes together with others, or None."""
        return None

    @abstractmethod
    def norm_sq(self) -> Tensor:
        """Returns squared norms of the per-sample gradients, [b]."""

    def norm_parts(self, last_input: ops.LastInput) -> Tensor | ops.LaterNorm:
        """Returns the same, or its parts, to be finished together with other layers.

        Args:
            last_input: what is known of the last input in the pass.
        """
        return self.norm_sq()

    @abstractmethod
    def clipped_sum(self, scale: Tensor) -> Tensor:
        """Returns sum_b scale_b times sample b's gradient, in the parameter's shape; scale is [b]."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """Returns the gradients themselves, [b, *parameter shape]."""

    def apart(self) -> Iterator[Tensor]:
        """Yields the gradients themselves, some samples at a time, with the same numbers each time."""
        yield self.per_sample()

    def margin(self) -> Tensor | None:
        """Returns the rounding margin of the norms of `per_sample`, [b]; None for given gradients."""
        return None

    def of_units(self, units: UnitSamples) -> Record:
        """Returns the record of privacy units: a unit's gradient is the sum over its samples."""
        margin = self.margin()
        return KeptRecord(
            units.total(self.per_sample()), None if margin is None else units.total(margin)
        )


def norm_apart(record: Record) -> Tensor:
    """Returns squared norms [b] of the gradients that `apart` yields, raised by the rounding margin."""
    parts = [ops.row_norm_sq(gradients) for gradients in record.apart()]
    norm_sq, margin = parts[0] if len(parts) == 1 else torch.cat(parts), record.margin()
    return norm_sq if margin is None else (norm_sq.sqrt() + margin).square()


def join(records: list[Record], record: Record) -> None:
    """Adds a contribution to a parameter's records, merged with the first possible one."""
    for i, held in enumerate(records):
        merged = held.merge(record)
        if merged is not None:
            records[i] = merged
            return
    records.append(record)


class KeptRecord(Record):
    """Per-sample gradients that were computed outright, [b, *parameter shape].

    Args:
        hidden: rounding margin of their norms, [b], or these norms with it; None for given ones.
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
        own, added = self.margin(), other.margin()
        margin = own if added is None else added
        if own is not None and added is not None:
            margin = own + added
        return KeptRecord(gradients + more, margin)

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
        """Whether their norms need no rounding margin."""
        return self._hidden is None

    def margin(self) -> Tensor | None:
        return self._hidden.margin() if isinstance(self._hidden, ops.ProductNorm) else self._hidden


class PartedRecord(KeptRecord):
    """Per-sample gradients with their norms, in pieces of some samples: a large block would not fit into
    memory that is freed meanwhile."""

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
    """Returns the record of gradients that `ops.kept_gradients` has computed."""
    return KeptRecord(parts[0], norm) if len(parts) == 1 else PartedRecord(parts, norm)


class InstantiatedRecord(KeptRecord):
    """Per-sample gradients [b, *parameter shape] whose norms were taken as they were computed.

    Args:
        norm_sq: squared norms, [b], raised by their rounding margin.
    """

    def __init__(self, norm_sq: Tensor, gradients: Tensor) -> None:
        super().__init__(gradients)
        self._norm_sq = norm_sq

    def norm_sq(self) -> Tensor:
        return self._norm_sq

    @property
    def as_given(self) -> bool:
        return False

    def margin(self) -> Tensor:
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

    def margin(self) -> Tensor | None:
        return self.record.margin()

    def of_units(self, units: UnitSamples) -> Record:
        return ViewedRecord(self.record.of_units(units), self.shape)


# -------------------------------------------------------------------------------------------------
# Records of samples, used as records of the privacy units that they belong to.
#
# A unit's gradient is a sum over the positions of its samples. Concatenated along them, its samples
# are one sample with more positions, whose norm the layer's rule knows, cross terms included. The
# clipped sum is that of the samples, each with its unit's scale.


class LaidRecord(Record):
    """A record whose samples can be concatenated along positions."""

    @abstractmethod
    def laid(self, layout: Layout) -> Sequence[Record]:
        """Returns a record of the units of every run."""

    keep = False
    """The units' gradients may be held instead of the record."""

    def of_units(self, units: UnitSamples) -> Record:
        record = UnitRecord(self, units)
        return record.kept() if self.keep else record


class UnitRecord(Record):
    """The sums over the samples of each unit, from a record of samples.

    Args:
        rows: the record of samples. units: which samples belong together.
        whole: the same as one record of units, if there is one.
    """

    def __init__(self, rows: LaidRecord, units: UnitSamples, whole: Record | None = None) -> None:
        super().__init__(*rows._operands)
        self.rows, self.units, self.whole = rows, units, whole

    def merge(self, other: Record) -> Record | None:
        if isinstance(other, UnitRecord) and other.units is self.units:
            merged = self.rows.merge(other.rows)
            return None if merged is None else merged.of_units(self.units)
        return None if self.whole is None else self.whole.merge(other)

    def norm_sq(self) -> Tensor:
        if self.whole is not None:
            return self.whole.norm_sq()
        layout = self.layout()
        return layout.gather([part.norm_sq() for part in self.rows.laid(layout)])

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return self.whole is None and self.rows.instantiates

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if not self.instantiates:
            return self.rows.clipped_sum(self.units.spread(scale))
        layout = self.layout()
        runs = zip(self.rows.laid(layout), layout.scatter(scale), strict=True)
        return added(part.clipped_sum(own) for part, own in runs)

    def per_sample(self) -> Tensor:
        if self.whole is not None:
            return self.whole.per_sample()
        layout = self.layout()
        return layout.gather([part.per_sample() for part in self.rows.laid(layout)])

    def margin(self) -> Tensor | None:
        if self.whole is not None:
            return self.whole.margin()
        layout = self.layout()
        return _gathered(layout, [part.margin() for part in self.rows.laid(layout)])

    def kept(self) -> KeptRecord:
        """The units' gradients."""
        layout = self.layout()
        parts = self.rows.laid(layout)
        margin = [part.margin() for part in parts]
        return KeptRecord(
            layout.gather([part.per_sample() for part in parts]), _gathered(layout, margin)
        )

    def layout(self, others: Sequence[UnitRecord] = ()) -> Layout:
        """Returns how the samples of this record, and of others of the same units, are laid out."""
        device: torch.device = self._operands[0].device
        return self.units.layout(device, self.nbytes + sum(other.nbytes for other in others))


def added(sums: Iterable[Tensor]) -> Tensor:
    """Adds clipped sums, one at a time."""
    return reduce(torch.add, sums)


def _gathered(layout: Layout, parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [x for x in parts if x is not None]
    return layout.gather(known) if known else None


def of_one_kind(records: Sequence[Record]) -> list[UnitRecord] | None:
    """Returns these records if all are of samples of the same units, else None."""
    found = [r for r in records if isinstance(r, UnitRecord)]
    if len(found) < len(records) or len({id(r.units) for r in found}) != 1:
        return None
    return found


# -------------------------------------------------------------------------------------------------
# Records of the layers: linear maps, convolutions, look-ups.


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
    """A linear map of a [b, t, d] with g [b, t, p]: g_b^T a_b, transposed if weights are [d, p].

    Args:
        ghost: its norm is taken from Grams. keep: gradients of units are held.
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
        """The common properties of records that a kernel takes together."""
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
        """Returns input and output gradient of the map for the weight that is not transposed."""
        return (self.g, self.a) if self.transposed else (self.a, self.g)

    def turned(self) -> LinearRecord:
        """Returns the same record for the transposed weight."""
        return LinearRecord(self.a, self.g, ghost=self.ghost, transposed=not self.transposed)

    def per_sample(self) -> Tensor:
        return ops.per_sample_gradients(*self.pair())

    def apart(self) -> Iterator[Tensor]:
        return ops.gradients_apart(*self.pair())

    def margin(self) -> Tensor | None:
        return ops.product_margin(self.a, self.g)

    def laid(self, layout: Layout) -> list[LinearRecord]:
        pairs = zip(layout.split(self.a), layout.split(self.g), strict=True)
        return [
            LinearRecord(
                a.flatten(1, 2), g.flatten(1, 2), ghost=self.ghost, transposed=self.transposed
            )
            for a, g in pairs
        ]


class BiasRecord(Record):
    """The bias of a linear map: sum_t g for g [b, t, p], read once with the norm of its weight."""

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

    def margin(self) -> Tensor | None:
        return ops.product_margin(self.x, self.g, torch.Size(self.geometry.kernel).numel())

    def laid(self, layout: Layout) -> list[UnitConvRecord]:
        pairs = zip(layout.split(self.x), layout.split(self.g), strict=True)
        return [UnitConvRecord(x, g, self.geometry, ghost=self.ghost) for x, g in pairs]


class UnitConvRecord(Record):
    """A convolution over the n samples of each unit, x [u, n, c, *space] and g [u, n, o, *out]."""

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

    def margin(self) -> Tensor | None:
        return ops.product_margin(self.x, self.g, torch.Size(self.geometry.kernel).numel())


class LookupRecord(LaidRecord):
    """Rows looked up in a table: entry j took row ids[j] for sample[j] and received g[j].

    `per_sample_count` is t if the entries are those of ids [b, t] in order, else None (ragged).
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
        """Makes the record from ids [b, t] and g [b, t, d]."""
        return cls(
            *ops.flatten_lookup(ids, g), batch_size=ids.shape[0], num_embeddings=num_embeddings,
            padding_idx=padding_idx, per_sample_count=ids.shape[1],
        )  # fmt: skip

    def merge(self, other: Record) -> Record | None:
        """Joins the entries: uses of one table may cancel, and are summed before any rounding."""
        if isinstance(other, UnitRecord) and other.whole is not None:
            other = other.whole
        if not isinstance(other, LookupRecord) or other.batch_size != self.batch_size:
            return None
        if other.num_embeddings != self.num_embeddings:  # two views of a table
            return None
        padding = self.padding_idx
        if padding == other.padding_idx:
            g, added = self.g, other.g
        else:  # the entries exclude both paddings, so none is left to skip
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
        return (norm_sq.sqrt() + self.margin()).square()

    def margin(self) -> Tensor:
        return ops.lookup_margin(self.sample, self.g, self.batch_size)

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
        """Returns (ids [b, t], g [b, t, d] with padding rows zeroed), or None if samples are ragged."""
        if self.per_sample_count is None or not self.batch_size:
            return None
        shape = (self.batch_size, self.per_sample_count)
        return self.ids.view(shape), self._without_padding().view(*shape, -1)

    def of_units(self, units: UnitSamples) -> Record:
        """Returns the record of units. Entries keep their positions in the samples for `tied_norm`."""
        whole = LookupRecord(
            self.ids, units.units_of(self.sample), self.g, batch_size=units.count,
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

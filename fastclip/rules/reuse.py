"""A parameter used more than once, or in parts: a sample's gradient is the sum over the uses.

Cross terms count, so norms cannot be added. Linear uses are concatenated along t. Look-ups and kept
gradients are one record by now. A table tied to an output head takes the gathered cross product.
Anything else is instantiated and added. Clipped sums are linear in the gradients: each record gives
its own, unless the joint norm is of the gradients themselves (see `records`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.planner import Planner
from fastclip.ops.units import Layout, UnitSamples
from fastclip.rules.records import (
    LinearRecord,
    LookupRecord,
    Record,
    UnitRecord,
    ViewedRecord,
    added,
    join,
    of_one_kind,
)


def joint_norm_sq(records: Sequence[Record], planner: Planner) -> Tensor:
    """Returns squared norms [b] of the summed gradients that `records` contribute to one parameter."""
    return joint_record(records, planner).norm_sq()


def joint_record(records: Sequence[Record], planner: Planner) -> Record:
    """Returns one record of all contributions in `records` to one parameter.

    Raises:
        GraphError: an operand was changed in place since it was recorded.
    """
    for record in records:
        record.check_unmodified()
    if len(records) == 1:
        return records[0]
    seen = _viewed_alike(records)
    if seen is not None:
        return ViewedRecord(joint_record([r.record for r in seen], planner), seen[0].shape)
    together = of_one_kind(records)
    if together is not None:
        return _UnitsTogether(together, planner)
    uses = [(r.a, r.g) for r in records if isinstance(r, LinearRecord)]
    if len(uses) == len(records) and _alike(records) and _ghost(uses, planner):
        return _GhostsTogether(records)
    merged = _merge(records, planner)
    if len(merged) == 1:
        return merged[0]
    head, table = merged[0], merged[-1]
    if len(merged) == 2 and isinstance(head, LinearRecord) and isinstance(table, LookupRecord):
        dense = table.dense()
        if dense is not None and head.ghost and not head.transposed:
            return _Tied(head, table, dense)
    return InstantiatedTogether(merged)


def _viewed_alike(records: Sequence[Record]) -> list[ViewedRecord] | None:
    """Returns `records` if all are linear maps of one size in one other shape, else None: two views of a
    parameter may share only its entries."""
    viewed = [r for r in records if isinstance(r, ViewedRecord)]
    kinds = {(r.shape, _sizes(r.record)) for r in viewed}
    alike = len(viewed) == len(records) and len(kinds) == 1 and None not in next(iter(kinds))
    return viewed if alike else None


def _sizes(record: Record) -> tuple[int, ...] | None:
    """Returns the size of a linear map's matrix (of samples or units), None for other records."""
    rows = record.rows if isinstance(record, UnitRecord) else record
    return tuple(x.shape[2] for x in rows.pair()) if isinstance(rows, LinearRecord) else None


class _Together(Record):
    """Records of one parameter, whose sums are added."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(*(x for record in records for x in record._operands))
        self.records = list(records)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return added(record.clipped_sum(scale) for record in self.records)

    def per_sample(self) -> Tensor:
        return added(record.per_sample() for record in self.records)

    def margin(self) -> Tensor | None:
        known = [s for record in self.records if (s := record.margin()) is not None]
        return added(known) if known else None


class _GhostsTogether(_Together):
    """Linear uses, concatenated along t for their Grams."""

    def norm_sq(self) -> Tensor:
        return ops.ghost_norm_concat(
            [(r.a, r.g) for r in self.records if isinstance(r, LinearRecord)]
        )


class _Tied(_Together):
    """A table and an output head that is linear: the gathered cross product."""

    def __init__(
        self, head: LinearRecord, table: LookupRecord, dense: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__([head, table])
        self._a, self._g, self._dense = head.a, head.g, dense

    def norm_sq(self) -> Tensor:
        head, table = (record.norm_sq() for record in self.records)
        return ops.tied_norm(*self._dense, self._a, self._g, head + table)


class _UnitsTogether(_Together):
    """Records of rows of the same units, laid out together."""

    def __init__(self, records: Sequence[UnitRecord], planner: Planner) -> None:
        super().__init__(records)
        self._units, self._planner = records, planner

    def norm_sq(self) -> Tensor:
        layout, runs = self._runs()
        self.instantiates = any(run.instantiates for run in runs)
        return layout.gather([run.norm_sq() for run in runs])

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if not self.instantiates:
            return super().clipped_sum(scale)
        layout, runs = self._runs()
        pairs = zip(runs, layout.scatter(scale), strict=True)
        return added(run.clipped_sum(own) for run, own in pairs)

    def _runs(self) -> tuple[Layout, list[Record]]:
        layout = self._units[0].layout(self._units[1:])
        runs = zip(*(record.rows.laid(layout) for record in self._units), strict=True)
        return layout, [joint_record(run, self._planner) for run in runs]


class InstantiatedTogether(_Together):
    """The gradients themselves, added. Their norms and the clipped sum use the same numbers.

    The margins of the records are added: if large gradients cancel, the rest may be rounding, in
    proportion to each gradient's size.
    """

    instantiates = True

    def norm_sq(self) -> Tensor:
        found = []
        for records in self._pieces():
            total: Any = 0
            hidden: Any = 0
            for record in records:
                own = record.per_sample()
                total = total + own
                lost = 2 * len(records) * ops.unit_roundoff(own.dtype) * ops.row_norm_sq(own).sqrt()
                hidden = hidden + lost
                margin = record.margin()
                hidden = hidden if margin is None else hidden + margin
            found.append((ops.row_norm_sq(total).sqrt() + hidden).square())
        return found[0] if len(found) == 1 else torch.cat(found)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.parted_sum(self.apart(), scale)

    def apart(self) -> Iterator[Tensor]:
        for records in self._pieces():
            yield added(record.per_sample() for record in records)

    def _pieces(self) -> Iterator[list[Record]]:
        """Yields the records of a few samples at a time if they can be cut, else all of them."""
        whole = [_cuttable(record) for record in self.records]
        cuttable = [record for record in whole if record is not None]
        if len(cuttable) < len(whole):
            yield self.records
            return
        samples, entries = cuttable[0].samples, cuttable[0].entries
        step = ops.samples_at_once(entries, self._operands[0].device)
        for i in range(0, max(samples, 1), step):
            yield [record.cut(slice(i, i + step)) for record in cuttable]


class _Cut(NamedTuple):
    """A record that can be cut by samples, with the size of a gradient in entries."""

    samples: int
    entries: int
    cut: Callable[[slice], Record]


def _cuttable(record: Record) -> _Cut | None:
    if isinstance(record, LinearRecord):
        a, g, turned = record.a, record.g, record.transposed
        return _Cut(
            len(a), a.shape[2] * g.shape[2],
            lambda some: LinearRecord(a[some], g[some], ghost=False, transposed=turned),
        )  # fmt: skip
    dense = record.dense() if isinstance(record, LookupRecord) else None
    if dense is None:
        return None
    ids, rows = dense
    size: int = record.num_embeddings  # type: ignore[attr-defined]
    return _Cut(
        len(ids), size * rows.shape[2],
        lambda some: LookupRecord.from_dense(ids[some], rows[some], size),
    )  # fmt: skip


def _alike(records: Sequence[Record]) -> bool:
    """Whether all or none are transposed, with equal types: they can be concatenated along t."""
    linear = [r for r in records if isinstance(r, LinearRecord)]
    return len({(r.transposed, r.a.dtype, r.g.dtype) for r in linear}) == 1


def _ghost(uses: Sequence[tuple[Tensor, Tensor]], planner: Planner) -> bool:
    """Whether the planner takes Grams for the uses concatenated along t."""
    (b, _, d), (_, _, p) = uses[0][0].shape, uses[0][1].shape
    t, first = sum(a.shape[1] for a, _ in uses), uses[0][0]
    size = first.element_size()
    return planner.linear(b, t, d, p, size, may_keep=False, device=first.device).ghost


def _merge(records: Sequence[Record], planner: Planner) -> list[Record]:
    linear = [r for r in records if isinstance(r, LinearRecord)]
    lookup = [r for r in records if isinstance(r, LookupRecord)]
    rest = [r for r in records if not isinstance(r, (LinearRecord, LookupRecord))]
    return [*_concatenate_linear(linear, planner), *lookup, *rest]


def _concatenate_linear(records: list[LinearRecord], planner: Planner) -> list[LinearRecord]:
    if len(records) < 2 or not _alike(records):
        return records
    a = torch.cat([r.a for r in records], dim=1)
    g = torch.cat([r.g for r in records], dim=1)
    b, t, d = a.shape
    choice = planner.linear(b, t, d, g.shape[2], a.element_size(), may_keep=False, device=a.device)
    return [LinearRecord(a, g, ghost=choice.ghost, transposed=records[0].transposed)]


# -------------------------------------------------------------------------------------------------
# Records of parts of one parameter: a chunk, an expert, a slice of a table.


class Geometry(NamedTuple):
    """Which entries of a contiguous tensor a part of it holds."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def last(self) -> int:
        """The position of the last entry."""
        pairs = zip(self.size, self.stride, strict=True)
        return self.offset + sum((n - 1) * s for n, s in pairs)

    def of(self, flat: Tensor) -> Tensor:
        """The part, as a view of the whole's entries [..., n]."""
        lead, steps = flat.shape[:-1], flat.stride()[:-1]
        offset = flat.storage_offset() + self.offset
        return flat.as_strided((*lead, *self.size), (*steps, *self.stride), offset)


def geometry_of(part: Tensor, whole: Tensor) -> Geometry:
    """Returns the geometry of `part`, a view of the contiguous `whole`; dimensions of 1 are ignored."""
    size = tuple(part.shape)
    stride = tuple(s if n > 1 else 0 for n, s in zip(size, part.stride(), strict=True))
    return Geometry(size, stride, int(part.storage_offset() - whole.storage_offset()))


class RegionsRecord(Record):
    """Contributions to parts of a parameter.

    Args:
        shape: of the parameter. parts: which entries, and a record of them.
    """

    def __init__(
        self, shape: torch.Size, parts: Sequence[tuple[Geometry, Record]], planner: Planner
    ) -> None:
        super().__init__(*(x for _, record in parts for x in record._operands))
        self.shape, self.parts, self.planner = shape, list(parts), planner

    def merge(self, other: Record) -> Record | None:
        if not isinstance(other, RegionsRecord):
            return None
        return RegionsRecord(self.shape, [*self.parts, *other.parts], self.planner)

    @cached_property
    def _apart(self) -> dict[Geometry, Record] | None:
        """Returns the parts with one record each; None if they have common entries."""
        by_part: dict[Geometry, list[Record]] = {}
        for geometry, record in self.parts:
            join(by_part.setdefault(geometry, []), record)
        if not _disjoint(tuple(sorted(by_part, key=_first)), self.shape.numel()):
            return None
        return {part: joint_record(records, self.planner) for part, records in by_part.items()}

    @cached_property
    def _added(self) -> Record:
        """Returns the sum of the parts' gradients."""
        return InstantiatedTogether(
            [RegionsRecord(self.shape, [part], self.planner) for part in self.parts]
        )

    def norm_sq(self) -> Tensor:
        """Adds the norms of parts without a common entry, and the records of the same part."""
        if self._apart is None:
            return self._added.norm_sq()
        norms = [record.norm_sq() for record in self._apart.values()]
        return norms[0] if len(norms) == 1 else torch.stack(norms).sum(0)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self._apart is None:
            return self._added.clipped_sum(scale)
        total = None
        for geometry, record in self._apart.items():
            own = record.clipped_sum(scale)
            if total is None:
                total = own.new_zeros(self.shape.numel())
            geometry.of(total).add_(own)
        assert total is not None
        return total.view(self.shape)

    def per_sample(self) -> Tensor:
        total = None
        for geometry, record in self.parts:
            own = record.per_sample()
            if total is None:
                total = own.new_zeros(len(own), self.shape.numel())
            geometry.of(total).add_(own)
        assert total is not None
        return total.view(len(total), *self.shape)

    def margin(self) -> Tensor | None:
        known = [s for _, record in self.parts if (s := record.margin()) is not None]
        return torch.stack(known).sum(0) if known else None

    def of_units(self, units: UnitSamples) -> Record:
        parts = [(geometry, record.of_units(units)) for geometry, record in self.parts]
        return RegionsRecord(self.shape, parts, self.planner)


def _first(geometry: Geometry) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return geometry.offset, geometry.size, geometry.stride


@lru_cache(maxsize=256)
def _disjoint(parts: tuple[Geometry, ...], entries: int) -> bool:
    """Whether no two of the parts, by their first entries, hold a common one."""
    if all(a.last < b.offset for a, b in pairwise(parts)):
        return True
    held = torch.zeros(entries, dtype=torch.int16, device="cpu")
    for part in parts:
        part.of(held).add_(1)
    return bool((held <= 1).all())

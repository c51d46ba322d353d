"""Records of parts of one parameter: a chunk, an expert, a slice of a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastclip.layers.record import Record, join
from fastclip.layers.reuse import InstantiatedTogether, joint_record
from fastclip.ops.units import UnitRows
from fastclip.planner import Planner


class Geometry(NamedTuple):
    """Which entries of a contiguous tensor a part of it holds."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def last(self) -> int:
        """The place of the last entry."""
        pairs = zip(self.size, self.stride, strict=True)
        return self.offset + sum((n - 1) * s for n, s in pairs)

    def of(self, flat: Tensor) -> Tensor:
        """The part, as a view of the whole's entries [..., n]."""
        lead, steps = flat.shape[:-1], flat.stride()[:-1]
        offset = flat.storage_offset() + self.offset
        return flat.as_strided((*lead, *self.size), (*steps, *self.stride), offset)


def geometry_of(part: Tensor, whole: Tensor) -> Geometry:
    """`part` is a view of the contiguous tensor `whole`; dimensions of size 1 say nothing."""
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
        """The parts, one record each; None if they have common entries."""
        by_part: dict[Geometry, list[Record]] = {}
        for geometry, record in self.parts:
            join(by_part.setdefault(geometry, []), record)
        if not _disjoint(tuple(sorted(by_part, key=_first)), self.shape.numel()):
            return None
        return {part: joint_record(records, self.planner) for part, records in by_part.items()}

    @cached_property
    def _added(self) -> Record:
        """The parts' gradients themselves, added."""
        return InstantiatedTogether(
            [RegionsRecord(self.shape, [part], self.planner) for part in self.parts]
        )

    def norm_sq(self) -> Tensor:
        """Parts without a common entry: their norms are added. The same part: its records are."""
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

    def slack(self) -> Tensor | None:
        known = [s for _, record in self.parts if (s := record.slack()) is not None]
        return torch.stack(known).sum(0) if known else None

    def of_units(self, units: UnitRows) -> Record:
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

"""Records of rows, taken as records of the units that the rows belong to.

A unit's gradient is a sum over its rows' positions: laid along them, its rows are one sample with
more positions, whose norm the rows' own rules know, cross terms included. The clipped sum is that of the
rows, each at its unit's scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fastclip.layers.record import KeptRecord, Record
from fastclip.ops.units import Layout, UnitRows


class LaidRecord(Record):
    """A record whose rows can be laid along positions."""

    @abstractmethod
    def laid(self, layout: Layout) -> Sequence[Record]:
        """A record of the units of every run."""

    keep = False
    """The units' gradients may be held instead of the record."""

    def of_units(self, units: UnitRows) -> Record:
        record = UnitRecord(self, units)
        return record.kept() if self.keep else record


class UnitRecord(Record):
    """The sums over the rows of units, of a record of rows.

    Args:
        rows: their record. units: which rows belong together.
        whole: the same in one record of units, where there is one.
    """

    def __init__(self, rows: LaidRecord, units: UnitRows, whole: Record | None = None) -> None:
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

    def slack(self) -> Tensor | None:
        if self.whole is not None:
            return self.whole.slack()
        layout = self.layout()
        return _gathered(layout, [part.slack() for part in self.rows.laid(layout)])

    def kept(self) -> KeptRecord:
        """The units' gradients."""
        layout = self.layout()
        parts = self.rows.laid(layout)
        slack = [part.slack() for part in parts]
        return KeptRecord(
            layout.gather([part.per_sample() for part in parts]), _gathered(layout, slack)
        )

    def layout(self, others: Sequence[UnitRecord] = ()) -> Layout:
        """How this record's rows, and those of others of the same units, are laid out."""
        device: torch.device = self._operands[0].device
        return self.units.layout(device, self.nbytes + sum(other.nbytes for other in others))


def added(sums: Iterable[Tensor]) -> Tensor:
    """The sum of clipped sums, one at a time."""
    return reduce(torch.add, sums)


def _gathered(layout: Layout, parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [x for x in parts if x is not None]
    return layout.gather(known) if known else None


def of_one_kind(records: Sequence[Record]) -> list[UnitRecord] | None:
    """These records, if all are of rows of the same units."""
    found = [r for r in records if isinstance(r, UnitRecord)]
    if len(found) < len(records) or len({id(r.units) for r in found}) != 1:
        return None
    return found

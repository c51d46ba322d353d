"""Records of layers that take every row for a sample, where several rows are one sample's."""

from __future__ import annotations

from torch import Tensor

from fastclip import ops
from fastclip.layers.record import Record, norm_apart
from fastclip.ops.units import UnitRows
from fastclip.samples.place import Place


class FoldedRecord(Record):
    """A record of b * n rows, for b samples.

    Args:
        record: of the rows. place: of the samples among them. batch: b.
    """

    def __init__(self, record: Record, place: Place, batch: int) -> None:
        super().__init__(*record._operands)
        self.record, self.place, self.batch = record, place, batch

    instantiates = True

    def norm_sq(self) -> Tensor:
        return norm_apart(self)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.parted_sum(self.apart(), scale)

    def per_sample(self) -> Tensor:
        own = self.record.per_sample()
        rows = Place(0, self.place.outer, self.place.inner).rows(ops.widen(own), self.batch)
        return rows.sum(1)

    def slack(self) -> Tensor | None:
        slack = self.record.slack()
        if slack is None:
            return None
        return Place(0, self.place.outer, self.place.inner).rows(slack, self.batch).sum(1)

    def of_units(self, units: UnitRows) -> Record:
        """Of the rows at once: those of a unit are more by those that are folded."""
        size = len(self._operands[0])
        rows = self.place.owners(size, self.batch, units.owner.device)
        return self.record.of_units(units.of_entries(rows, size // max(self.batch, 1)))

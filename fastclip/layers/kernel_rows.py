"""A convolution on a GPU: a record for every row of its kernel, each of a linear map.

Kernels of linear maps are the fastest and the fewest. A weight's entries are in one of the rows each:
squared norms add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fastclip import ops
from fastclip.layers.record import Record
from fastclip.layers.records import LinearRecord
from fastclip.ops.units import UnitRows


class KernelRowsRecord(Record):
    """Records of the rows of a kernel, or of its taps: of the matrices of `ops.kernel_rows`."""

    def __init__(self, rows: Sequence[Record], geometry: ops.ConvGeometry) -> None:
        super().__init__(*(x for row in rows for x in row._operands))
        self.rows, self.geometry = list(rows), geometry

    @property
    def nbytes(self) -> int:
        """Of the memory that the views share, once."""
        storages = [x.untyped_storage() for x in self._operands]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return any(row.instantiates for row in self.rows)

    def norm_sq(self) -> Tensor:
        return self._norms().raised()

    def norm_parts(self, last_input: ops.LastInput) -> ops.LaterNorm:
        return self._norms()

    def _norms(self) -> ops.AddedNorm:
        together = [row.together for row in self.rows]
        if None in together:
            return ops.AddedNorm([row.norm_sq() for row in self.rows])
        some = _some([(row.a, row.g) for row in together])
        return ops.AddedNorm([norm for few in some for norm in ops.ghost_norms(few, False)[0]])

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.of_kernel_rows(self._sums(scale), self.geometry)

    def _sums(self, scale: Tensor) -> list[Tensor]:
        pairs = [
            row.pair() for row in self.rows if type(row) is LinearRecord and not row.instantiates
        ]
        if len(pairs) < len(self.rows):
            return [row.clipped_sum(scale) for row in self.rows]
        return [total for few in _some(pairs) for total in ops.scaled_sums(few, scale)]

    def per_sample(self) -> Tensor:
        return ops.of_kernel_rows([row.per_sample() for row in self.rows], self.geometry)

    def apart(self) -> Iterator[Tensor]:
        for blocks in zip(*(row.apart() for row in self.rows), strict=True):
            yield ops.of_kernel_rows(blocks, self.geometry)

    def slack(self) -> Tensor | None:
        known = [s for row in self.rows if (s := row.slack()) is not None]
        return ops.AddedNorm([s.square() for s in known]).raised().sqrt() if known else None

    def of_units(self, units: UnitRows) -> Record:
        return KernelRowsRecord([row.of_units(units) for row in self.rows], self.geometry)


def _some(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """As many at a time as a kernel takes."""
    for first in range(0, len(pairs), ops.LAYERS_TOGETHER):
        yield pairs[first : first + ops.LAYERS_TOGETHER]

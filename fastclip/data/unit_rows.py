"""Whose the rows of a backward pass are: exactly those that were drawn, in their order, or refused.

Of single rows only the number matters. A unit's rows are clipped as one, so a pass must hold all rows of
a physical batch and no others: of fewer it is not known which were left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fastclip.data.iteration import Iteration, PhysicalBatch
from fastclip.data.refusals import UNCLEAR_UNITS, UNKNOWN_CUT
from fastclip.data.units import cut_between_units
from fastclip.errors import BatchSizeError, StepError
from fastclip.ops.units import UnitRows

_MOST = 2**16
"""Batches that are remembered."""


class PassedOver:
    """Batches of units that were handed out, and that the loop has gone on without.

    It may have kept them (a buffer that is shuffled, a list of several passes), so the batch of a later
    backward pass may be one of them.
    """

    def __init__(self) -> None:
        self._batches: list[PhysicalBatch] = []

    def add(self, batches: Iterable[PhysicalBatch]) -> None:
        """They were not used when a later one was, or when another pass over the data began."""
        self._batches += [b for b in batches if b.draw.units is not None and b.draw.size]
        del self._batches[:-_MOST]

    def new_pass(
        self, before: Iteration | None, left: Iterable[PhysicalBatch], direct: bool
    ) -> None:
        """A pass over the data begins, after `before`, of which these batches are left.

        Args:
            direct: every batch was used as soon as it was handed out, or never.
        """
        if self._batches or not direct:
            self._batches = [b for b in self._batches if b.draw.iteration is before]
            self.add(left)

    def beside(self, out: list[PhysicalBatch], batch: PhysicalBatch) -> list[PhysicalBatch]:
        """All batches that a backward pass over `batch` may be over, where these are out."""
        if len(out) == 1:  # used as soon as handed out; a pass that was only looked at is over
            now = batch.draw.iteration
            self._batches = [
                b for b in self._batches if b.draw.iteration.used or b.draw.iteration is now
            ]
        return [*out, *self._batches]


def unit_rows(
    batch: PhysicalBatch, out: Sequence[PhysicalBatch], rows: int, most: int | None, *, again: bool,
    views: int = 1,
) -> UnitRows:  # fmt: skip
    """Whose the `rows` rows of a backward pass over `batch` are.

    Args:
        out: all batches that are out, and those that were passed over. Which of them is in hand is
            inferred from how the loop has gone so far, which is enough for numbers of rows: here any of
            them may be the one.
        most: rows of the physical batches into which the loop cuts a draw; None: it does not.
        again: the batch has had its pass.
        views: of each row, in the model's batch.

    Raises:
        BatchSizeError: other rows than were drawn. StepError: it may be another batch.
    """
    units = batch.draw.units
    assert units is not None
    if not batch.draw.size:  # a placeholder, which contributes nothing
        if rows > 1 and any(
            other.draw.size for other in out
        ):  # or another batch, which would be lost
            raise StepError(UNCLEAR_UNITS)
        return UnitRows(torch.zeros(rows, dtype=torch.int64, device="cpu"), 0, 0, units.reduction)
    part = _next_part(batch, most)
    owners = units.rows_of(part)
    if views > 1 and (again or rows != len(part)):
        raise BatchSizeError(
            f"views={views} expects {views} rows for each of the {0 if again else len(part)} samples "
            f"that the loader drew, got {views * rows} rows. Give the model every view of every sample "
            "in one call, and each batch once (BatchMemoryManager splits large batches)"
        )
    if owners is None or again or rows != len(part):
        raise BatchSizeError(
            f"expected all {0 if again else len(part)} rows that the loader drew of its units, each "
            f"once and in their order, got {rows}: of other rows it cannot be told whose they are. Let "
            "collate_fn and the loop leave none out, add none and split none off (BatchMemoryManager "
            "splits between units); filter rows before training"
        )
    for other in out:
        if other is not batch and other.draw.size and other.draw.units is not None:
            theirs = _next_part(other, most)
            same = other.draw.units.rows_of(theirs)
            if len(theirs) == rows and (same is None or not same.owner.equal(owners.owner)):
                raise StepError(UNCLEAR_UNITS)
    return owners


def _next_part(batch: PhysicalBatch, most: int | None) -> range:
    """The rows of the draw that its next pass must hold."""
    draw = batch.draw
    assert draw.units is not None
    if batch.number is not None:
        if draw.units.cuts is None:
            raise StepError(UNKNOWN_CUT)
        return draw.units.cuts[batch.number]
    parts = cut_between_units(draw.units.sizes, most)
    done = draw.credited
    return next((part for part in parts if part.start == done), range(done, draw.size))

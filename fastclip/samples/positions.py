"""A row is treated alike wherever it lies in the batch: copies of one row stay alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import BatchSizeError
from fastclip.samples.independence import by_row, coupled
from fastclip.samples.place import Place, called
from fastclip.samples.probing import Probe
from fastclip.samples.rounding import OTHER_BATCH, close, tolerances


def check_constants(probe: Probe, places: Mapping[Hashable, Place]) -> None:
    """What is made of parameters and the number of rows alone is the same for all rows.

    Raises:
        BatchSizeError: a row has a parameter of its own.
    """
    for name in probe.constants:
        place = places.get(name)
        for x in probe.seen.get(name, []):
            if place is None or not place.fits(x, probe.rows):
                continue
            rows = place.rows(x, probe.rows)
            if not _alike(rows, probe):
                raise placed(called(name), drawn=probe.draws)


def check_copies(
    probe: Probe, output: Any, of_outputs: list[int], places: Mapping[Hashable, Place]
) -> None:
    """Copies of one row are alike in what every layer and use shows, and give copies of one output.

    Raises:
        BatchSizeError: they do not.
    """
    for name, values in probe.seen.items():
        place = places.get(name)
        for x in values:
            if place is None or not place.plain or not place.fits(x, probe.rows):
                continue
            if not _alike(place.rows(x, probe.rows), probe):
                raise placed(f"the input of {called(name)}")
    for x, axis in zip(by_row(output), of_outputs, strict=False):
        held = axis >= 0 and x.dim() > axis and x.shape[axis] == probe.rows
        if held and not _alike(x.movedim(axis, 0), probe):
            raise placed("the output")


def _alike(rows: Tensor, probe: Probe) -> bool:
    allowed = tolerances(probe.rounding, OTHER_BATCH)
    return not len(rows) or close(rows, rows[:1].expand_as(rows), allowed)


def check_copied(
    copies: Any, several: Any, rows: list[int], copied: int, of_outputs: list[int]
) -> None:
    """Among several rows, one's output is that of its copies.

    Args:
        copies: the output of these. several: that of `rows`, among which it is called `copied`.

    Raises:
        BatchSizeError: it is not.
    """
    for one, other, axis in zip(by_row(copies), by_row(several), of_outputs, strict=False):
        if axis < 0 or one.dim() != other.dim() or other.shape[axis] != len(rows):
            continue
        index = torch.tensor(
            [i for i, row in enumerate(rows) if row == copied],
            dtype=torch.int64,
            device=other.device,
        )
        mine = other.index_select(axis, index)
        first = one.narrow(axis, 0, 1)
        # Another row may be longer and pad this one: what both have must agree.
        common = [slice(min(n, m)) for n, m in zip(mine.shape, first.shape, strict=True)]
        common[axis] = slice(None)
        mine, first = mine[tuple(common)], first[tuple(common)]
        if not close(first.expand_as(mine), mine, OTHER_BATCH):
            raise coupled("the output", other_size=True)


@contextmanager
def told_apart(base: Probe, *others: Probe) -> Iterator[None]:
    """A refusal of what has changed names the generators that drew other numbers in other runs.

    Raises:
        BatchSizeError: what was raised inside, or, if any has, that nothing can be told.
    """
    try:
        yield
    except BatchSizeError as error:
        stands = [other.stand for other in others]
        moved = [n for n, x in base.stand.items() if any(other.get(n) != x for other in stands)]
        if not moved:
            raise
        raise BatchSizeError(
            f"what a sample has among other rows is something else, but {' and '.join(moved)} drew "
            "other numbers for it there, so whether it depends on these rows, or on how many there are, "
            "cannot be told; draw with torch's own functions, such as torch.rand, as many numbers for "
            "every row whatever it holds, or draw in the data set, and switch an augmentation that the "
            "model brings off (transformers: config.apply_spec_augment = False)"
        ) from error


def placed(where: str, drawn: bool = False) -> BatchSizeError:
    """The refusal of a model that treats rows by their number, or that may have `drawn` for them."""
    drawn_for = (
        " (random numbers that NumPy or Python drew for it look like that, too)" if drawn else ""
    )
    return BatchSizeError(
        f"{where}: what a sample has there depends on its number in the batch{drawn_for}, so its "
        "gradient depends on who else was drawn; treat every row of the batch alike"
        + (", and draw with torch's own functions, such as torch.rand" if drawn else "")
    )

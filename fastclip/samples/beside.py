"""Values of a run held against those of an earlier one as they are shown: no second copy is kept."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch
from torch import Tensor

from fastclip.samples.place import Place
from fastclip.samples.rounding import VALUES, agree
from fastclip.samples.seen import Seen


class Beside:
    """What a run shows beside what an earlier one of as many rows has shown.

    An error of a comparison is raised where its result is asked for: the model that runs could catch it.

    Args:
        seen: of the earlier run. places: of the names that are compared.
        rows: of both runs. kept: those that are the same in both.
        copies: all rows of the run are copies of one, which must stay alike.
    """

    def __init__(
        self, seen: Seen, places: Mapping[Hashable, Place], rows: int, kept: Collection[int],
        *, copies: bool = False,
    ) -> None:  # fmt: skip
        self._seen, self._places, self._rows = seen, places, rows
        self._kept, self._copies = sorted(kept), copies
        self._shown = dict.fromkeys((name for name in seen if name in places), 0)
        self._moved: set[Hashable] = set()
        self._error: Exception | None = None

    def show(self, name: Hashable, value: Tensor) -> bool:
        """Whether all that is to be known of it is known now: it need not be kept."""
        number = self._shown.get(name)
        if number is None or self._error is not None:
            return False
        self._shown[name] = number + 1
        try:
            if number < len(self._seen[name]) and name not in self._moved:
                self._compare(name, self._seen[name][number], value.detach())
            return not self._copies or self._alike(self._places[name], value.detach())
        except Exception as error:
            self._error = error
            return False

    def agrees(self, name: Hashable) -> bool | None:
        """Whether it has shown the same in these rows, call by call; None if that is not held here."""
        if name not in self._shown:
            return None
        if self._error is not None:
            raise self._error
        return name not in self._moved and self._shown[name] == len(self._seen[name])

    def _compare(self, name: Hashable, before: Tensor, now: Tensor) -> None:
        place, sizes = self._places[name], (self._rows, self._rows)
        held = [place.fits(x, self._rows) for x in (before, now)]
        if held[0] != held[1] or not agree(before, now, self._kept, place, sizes, VALUES):
            self._moved.add(name)

    def _alike(self, place: Place, value: Tensor) -> bool:
        """To the bit, as most copies are; the others are kept, and looked at later."""
        if not place.plain or not place.fits(value, self._rows):
            return True
        rows = place.rows(value, self._rows)
        return not len(rows) or torch.equal(rows, rows[:1].expand_as(rows))

"""Rows against rows: what a model returns has an entry for each pair of rows (scores [b, b]).

Such an output says that all inputs that were cut hold rows of the batch. Cut without one of these, a
model would return rows, [2, b] and [3, b], and that input would pass for the same for all samples.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from fastclip.errors import BatchSizeError
from fastclip.memory import no_memory
from fastclip.samples.groups import MANY
from fastclip.samples.independence import SIZES, by_row
from fastclip.samples.inputs import INPUT, Cuts, Way
from fastclip.samples.probing import Probe, Runs
from fastclip.samples.unsaved import unsaved

_MOST_WIDER = 4
_WAYS_OUT = (
    "return what the model makes of each row alone, or, if {} is the same for all samples (ids of a "
    "catalogue), make it a buffer of the model"
)


def crossed(outputs: list[Any]) -> dict[int, Tensor]:
    """Outputs that grow by more than their rows, by number, as they are of the larger of two runs.

    They belong to no one row, even where values and gradients of each row stay what they are (sums of
    numbers of two rows): a loss of theirs is one of pairs.
    """
    few, more = SIZES
    pairs = enumerate(zip(*map(by_row, outputs), strict=False))
    return {n: y for n, (x, y) in pairs if few * y.numel() > more * x.numel()}


class GivenUp:
    """Ways of cutting a call's inputs with which the model fails, or returns rows against rows."""

    def __init__(self, run: Runs) -> None:
        self._run = run
        self._own = {id(x) for x in chain(run.model.parameters(), run.model.buffers())}
        self._crossed: list[tuple[Way, Cuts, list[int]]] = []
        self._failed: list[tuple[Way, Cuts, Cuts, str]] = []

    def note(self, cuts: Cuts, outputs: list[Any]) -> None:
        """This way gives no rows of output. One row alone says nothing: its 1 may broadcast."""
        found = crossed(outputs)
        if found and self._run.rows(cuts) >= SIZES[0]:
            shape = next(list(x.shape) for x in found.values())
            self._crossed.append((self._run.way, self._of_data(cuts), shape))

    def fails(self, cuts: Cuts, error: str) -> None:
        """The model does not run on few rows, cut this way."""
        self._failed.append((self._run.way, cuts, self._of_data(cuts), error))

    def check(self, cuts: Cuts) -> bool:
        """This way leaves out no rows that one of those has; whether the model was run for that.

        Raises:
            BatchSizeError: naming the first input that it leaves out.
        """
        given, cuts = cuts, self._of_data(cuts)
        for way, wider, shape in self._crossed:
            if (left := self._left(way, cuts, wider)) is not None:
                raise BatchSizeError(
                    f"{INPUT}{left} has a row for each sample, too, and the output sets rows against "
                    f"rows (its shape is {shape} for {SIZES[1]} rows of each), so what one sample adds "
                    f"to the loss depends on the others; {_WAYS_OUT.format(f'{INPUT}{left}')}"
                )
        wider_ways = [
            (wider, error, left) for way, wider, of_data, error in self._failed
            if (left := self._left(way, cuts, of_data)) is not None
        ]  # fmt: skip
        for wider, error, left in wider_ways[:_MOST_WIDER]:
            if (rows := self._runs_with(wider)) is not None:
                raise BatchSizeError(
                    f"{INPUT}{left} has a row for each sample, too, for the model runs with {rows} "
                    f"rows of each, but not with {SIZES[0]} and {SIZES[1]}{error}, so whether it "
                    "couples them cannot be told; let it take any number of rows, and "
                    f"{_WAYS_OUT.format(f'{INPUT}{left}')}"
                )
        self._run.cut(given)
        return bool(wider_ways)

    def _left(self, way: Way, cuts: Cuts, wider: Cuts) -> int | None:
        """The first input that is cut in the wider way alone, if that is one."""
        pairs = list(zip(cuts, wider, strict=False))
        if way != self._run.way or any(a not in (None, b) for a, b in pairs):
            return None
        return next((n for n, (a, b) in enumerate(pairs) if a != b), None)

    def _runs_with(self, cuts: Cuts) -> int | None:
        """A number of rows, fewer than the batch has, with which the model runs, cut this way."""
        run, batch = self._run, self._run.rows(cuts)
        for rows in dict.fromkeys(min(n, MANY) for n in (batch - 1, batch - 2, batch // 2)):
            if rows <= SIZES[1]:
                continue
            places = list(range(rows))
            run.cut(cuts, places)
            try:
                unsaved(partial(run.once, Probe(run.layout, rows, shows=False), places))
                return rows
            except Exception as error:
                if no_memory(error):
                    raise
        return None

    def _of_data(self, cuts: Cuts) -> Cuts:
        """Without what is the model's own, given back to it as an input: no row of the batch."""
        leaves = self._run.leaves
        return tuple(None if id(x) in self._own else a for x, a in zip(leaves, cuts, strict=True))

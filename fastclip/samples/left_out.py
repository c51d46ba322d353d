"""Inputs that a way of cutting a call leaves out, though they have as many rows as there are samples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from fastclip.errors import BatchSizeError
from fastclip.memory import no_memory
from fastclip.samples.drawn import tells, unclear
from fastclip.samples.inputs import INPUT, Cuts, Way
from fastclip.samples.layout import BatchLayout
from fastclip.samples.probing import Probe, Runs

MOST_CUTS = 64
"""Ways of reading a call's inputs."""
_FEW = 3
_MOST_WIDER = 4


class LeftOut:
    """Wider ways of cutting a call's inputs, with which the model fails on few rows.

    Cut without an input of the samples' own, a model would return rows, and that input would pass for
    the same for all samples.

    Args:
        probe_of: makes a probe of so many rows, of inputs that are cut in a way.
    """

    def __init__(self, run: Runs, probe_of: Callable[[Cuts, int], Probe]) -> None:
        self._run, self._probe_of = run, probe_of
        self._own = {id(x) for x in chain(run.model.parameters(), run.model.buffers())}
        self._failed: list[tuple[Way, Cuts, str]] = []

    def cuts_the_model(self, cuts: Cuts) -> bool:
        """A parameter or buffer of the model, given back to it, would be cut."""
        return self._of_data(cuts) != cuts

    def fails(self, cuts: Cuts, error: str) -> None:
        """The model does not run on few rows, cut this way."""
        self._failed.append((self._run.way, cuts, error))

    def check(self, cuts: Cuts) -> None:
        """This way leaves out no rows that a wider one has, with which the model runs on more rows.

        Raises:
            BatchSizeError: naming the first input that it leaves out.
        """
        own, way = self._of_data(cuts), self._run.way
        for known, wider, error in self._failed[:_MOST_WIDER]:
            if known != way:
                continue
            pairs = list(zip(own, self._of_data(wider), strict=True))
            if any(a not in (None, b) for a, b in pairs):
                continue
            left = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            if left is not None and (rows := self._runs_with(wider)) is not None:
                raise BatchSizeError(
                    f"{INPUT}{left} has a row for each sample, too, for the model runs with {rows} "
                    f"rows of each, but not with 2 and 3{error}, so whether it couples them cannot be "
                    "told; let it take any number of rows, and return what it makes of each row "
                    f"alone, or, if {INPUT}{left} is the same for all samples, make it a buffer of "
                    "the model"
                )

    def _runs_with(self, cuts: Cuts) -> int | None:
        """A number of rows, fewer than the batch has, with which the model runs, cut this way."""
        batch = self._run.rows(cuts)
        for rows in dict.fromkeys((batch - 1, batch - 2, batch // 2)):
            if rows <= _FEW:
                continue
            places = list(range(rows))
            self._run.cut(cuts, places)
            try:
                self._run.once(self._probe_of(cuts, rows), places)
                return rows
            except Exception as error:
                if no_memory(error):
                    raise
        return None

    def _of_data(self, cuts: Cuts) -> Cuts:
        """Without what is the model's own, given back to it as an input: no row of the batch."""
        leaves = self._run.leaves
        return tuple(None if id(x) in self._own else a for x, a in zip(leaves, cuts, strict=True))

    def check_lists(self, cuts: Cuts, layout: BatchLayout) -> None:
        """The model does not also run where each tensor of a list holds all samples.

        Raises:
            BatchSizeError: it does, and which of them are samples cannot be told.
        """
        run, way, rows = self._run, self._run.way, self._run.rows(cuts)
        likely, sizes = run.drawn(), {0}
        try:
            for others in run.ways(layout.axis, layout.cuts, MOST_CUTS):
                size = run.rows(others)
                if run.way == way or size in sizes or (size in likely) != (rows in likely):
                    continue
                sizes.add(size)
                if tells(self._outputs(others)):
                    raise unclear(rows, size)
        finally:
            run.read_as(way, layout.axis)

    def _outputs(self, cuts: Cuts) -> list[Any]:
        """What the model returns for 2 and for 3 rows, cut this way; nothing where it does not run."""
        self._run.cut(cuts)
        try:
            return [self._run.once(self._probe_of(cuts, n), [0] * n) for n in (_FEW - 1, _FEW)]
        except Exception as error:
            if no_memory(error):
                raise
            return []

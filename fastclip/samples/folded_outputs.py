"""Outputs in which other dimensions are folded with the samples (logits [b * t, v]): unfolded, and held
apart like any other.

Which fold it is, values tell: where some rows of the batch change, the entries of all others stay. Where
no fold is found (rows that a mask selects, pieces put end to end), gradients tell: see mixed_outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastclip.samples.groups import others_changed
from fastclip.samples.independence import (
    UNPLACED,
    axes_of_outputs,
    by_row,
    coupled,
    rows_agree,
)
from fastclip.samples.inputs import without_graph
from fastclip.samples.place import Place, places
from fastclip.samples.positions import told_apart
from fastclip.samples.probing import Probe, Runs
from fastclip.samples.slopes import note_slopes


class Unfolded:
    """What runs return, with the samples of every tensor along an axis of their own.

    Args:
        outputs: of runs on two and on three copies of one row.
    """

    def __init__(self, outputs: list[Any]) -> None:
        self._found = axes_of_outputs(outputs)
        copies = zip(by_row(outputs[0]), self._found, strict=False)
        self._folded = [n for n, (x, axis) in enumerate(copies) if axis >= 0 and x.shape[axis] != 2]
        self._places: dict[int, Place] = {}

    @property
    def axes(self) -> list[int]:
        """Where the samples lie in every tensor of what is returned; UNBATCHED or UNCLEAR."""
        return [0 if n in self._places else axis for n, axis in enumerate(self._found)]

    @property
    def owned_axes(self) -> list[int]:
        """The same, but UNPLACED where it is not known whose each entry along the axis is."""
        lost = {*self._folded} - self._places.keys()
        return [UNPLACED if n in lost else axis for n, axis in enumerate(self.axes)]

    @property
    def plain_axes(self) -> dict[int, int]:
        """Of outputs that hold rows, by number: their axis, or -1 where they are folded."""
        plain = ((n, -1 if n in self._folded else axis) for n, axis in enumerate(self._found))
        return {n: axis for n, axis in plain if self._found[n] >= 0}

    def __call__(self, output: Any, count: int) -> list[Tensor]:
        """The tensors of the output of a run on so many rows."""
        return [
            self._places[n].rows(x, count)
            if n in self._places and self._places[n].fits(x, count)
            else x
            for n, x in enumerate(by_row(output))
        ]

    def once(self, run: Runs, probe: Probe, rows: list[int], seed: int) -> list[Tensor]:
        """The output on these rows; slopes are noted in `probe`."""
        probe.slopes = []

        def note(output: Any) -> None:
            note_slopes(probe, self(output, probe.rows), self.axes)

        out = without_graph(run.once(probe, rows, seed, note))  # which is as large as all else
        return self(out, probe.rows)

    def find(
        self, run: Runs, copies: list[Probe], rows: list[int], groups: list[frozenset[int]],
        seed: int,
    ) -> None:  # fmt: skip
        """Learn the folds, if there are any, from 3 more runs.

        Args:
            copies: the first runs. rows: of the runs. groups: which are kept while others change.

        Raises:
            BatchSizeError: in no fold the rows that were kept are the same.
        """
        self._places = {}
        if not self._folded:
            return
        count, changed = len(rows), [others_changed(rows, kept) for kept in groups]
        probes = [Probe(run.layout, count, shows=False) for _ in (rows, *changed)]
        base, *others = (
            list(by_row(without_graph(run.once(probe, given, seed))))
            for probe, given in zip(probes, (rows, *changed), strict=True)
        )
        selects = any(probe.taint and probe.taint.selects for probe in copies)
        for n in (n for n in self._folded if all(n < len(out) for out in (base, *others))):
            x, axis = base[n], self._found[n]
            if x.dim() <= axis or not x.shape[axis] or x.shape[axis] % count:
                continue
            pairs = [(out[n], sorted(kept)) for out, kept in zip(others, groups, strict=True)]
            fits = [
                place for place in places(x.shape, count, [axis])
                if all(rows_agree(x, other, kept, place, count) for other, kept in pairs)
            ]  # fmt: skip
            if fits:
                self._places[n] = fits[0]
            elif not selects and all(other.shape == x.shape for other, _ in pairs):
                with told_apart(*probes):
                    raise coupled("the output")  # not rows of as many entries as their values say

"""Rows held against themselves in batches of other sizes, up to the real one, and against copies.

Random numbers are others there, so whatever draws them runs as if nothing were drawn.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from fastclip.errors import FastclipError
from fastclip.memory import no_memory
from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.groups import MANY, smaller
from fastclip.samples.independence import check_layers, check_values
from fastclip.samples.inputs import without_graph
from fastclip.samples.positions import check_copies, told_apart
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.slopes import check_copied_slopes, check_slopes
from fastclip.samples.taint import Taint
from fastclip.samples.undrawn import BY_ROW, HIGH, LOW, Undrawn
from fastclip.samples.unsaved import unsaved


class Sizes:
    """What one call gives for the same rows among others, fewer or none.

    Args:
        run: the call. unfolded: what it returns. batch: the real number of samples.
    """

    def __init__(self, run: Runs, unfolded: Unfolded, batch: int) -> None:
        self.run, self.unfolded, self.batch = run, unfolded, batch
        self.of_rows: set[int] = set()
        """The random draws that have a number, or several, for each row."""

    def compare_copies(self, two: Probe, three: Probe, outputs: tuple[Any, Any]) -> None:
        """Copies of one row are alike, and the same in two and in three."""
        places = self.run.layout.places
        for probe, out in zip((two, three), outputs, strict=True):
            check_copies(probe, out, self.unfolded.axes, places)
        check_values(two, three, outputs, [0], self.unfolded.axes, other_size=True)
        check_layers(two, three, [0], places)

    def compare(self, rows: list[int], base: Probe, out: Any, seed: int) -> list[Probe]:
        """The first `rows` of `base`, which has returned `out`, are the same in smaller batches: these,
        of which nothing is held that they have shown.

        Raises:
            BatchSizeError: they are not; or generators that nothing stops gave them other numbers.
        """
        places, probes = self.run.layout.places, []
        for some in smaller(rows, self.batch):
            probe, kept = self._like(base, len(some)), list(range(len(some)))
            found = self.unfolded.once(self.run, probe, some, seed)
            with told_apart(base, probe):
                check_values(base, probe, (out, found), kept, self.unfolded.axes, other_size=True)
                other_ways = self._other_ways(base, probe, some, seed)
                alike = {n: place for n, place in places.items() if n not in other_ways}
                check_layers(base, probe, kept, alike)
                check_slopes(base, probe, kept, places)
            probes.append(probe.without(probe.seen.keys()))
        return probes

    def _other_ways(self, base: Probe, probe: Probe, some: list[int], seed: int) -> set[Hashable]:
        """Layers and uses that `some` rows alone reach less often than in `base` among others, and as
        seldom where there are as many of them: others decide it, not how many there are. They are
        followed as if their rows were moved (a mask that is left out where no row is padded).

        Raises:
            Opened: one is seen for the first time.
        """
        layout = self.run.layout

        def calls(name: Hashable, of: Probe) -> int:
            return len(of.seen.get(name, []))

        names = {n for n in layout.places if calls(n, base) != calls(n, probe)}
        new = [name for name in names if name not in layout.moved]
        if new:
            again = self._like(base, base.rows)
            rows = [some[i % len(some)] for i in range(base.rows)]
            self.unfolded.once(self.run, again, rows, seed)
            found = [name for name in new if calls(name, again) == calls(name, probe)]
            layout.moved |= dict.fromkeys(found)
            layout.open |= {name for name in found if isinstance(name, str)}
            if found:
                raise Opened
        return names - {*new}

    def compare_many(self, rows: list[int], base: Probe, out: Any, seed: int) -> None:
        """The output of `rows` is the same in a batch of as many as the real one, of nothing but them.

        Groups of 16 rows, an expert's capacity and a way for row 20 are none in a batch of 8. Which row
        stands where is drawn, so that no two groups hold the same.

        Raises:
            BatchSizeError: it is not.
        """
        count = min(self.batch, MANY)
        if count <= len(rows):
            return
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(rows), (count - len(rows),), generator=generator, device="cpu")
        stands = torch.cat([torch.arange(len(rows), device="cpu"), drawn])
        many = [rows[i] for i in stands.tolist()]

        def once() -> tuple[Probe, Any]:
            probe = self._like(base, count)
            probe.shows = False
            return probe, without_graph(self.run.once(probe, many, seed))

        probe, values = unsaved(once)
        found = self.unfolded(values, count)
        axes = self.unfolded.axes
        own = [
            x.index_select(axis, stands.to(x.device)) if axis >= 0 and x.shape[axis] == len(rows) else x
            for x, axis in zip(out, axes, strict=False)
        ]  # fmt: skip
        with told_apart(base, probe):
            check_values(probe, probe, (own, found), [*range(count)], axes, other_size=True)

    def compare_undrawn(self, rows: list[int], seed: int) -> tuple[Any, list[int]] | None:
        """All of this where random numbers are the same for every row; what came out, and of which rows.

        None where something draws them that nothing stops.
        """
        base, smaller_ones, out = self._among(Undrawn(), rows, seed)
        assert base.taint is not None
        if not base.draws:
            self.compare_many(rows, base, out, seed)
        others = [Undrawn(LOW), Undrawn(HIGH)] if base.taint.undrawn.varies else []
        self.of_rows = _of_rows([base, *smaller_ones])
        if self.of_rows:
            others.append(Undrawn(BY_ROW, self.of_rows))
        for undrawn in others:
            try:
                self._among(undrawn, rows, seed)
            except (FastclipError, Opened):
                raise
            except Exception as error:  # the model cannot take such numbers
                if no_memory(error):
                    raise
        return None if base.draws else (out, rows)

    def _among(
        self, undrawn: Undrawn, rows: list[int], seed: int
    ) -> tuple[Probe, list[Probe], Any]:
        """Among fewer rows, and among copies: the run, those on fewer rows, what came out."""
        base = Probe(self.run.layout, len(rows), taint=Taint((), undrawn))
        out = self.unfolded.once(self.run, base, rows, seed)
        smaller_ones = self.compare(rows, base, out, seed)
        base.without(base.seen.keys())
        if not base.draws and undrawn.level != BY_ROW:
            copies = self._like(base, len(rows))
            found = self.unfolded.once(self.run, copies, rows[:1] * len(rows), seed)
            check_copies(copies, found, self.unfolded.axes, self.run.layout.places)
            check_copied_slopes(copies, self.run.layout.places)
        return base, smaller_ones, out

    def _like(self, base: Probe, rows: int) -> Probe:
        taint = None if base.taint is None else Taint((), base.taint.undrawn)
        return Probe(self.run.layout, rows, taint=taint)


def _of_rows(probes: list[Probe]) -> set[int]:
    """The draws that have as many numbers along their first axis as there are rows, in every batch."""
    sizes = [(probe.rows, probe.taint.undrawn.sizes) for probe in probes if probe.taint]
    if len({len(found) for _, found in sizes}) != 1:
        return set()
    return {n for n in range(len(sizes[0][1])) if all(found[n] == rows for rows, found in sizes)}

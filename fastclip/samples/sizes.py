"""Rows held against themselves in batches of other sizes, and against their own copies.

Random numbers are others there, so whatever draws them runs as if nothing were drawn.
"""

from __future__ import annotations

from typing import Any

from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.groups import smaller
from fastclip.samples.independence import check_layers, check_values
from fastclip.samples.positions import check_copies
from fastclip.samples.probing import Probe, Runs
from fastclip.samples.slopes import check_slopes
from fastclip.samples.taint import Taint


class Sizes:
    """What one call gives for the same rows among others, fewer or none.

    Args:
        run: the call. unfolded: what it returns. batch: the real number of samples.
    """

    def __init__(self, run: Runs, unfolded: Unfolded, batch: int) -> None:
        self.run, self.unfolded, self.batch = run, unfolded, batch

    def compare_copies(self, two: Probe, three: Probe, outputs: tuple[Any, Any]) -> None:
        """Copies of one row are alike, and the same in two and in three."""
        places = self.run.layout.places
        for probe, out in zip((two, three), outputs, strict=True):
            check_copies(probe, out, self.unfolded.axes, places)
        check_values(two, three, outputs, [0], self.unfolded.axes, other_size=True)
        check_layers(two, three, [0], places)

    def compare(self, rows: list[int], base: Probe, out: Any, seed: int) -> None:
        """The first `rows` of `base`, which has returned `out`, are the same in smaller batches."""
        places = self.run.layout.places
        for some in smaller(rows, self.batch):
            taint = None if base.taint is None else Taint(())
            probe, kept = Probe(self.run.layout, len(some), taint=taint), list(range(len(some)))
            found = self.unfolded.once(self.run, probe, some, seed)
            check_values(base, probe, (out, found), kept, self.unfolded.axes, other_size=True)
            check_layers(base, probe, kept, places)
            check_slopes(base, probe, kept, places)

    def compare_undrawn(self, rows: list[int], seed: int) -> tuple[Any, list[int]] | None:
        """All of this where random numbers are the same for every row; what came out, and of which rows.

        None where NumPy or Python draws them, which nothing stops.
        """
        base, copies = (Probe(self.run.layout, len(rows), taint=Taint(())) for _ in range(2))
        out = self.unfolded.once(self.run, base, rows, seed)
        if base.draws:
            return None
        found = self.unfolded.once(self.run, copies, rows[:1] * len(rows), seed)
        check_copies(copies, found, self.unfolded.axes, self.run.layout.places)
        self.compare(rows, base, out, seed)
        return out, rows

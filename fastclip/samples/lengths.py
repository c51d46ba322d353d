"""A row among shorter ones: nothing of it may follow from how long the longest row of the batch is.

Where all rows of a look are of one length, other rows show nothing of that. So a row that says of itself
that it is shorter (fastclip.samples.selected) is run among rows that do, and among rows that do not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastclip.errors import FastclipError
from fastclip.samples.bounds import InBounds
from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.independence import by_row, check_values
from fastclip.samples.inputs import Cuts
from fastclip.samples.mixed_outputs import Found, mixed_outputs, note_gradients
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.selected import Shorter
from fastclip.samples.taint import Taint

_ROWS = 3
_LAST, _ALL = frozenset({_ROWS - 1}), frozenset(range(_ROWS))
_ALL_BUT_ONE = _ALL - {0}
"""Where no label counts, a mean over those that do is none."""


def check_lengths(run: Runs, cuts: Cuts, unfolded: Unfolded) -> None:
    """Hold the last of three copies of a row, which is shorter, against itself among shorter ones.

    Of labels that are left out, the first, which counts, is held: among one such row, and among two.

    Outputs that belong to no row, and couple rows of unequal lengths, are noted.

    Raises:
        BatchSizeError: its output is another one there.
    """
    run.cut(cuts)
    sums = any(axis < 0 for axis in unfolded.axes)  # which may be divided by how many labels count
    for filler in run.fillers(counted=sums):
        _check(run, unfolded, filler)


def _fails(output: Any, found: Found) -> bool:
    """Whether a label has made numbers none: the model cannot take it."""
    shown = [*by_row(output), *(g for _, given in found.values() for _, _, g in given)]
    return any(bool(x.isnan().any()) for x in shown)


def _check(run: Runs, unfolded: Unfolded, filler: Shorter) -> None:
    probes, outputs, found = [], [], []
    held, others = ([_ROWS - 1], _ALL) if filler.alone is None else ([0], _ALL_BUT_ONE)
    for shorter in (_LAST, others):
        probe = Probe(
            run.layout, _ROWS, differentiable=True, taint=Taint(()), shortened=shorter, filler=filler,
        )  # fmt: skip
        gradients: Found = {}
        try:
            note = partial(note_gradients, probe, run.layout.places, unfolded.axes, gradients)
            with InBounds():
                outputs.append(run.once(probe, [0] * _ROWS, 0, note))
            if filler.alone is not None and _fails(outputs[-1], gradients):
                return
        except (FastclipError, Opened):
            raise
        except Exception:  # a row that the model cannot take
            return
        probes.append(probe)
        found.append(gradients)
    if probes[0].draws:
        return
    own = (unfolded(outputs[0], _ROWS), unfolded(outputs[1], _ROWS))
    check_values(probes[0], probes[1], own, held, unfolded.axes)
    mixed = mixed_outputs(found[0], found[1], held, unfolded.axes, _ROWS)
    if filler.alone is None or filler.moves:
        run.layout.guards.mixed |= mixed
    elif mixed:
        run.layout.guards.counted[filler] = mixed

"""Rows of which a first batch may hold none: NaN, infinite, very large, shorter, with gaps.

What couples rows may be silent until such a row is there: a weight of exactly 0 makes NaN of another
row's NaN, a stabiliser subtracts the largest score of the batch, gaps are filled with means. So the same
rows are run among ordinary ones and among special ones, and nothing of theirs may change.

Several kinds stand in one run, and in all inputs. Where a model cannot take that, each kind is run by
itself, then in one input at a time, then with whole numbers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.samples.bounds import InBounds
from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.independence import check_values
from fastclip.samples.inputs import INPUT, Cuts, without_graph
from fastclip.samples.mixed_outputs import mixed_outputs, note_gradients
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.selected import Shorter, counts
from fastclip.samples.slopes import check_slopes
from fastclip.samples.special_rows import (
    Change,
    but_for_wholes,
    changeable,
    changed,
    down,
    gaps,
    infinite,
    nan,
    ordinary,
    short,
    up,
)
from fastclip.samples.special_runs import (
    COUNT,
    FILLED,
    KEPT,
    SpecialRun,
    has_finite,
    special_slopes,
    stays_finite,
)  # fmt: skip

if TYPE_CHECKING:
    from fastclip.samples.layout import BatchLayout

Others = tuple[Change, Change, Change]
"""What becomes of the rows that are not kept."""

_PLAIN: Others = (ordinary, ordinary, ordinary)
_FIRST: dict[str, Others] = {
    "infinite": (infinite, infinite, infinite), "very large": (up, down, up), "longer": _PLAIN,
}  # fmt: skip
"""Kinds that stand in one run, by themselves."""


@dataclass(frozen=True)
class _Part:
    """What of the inputs is changed."""

    inputs: frozenset[int] = frozenset()
    wholes: bool = True
    """Whole numbers, too, which may be categories."""

    def smaller(self) -> list[_Part]:
        """What is left to be tried where the model cannot take it."""
        if len(self.inputs) > 1:
            return [_Part(frozenset({number})) for number in sorted(self.inputs)]
        return [replace(self, wholes=False)] if self.wholes else []


def check_special(run: Runs, cuts: Cuts, unfolded: Unfolded) -> None:
    """Hold rows among ordinary ones against themselves among special ones; whole numbers stay.

    What the model cannot take is left out. Outputs that belong to no row, and couple rows then, are
    noted, and those behind which a gradient that is not finite would reach other rows.

    Raises:
        BatchSizeError: they are not the same.
    """
    layout = run.layout
    choice = run.cut(cuts, run.distinct(cuts) or None)
    numbers = {n for n, rows, axis in run.taken if changeable(rows, axis, choice)}
    if not numbers and not unfolded.plain_axes:
        return
    met, uses = set(layout.met), dict(layout.uses)
    try:
        _Look(run, unfolded, choice, _Part(frozenset(numbers))).hold()
    finally:  # of ways that only special rows take nothing is known
        layout.met, layout.uses = met, uses


def untried(layouts: Mapping[str, BatchLayout]) -> tuple[str, ...]:
    """What is taken on faith of rows of which the model takes none, in words."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, layout in layouts.items():
        for number, kind in sorted(layout.untried):
            found.setdefault((name, number), []).append(kind)
    return tuple(
        f"rows that are {', '.join(kinds)} in input {number} of {name} do nothing to others: the model "
        "fails on them or gives NaN, so none were looked at"
        for (name, number), kinds in found.items()
    )


class _Look:
    """Runs on the same rows. One run beside the base is held at a time, and two where rows with gaps
    are held, too.

    Args:
        choice: rows there are to choose from. every: all that may be changed.
    """

    def __init__(self, run: Runs, unfolded: Unfolded, choice: int, every: _Part) -> None:
        self._run, self._unfolded, self._choice, self._every = run, unfolded, choice, every
        self._places = run.layout.where_they_stay()
        self._masks = {number for number, rows, _ in run.taken if counts(rows)}
        self._base: SpecialRun | None = None
        self._ordinary: SpecialRun | None = None
        self._kept = _Part()
        """What is shorter in rows that are kept."""

    def hold(self) -> None:
        every = self._every
        if every.inputs:
            self._try("shorter", every, self._is_base)
        self._base = self._base or self._ordinary or self._once(_PLAIN, every, void=True)
        self._ordinary = None
        if self._base is None:
            self._run.layout.untried.update((number, "special") for number in every.inputs)
            return
        if not stays_finite(self._base.probe.slopes, self._base.void, self._places):
            self._run.layout.guards.spreading = self._unfolded.plain_axes
        self._base.void = []
        if not every.inputs:
            return
        if not self._against((infinite, down, up), every):
            for kind, others in _FIRST.items():
                self._try(kind, every, partial(self._against, others))
        if not self._with_gaps((nan, gaps, gaps), every):
            self._try("NaN", every, partial(self._against, (nan, nan, nan)))
            self._try("with gaps", every, partial(self._with_gaps, (gaps, gaps, gaps)))

    def _try(self, kind: str, part: _Part, run: Callable[[_Part], bool]) -> None:
        """All of it at once, or as much as the model can take."""
        if run(part):
            return
        smaller = part.smaller()
        if not smaller:
            self._run.layout.untried.update((number, kind) for number in part.inputs)
        for each in smaller:
            self._try(kind, each, run)

    def _is_base(self, part: _Part) -> bool:
        """Whether all rows can be shorter there: without NaN that they do not have otherwise."""
        base, kept = self._base, self._kept
        self._base, self._kept = None, part
        found = self._once((short, short, short), part, void=True)
        fits = found is not None and (not found.broken or found.broken <= self._of_ordinary())
        if base is not None and fits:  # of one input, beside another one
            self._base = found
            self._against(_PLAIN, self._every)
        if base is not None or not fits:
            self._base, self._kept = base, kept
        else:
            self._base = found
        return fits

    def _of_ordinary(self) -> int:
        """Numbers that are none where all rows are ordinary."""
        kept, self._kept = self._kept, _Part()
        self._ordinary = self._ordinary or self._once(_PLAIN, self._every, void=True)
        self._kept = kept
        return 0 if self._ordinary is None else self._ordinary.broken

    def _against(self, others: Others, part: _Part) -> bool:
        other = self._once(others, part)
        if other is not None:
            self._hold_base(other, others, part)
        return other is not None

    def _with_gaps(self, others: Others, part: _Part) -> bool:
        found = self._once(others, part)
        if found is None:
            return False
        self._hold_base(found, others, part)
        if not has_finite(found, FILLED, self._unfolded.axes):
            return True
        for more in ((up, down, gaps), (ordinary, ordinary, gaps)):  # the model can take such rows
            filled = self._once(more, part)
            if filled is not None:
                self._hold(found, filled, FILLED, _filled)
                self._hold_base(filled, more, part)
                break
        return True

    def _hold_base(self, other: SpecialRun, others: Others, part: _Part) -> None:
        assert self._base is not None
        self._hold(self._base, other, KEPT, _reached)
        layout, found, masks = self._run.layout, self._mixed(other), part.inputs & self._masks
        if masks and found.keys() - layout.guards.mixed.keys():
            for number in masks:  # which couple nothing, maybe, as long as they are masks
                layout.guards.counted.setdefault(Shorter(math.inf, number), {}).update(found)
            sure = replace(part, inputs=part.inputs - masks)
            again = self._once(others, sure) if sure.inputs else None
            found = {} if again is None else self._mixed(again)
        layout.guards.mixed |= found

    def _mixed(self, other: SpecialRun) -> dict[int, int]:
        assert self._base is not None
        axes = self._unfolded.axes
        return mixed_outputs(self._base.found, other.found, KEPT, axes, COUNT)

    def _hold(
        self, first: SpecialRun, second: SpecialRun, kept: list[int],
        refusal: Callable[[], BatchSizeError],
    ) -> None:  # fmt: skip
        try:
            check_values(
                first.probe, second.probe, (first.out, second.out), kept, self._unfolded.axes
            )
            check_slopes(first.probe, second.probe, kept, self._places)
        except BatchSizeError as error:
            raise refusal() from error
        if kept == KEPT and not stays_finite(first.probe.slopes, second.probe.slopes, self._places):
            raise refusal()

    def _once(self, others: Others, part: _Part, *, void: bool = False) -> SpecialRun | None:
        """A run in which rows that are not kept are changed so; None where the model cannot take it."""
        touched: list[bool] = []

        def change(few: Any, axis: int, number: int) -> Any:
            if number not in self._every.inputs:
                return few
            kept: Change = short if number in self._kept.inputs else ordinary
            kept = kept if self._kept.wholes else but_for_wholes(kept, [])
            one, two, three = others if number in part.inputs else (kept, kept, kept)
            if not part.wholes:
                one, two, three = (but_for_wholes(x, touched) for x in (one, two, three))
            return changed(few, axis, [one, kept, two, three, kept])

        probe = Probe(self._run.layout, COUNT, differentiable=True, slopes=[], change=change)
        this = SpecialRun(probe)

        def note(out: Any) -> None:
            axes, own = self._unfolded.axes, self._unfolded(out, COUNT)
            note_gradients(probe, self._run.layout.places, axes, this.found, out)
            # Where the longest row cuts all, a mask's own gradient ends there, and no parameter's.
            masks = {f"{INPUT}{number}" for number in self._masks}
            probe.sources = [x for x in probe.sources if x.name not in masks]
            lost = [x.isnan() for x in (own if self._base is None else self._base.out)]
            if void:
                this.void = special_slopes(probe, own, axes, lost, torch.nan)
            probe.slopes = special_slopes(probe, own, axes, lost)
            probe.sources = []

        rows = sorted(i % self._choice for i in range(COUNT))
        try:
            with InBounds():
                out = self._run.once(probe, rows, 0, note)
        except (FastclipError, Opened):
            raise
        except Exception:  # rows that the model cannot take
            return None
        probe.change = None  # which would hold this look, and with it the base, in a cycle
        this.out = self._unfolded(without_graph(out), COUNT)
        return this if part.wholes or any(touched) else None


def _reached() -> BatchSizeError:
    return BatchSizeError(
        "the output: what one sample has there depends on another sample's row where that is NaN, "
        "infinite, very large or longer than the others: rows are mixed with weights of 0 (0 * NaN is "
        "NaN) or a mask that is added, or share a largest value or length of the batch; compute each "
        "row from itself alone (selected by their numbers, or with torch.where), or begin the model's "
        "forward with x = x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3), if it is exact for such numbers"
    )


def _filled() -> BatchSizeError:
    return BatchSizeError(
        "what one sample has in the place of NaN depends on another sample's row (a mean over the "
        "batch); fill gaps with numbers that are the same for every batch"
    )

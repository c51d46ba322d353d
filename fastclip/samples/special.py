"""Rows of which a first batch may hold none: NaN, infinite, very large, shorter, with gaps.

What couples rows may be silent until such a row is there: a weight of exactly 0 makes NaN of another
row's NaN, a stabiliser subtracts the largest score of the batch, gaps are filled with means. So the same
rows are run among ordinary ones and among special ones, and nothing of theirs may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.samples.bounds import InBounds
from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.independence import check_values
from fastclip.samples.inputs import Cuts, without_graph
from fastclip.samples.mixed_outputs import Found, mixed_outputs, note_gradients
from fastclip.samples.place import Place
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.selected import counts
from fastclip.samples.slopes import check_slopes

_LARGE, _LARGE_IN_HALF = 1e6, 1e2
_SHORT = 2 / 3  # of a row's length

Change = Callable[[Tensor], Any]
"""Of one row, in place; it has an axis for its length at first or at last."""
Slopes = list[tuple[Any, Tensor | None]]


def _tails(row: Tensor) -> list[Tensor]:
    """Its end, along the first and the last of its axes."""
    axes = {axis: row.shape[axis] for axis in {0, row.dim() - 1} if axis >= 0}
    ends = {axis: max(1, int(_SHORT * size)) for axis, size in axes.items()}
    return [row.narrow(a, end, axes[a] - end) for a, end in ends.items() if axes[a] > end]


def _ordinary(row: Tensor) -> None:
    pass


def _short(row: Tensor) -> None:
    for tail in _tails(row):
        tail.zero_()


def _gaps(row: Tensor) -> None:
    for tail in _tails(row) or [row]:
        tail.fill_(torch.nan)


def _nan(row: Tensor) -> None:
    row.fill_(torch.nan)


def _infinite(row: Tensor) -> None:
    row.fill_(-torch.inf)
    for tail in _tails(row):
        tail.fill_(torch.inf)


def _large(sign: int, row: Tensor) -> None:
    row.mul_(sign * (_LARGE_IN_HALF if row.dtype == torch.float16 else _LARGE))


_UP, _DOWN = partial(_large, 1), partial(_large, -1)
_KEPT, _FILLED, _COUNT = [1, 4], [3], 5
"""Rows that are held among ordinary ones; a row with gaps, held among large ones; rows of a run."""


@dataclass
class _Run:
    """One run of the rows, of which some are changed."""

    probe: Probe
    out: list[Tensor] = field(default_factory=list)
    found: Found = field(default_factory=dict)
    """Gradients of outputs that belong to no row."""
    void: Slopes = field(default_factory=list)
    """Slopes where the gradient of the first row's output is NaN."""


def check_special(run: Runs, cuts: Cuts, unfolded: Unfolded) -> None:
    """Hold rows among ordinary ones against themselves among special ones; whole numbers stay.

    What the model cannot take is left out. Outputs that belong to no row, and couple rows then, are
    noted, and those behind which a gradient that is not finite would reach other rows.

    Raises:
        BatchSizeError: they are not the same.
    """
    layout = run.layout
    choice = run.cut(cuts, run.distinct(cuts) or None)
    numbers = any(map(changeable, run.rows_of_numbers))
    if not numbers and not unfolded.plain_axes:
        return
    ways = (_short, _ordinary) if numbers else (_ordinary,)
    met, uses = set(layout.met), dict(layout.uses)
    try:
        base = next((b for kept in ways if (b := _base(run, unfolded, choice, kept))), None)
        if base is not None:
            _note_spreading(run, unfolded, base[1])
        if base is not None and numbers:
            _among(run, unfolded, choice, *base)
    finally:  # of ways that only special rows take nothing is known
        layout.met, layout.uses = met, uses


def _base(
    run: Runs, unfolded: Unfolded, choice: int, kept: Change
) -> tuple[Change, _Run] | None:  # fmt: skip
    """All rows changed this way; None where they are not finite so, but for masks that outputs hold."""
    base = _once(run, unfolded, choice, [kept] * _COUNT, void=True)
    if base is None or any(bool(x.isnan().any()) for x in base.out):
        return None
    slopes = [g for _, g in base.probe.slopes or [] if g is not None]
    return (kept, base) if all(bool(g.isfinite().all()) for g in slopes) else None


def _note_spreading(run: Runs, unfolded: Unfolded, base: _Run) -> None:
    if not _stays_finite(base.probe.slopes, base.void, run.layout.where_they_stay()):
        run.layout.spreading = unfolded.plain_axes
    base.void = []


def _among(run: Runs, unfolded: Unfolded, choice: int, kept: Change, base: _Run) -> None:
    """One run beside the base is held at a time, and two where rows with gaps are held, too."""
    axes, places = unfolded.axes, run.layout.where_they_stay()

    def against_base(other: _Run | None) -> None:
        if other is not None:
            _hold(base, other, _KEPT, axes, places, _reached)
            run.layout.mixed |= mixed_outputs(base.found, other.found, _KEPT, axes, _COUNT)

    against_base(_once(run, unfolded, choice, [_infinite, kept, _DOWN, _UP, kept]))
    gaps = _once(run, unfolded, choice, [_nan, kept, _gaps, _gaps, kept])
    against_base(gaps)
    if gaps is not None and _has_finite(gaps, _FILLED, axes):  # the model can take such rows
        filled = _once(run, unfolded, choice, [_UP, kept, _DOWN, _gaps, kept])
        if filled is not None:
            _hold(gaps, filled, _FILLED, axes, places, _filled)
        against_base(filled)


def _hold(
    first: _Run, second: _Run, kept: list[int], axes: list[int], places: dict[Any, Place],
    refusal: Callable[[], BatchSizeError],
) -> None:  # fmt: skip
    try:
        check_values(first.probe, second.probe, (first.out, second.out), kept, axes)
        check_slopes(first.probe, second.probe, kept, places)
    except BatchSizeError as error:
        raise refusal() from error
    if kept == _KEPT and not _stays_finite(first.probe.slopes, second.probe.slopes, places):
        raise refusal()


def _stays_finite(
    before: Slopes | None, after: Slopes | None, places: dict[Any, Place]
) -> bool:  # fmt: skip
    """The gradients of the rows that are kept, which were."""
    for (name, g), (other, h) in zip(before or [], after or [], strict=False):
        place = places.get(name)
        if name != other or g is None or h is None or place is None or g.shape != h.shape:
            continue
        if place.fits(h, _COUNT) and not bool(place.rows(h, _COUNT)[_KEPT].isfinite().all()):
            return False
    return True


def _once(
    run: Runs, unfolded: Unfolded, choice: int, changes: list[Change], *, void: bool = False
) -> _Run | None:
    """A run on rows of which each is changed in its way; None where the model cannot take them."""

    def change(few: Tensor, axis: int) -> Tensor:
        if not changeable(few):
            return few
        few = few.detach().clone()
        for i, one in enumerate(changes):
            one(few.select(axis, i))
        return few

    probe = Probe(run.layout, _COUNT, differentiable=True, slopes=[], change=change)
    this = _Run(probe)

    def note(out: Any) -> None:
        axes, own = unfolded.axes, unfolded(out, _COUNT)
        note_gradients(probe, run.layout.places, axes, this.found, out)
        if void:
            this.void = _slopes(probe, own, axes, torch.nan)
        probe.slopes = _slopes(probe, own, axes)
        probe.sources = []

    try:
        with InBounds():
            out = run.once(probe, sorted(i % choice for i in range(_COUNT)), 0, note)
    except (FastclipError, Opened):
        raise
    except Exception:  # rows that the model cannot take
        return None
    this.out = unfolded(without_graph(out), _COUNT)
    return this


def changeable(x: Any) -> bool:
    """Whether it holds numbers that may be anything: no mask, no whole numbers that count."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel() or counts(x):
        return False
    return x.dim() > 1 or not bool((x == x.round()).all())


def _slopes(
    probe: Probe, outputs: list[Tensor], axes: list[int], first: float | None = None
) -> Slopes:
    """Of all sources; the same gradient for every row's output, but for the first one's."""
    pairs = [
        (x, axis) for x, axis in zip(outputs, axes, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == _COUNT and x.requires_grad
    ]  # fmt: skip
    if not pairs or not probe.sources:
        return []
    seeds = []
    for x, axis in pairs:
        one = normal(x.narrow(axis, 0, 1), 1).to(x.dtype).expand_as(x)
        if first is not None:
            one = one.clone()
            one.select(axis, 0).fill_(first)
        seeds.append(one)
    edges = [source.edge for source in probe.sources]
    found = gradients([x for x, _ in pairs], edges, seeds, keep_graph=True)
    return [(source.name, g) for source, g in zip(probe.sources, found, strict=True)]


def _has_finite(one: _Run, rows: list[int], axes: list[int]) -> bool:
    found = [
        x.movedim(axis, 0)[rows].isfinite().any() for x, axis in zip(one.out, axes, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == _COUNT
    ]  # fmt: skip
    return any(map(bool, found))


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

"""Runs on rows of which some are special: what they return, and the gradients of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastclip.samples.gradients import gradients, normal
from fastclip.samples.mixed_outputs import Found
from fastclip.samples.place import Place
from fastclip.samples.probing import Probe

Slopes = list[tuple[Any, Tensor | None]]

COUNT, KEPT, FILLED = 5, [1, 4], [3]
"""Rows of a run; those that are held among ordinary ones; a row with gaps, held among large ones."""


@dataclass
class SpecialRun:
    """One run of the rows, of which some are changed."""

    probe: Probe
    out: list[Tensor] = field(default_factory=list)
    found: Found = field(default_factory=dict)
    """Gradients of outputs that belong to no row."""
    void: Slopes = field(default_factory=list)
    """Slopes where the gradient of the first row's output is NaN."""

    @property
    def broken(self) -> int:
        """Numbers that are none."""
        slopes = [g for _, g in self.probe.slopes or [] if g is not None]
        lost = (~g.isfinite() for g in slopes)
        return sum(int(x.sum()) for x in (*(x.isnan() for x in self.out), *lost))


def stays_finite(
    before: Slopes | None, after: Slopes | None, places: dict[Any, Place]
) -> bool:  # fmt: skip
    """The gradients of the rows that are kept, if they were."""
    for (name, g), (other, h) in zip(before or [], after or [], strict=False):
        place = places.get(name)
        if name != other or g is None or h is None or place is None or g.shape != h.shape:
            continue
        if place.fits(h, COUNT):
            was, is_now = (bool(place.rows(x, COUNT)[KEPT].isfinite().all()) for x in (g, h))
            if was and not is_now:
                return False
    return True


def special_slopes(
    probe: Probe, outputs: list[Tensor], axes: list[int], lost: list[Tensor],
    first: float | None = None,
) -> Slopes:  # fmt: skip
    """Of all sources; the same gradient for every row's output, but for the first one's.

    Args:
        lost: where outputs are NaN anyway: those that hold any are left out, or give nothing there if
            all do.
    """
    pairs = [
        (x, axis, nan_there)
        for x, axis, nan_there in zip(outputs, axes, lost, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == COUNT and x.requires_grad
    ]
    pairs = [pair for pair in pairs if not bool(pair[2].any())] or pairs
    if not pairs or not probe.sources:
        return []
    seeds = []
    for x, axis, nan_there in pairs:
        one = normal(x.narrow(axis, 0, 1), 1).to(x.dtype).expand_as(x)
        if first is not None:
            one = one.clone()
            one.select(axis, 0).fill_(first)
        if nan_there.shape == one.shape:
            one = one.masked_fill(nan_there, 0)
        seeds.append(one)
    edges = [source.edge for source in probe.sources]
    found = gradients([x for x, *_ in pairs], edges, seeds, keep_graph=True)
    return [(source.name, g) for source, g in zip(probe.sources, found, strict=True)]


def has_finite(one: SpecialRun, rows: list[int], axes: list[int]) -> bool:
    found = [
        x.movedim(axis, 0)[rows].isfinite().any() for x, axis in zip(one.out, axes, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == COUNT
    ]  # fmt: skip
    return any(map(bool, found))

"""Slopes: where other rows change, the gradient of a row's own output stays; copies have the same.

Values and influence do not see what scales a gradient by numbers of the batch and leaves the values as
they are: straight-through estimates (x k - (x k).detach() + x.detach()), autograd functions that look at
what they saved, hooks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fastclip.memory import no_memory
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.independence import coupled
from fastclip.samples.place import Place, called
from fastclip.samples.positions import placed
from fastclip.samples.probing import Probe
from fastclip.samples.taint import DOUBLE

_SAME_SIZE = {torch.float64: 1e-7, torch.float32: 1e-2}
_OTHER_SIZE = {torch.float64: 1e-6}
_ROUGH = 0.1
"""How far gradients may be apart, relative to their norm: one that lies at a kink takes the other side
where another kernel has rounded it differently, as in batches of another size."""
_SILENT = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative to the largest: what is smaller is left by rounding."""


def note_slopes(probe: Probe, outputs: list[Tensor], axes: list[int]) -> None:
    """Note in `probe` the gradients of its sources, if they are asked for."""
    if probe.slopes is None:
        return
    count = probe.rows
    pairs = [
        (x, axis) for x, axis in zip(outputs, axes, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == count and x.requires_grad
    ]  # fmt: skip
    if not pairs or not probe.sources:
        return
    seeds = []
    for x, axis in pairs:  # the same for every row
        one = normal(x.narrow(axis, 0, 1), 1)
        probe.slopes.append((tuple(one.shape), None))
        seeds.append(one.to(x.dtype).expand_as(x))
    edges = [source.edge for source in probe.sources]
    names = [source.name for source in probe.sources]
    try:
        found = gradients([x for x, _ in pairs], edges, seeds)
        probe.slopes += zip(names, found, strict=True)
    except Exception as error:
        if no_memory(error):
            raise
        # a checkpoint that computes other numbers again, where rows were replaced
        probe.slopes = []
    probe.sources = []  # whose graph is done with


def check_slopes(
    first: Probe, second: Probe, kept: list[int], places: Mapping[Hashable, Place]
) -> None:
    """The gradients of these rows are the same in both runs.

    Raises:
        BatchSizeError: naming where they are not.
    """
    if 1 in (first.rows, second.rows):  # torch's InstanceNorm of one row, channels last, is wrong
        return
    one, other = first.slopes or [], second.slopes or []
    if [name for name, _ in one] != [name for name, _ in other]:
        return

    def pairs() -> Iterator[tuple[Hashable, Tensor, Tensor]]:
        for (name, g), (_, h) in zip(one, other, strict=True):
            place = places.get(name)
            if g is None or h is None or place is None:
                continue
            if place.fits(g, first.rows) and place.fits(h, second.rows):
                index = torch.tensor(kept, dtype=torch.int64, device=g.device)
                x = place.rows(g, first.rows).index_select(0, index)
                y = place.rows(h, second.rows).index_select(0, index)
                if x.shape == y.shape and bool(torch.isfinite(x).all() & torch.isfinite(y).all()):
                    yield name, x, y

    same = first.rows == second.rows
    for name in _apart(pairs(), first, _SAME_SIZE if same else _OTHER_SIZE):
        raise coupled(f"the gradient at {called(name)}", other_size=not same)


def check_copied_slopes(probe: Probe, places: Mapping[Hashable, Place]) -> None:
    """Copies of one row have the same gradients.

    Raises:
        BatchSizeError: naming where they have not.
    """

    def pairs() -> Iterator[tuple[Hashable, Tensor, Tensor]]:
        for name, g in probe.slopes or []:
            place = places.get(name)
            if g is None or place is None or not place.plain or not place.fits(g, probe.rows):
                continue
            rows = place.rows(g, probe.rows)
            if len(rows) and bool(torch.isfinite(rows).all()):
                yield name, rows, rows[:1].expand_as(rows)

    for name in _apart(pairs(), probe, _OTHER_SIZE):
        raise placed(f"the gradient at {called(name)}")


def _apart(
    pairs: Iterable[tuple[Hashable, Tensor, Tensor]], probe: Probe,
    allowed: dict[torch.dtype, float],
) -> Iterator[Hashable]:  # fmt: skip
    """Where gradients that must be the same are not."""
    found = []
    for name, x, y in pairs:  # not held: all of them are as large as the model's activations
        norm = max(float(x.norm()), float(y.norm()))
        found.append((name, x.dtype.to_real(), norm, float((x - y).norm())))
    loudest = max((norm for _, _, norm, _ in found), default=0.0)
    for name, dtype, norm, apart in found:
        if dtype == torch.float64 and probe.rounding > DOUBLE:
            dtype = torch.float32
        loud = norm > _SILENT.get(dtype, _ROUGH) * loudest
        if loud and apart > allowed.get(dtype, _ROUGH) * norm:
            yield name

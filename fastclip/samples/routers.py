"""Modules inside which rows are moved: the innermost one that returns them in their places."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from fastclip.errors import FastclipError
from fastclip.memory import no_memory
from fastclip.samples.influence import Influence
from fastclip.samples.inputs import Cuts
from fastclip.samples.layout import BatchLayout
from fastclip.samples.owners import agrees
from fastclip.samples.place import Place, places
from fastclip.samples.probing import Probe, Runs
from fastclip.samples.selected import resized


def places_returned(probe: Probe, influence: Influence) -> dict[str, dict[int, list[Place]]]:
    """Where the samples may be in what the modules return: by path, by number of the output."""
    found: dict[str, dict[int, list[Place]]] = {}
    shapes = {output.name: output.shape for output in probe.returned}
    path: str
    number: int
    for name, owner in influence.owners(probe.returned):
        if owner is None:
            continue
        path, number = name  # type: ignore[misc]
        shape = shapes[name]
        plain = [p for axis in range(len(shape)) for p in places(shape, probe.rows, [axis])]
        fits = [place for place in plain if agrees(place, owner, probe.rows)]
        if known := probe.layout.returns.get(path, {}).get(number):
            fits = [place for place in fits if place.like(known)]
        held = found.setdefault(path, {})
        held[number] = [p for p in held.get(number, fits) if p in fits]
    probe.layout.lost(path for path, held in found.items() if not all(held.values()))
    return found


def route(
    names: Iterable[Hashable], probes: Iterable[Probe], returned: dict[str, dict[int, list[Place]]]
) -> set[Hashable]:
    """Note the routers of uses whose rows are moved; those that have none.

    One line of code may use a parameter in several modules (all blocks of a T5 are given the position
    bias of the first): each has a router of its own. Where one has none, a gradient is refused there.

    Args:
        probes: in which they were made. returned: of `places_returned`.
    """
    probes = list(probes)
    layout = probes[0].layout
    routers = {
        path: {number: found[0] for number, found in held.items()}
        for path, held in returned.items()
        if held and all(held.values()) and path not in layout.astray
    }
    lost: set[Hashable] = set()
    for name in names:
        made_in = dict.fromkeys(users for probe in probes for users in probe.users.get(name, ()))
        innermost = (
            next((path for path in reversed(users) if path in routers), None) for users in made_in
        )
        found = [path for path in innermost if path is not None]
        for path in found:
            layout.routers.setdefault(name, set()).add(path)
            layout.returns[path] = routers[path]
        if not found:
            lost.add(name)
    return lost


def selected(run: Runs, cuts: Cuts) -> bool:
    """Note layers and uses of as many rows as masks select; whether any is new."""
    layout = run.layout
    real = run.distinct(cuts)
    rows = list(range(run.cut(cuts, real or None))) * (2 if len(real) < 2 else 1)
    base, fewer = (Probe(layout, len(rows), fewer=less, shows=False) for less in (False, True))
    for probe in (base, fewer):
        try:
            run.once(probe, rows)
        except FastclipError:
            raise
        except Exception as error:  # its own account of how many there are is wrong
            if no_memory(error):
                raise
            continue
    run.cut(cuts)
    return _moved(layout, base, fewer)


def shorter(run: Runs, copies: Probe) -> bool:
    """Note layers and uses of as many rows as lengths say; whether any is new.

    Args:
        copies: a run on copies of one row, of which the last now says that it is shorter.
    """
    found = False
    for filler in run.fillers():
        last = frozenset({copies.rows - 1})
        probe = Probe(run.layout, copies.rows, shortened=last, filler=filler, shows=False)
        try:
            run.once(probe, [0] * copies.rows)
        except Exception as error:  # a row that the model cannot take
            if no_memory(error):
                raise
        found |= _moved(run.layout, copies, probe)
    return found


def _moved(layout: BatchLayout, before: Probe, after: Probe) -> bool:
    layout.lost(map(str, resized(before.came_out, after.came_out)))
    found = [name for name in resized(before.shapes, after.shapes) if name not in layout.moved]
    layout.moved |= dict.fromkeys(found)
    layout.open |= {name for name in found if isinstance(name, str)}
    return bool(found)

"""Rows of a call held against each other, on runs that change some of them and on their gradients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fastclip.errors import FastclipError
from fastclip.memory import no_memory
from fastclip.samples.beside import Beside
from fastclip.samples.folded_outputs import Unfolded
from fastclip.samples.groups import few, others_changed, spread
from fastclip.samples.independence import (
    check_in_either,
    check_somewhere,
    check_values,
    coupled,
    extreme_rows,
    followed,
    moved_between,
)
from fastclip.samples.influence import Influence
from fastclip.samples.inputs import INPUT, Cuts, own_axis
from fastclip.samples.layout import BatchLayout
from fastclip.samples.mixed_outputs import find_mixed
from fastclip.samples.owners import agrees
from fastclip.samples.place import Place, called, places
from fastclip.samples.positions import check_constants, check_copied, check_copies, told_apart
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.routers import places_returned, route
from fastclip.samples.sizes import Sizes
from fastclip.samples.slopes import check_copied_slopes, check_slopes

_SMALLEST = 2
"""Rows that are held against a batch of nothing else."""
_SEEDS = (1, 2, 3)
"""Of the runs that are looked at; one is enough where nothing is drawn. Owners are of the first."""


class Comparison:
    """What must agree between runs of one call.

    Args:
        layout: where the samples are. run: the call. cuts: how its inputs are cut into rows.
        probes, outputs: of the runs on two and on three copies of one row.
        telling: rows that, alone with copies of themselves, have shown moves in an earlier look.
    """

    def __init__(
        self, layout: BatchLayout, run: Runs, cuts: Cuts, probes: list[Probe],
        outputs: list[Any], telling: dict[int, None],
    ) -> None:  # fmt: skip
        self.layout, self.run, self.cuts, self.telling = layout, run, cuts, telling
        self.probes, self.outputs = probes, outputs
        self.unfolded = Unfolded(outputs)
        self.sizes = Sizes(run, self.unfolded, run.rows(cuts))
        self.axes = followed(probes[0].shapes, probes[1].shapes)
        self.candidates: dict[Hashable, list[Place]] = {}
        """Where the samples may be."""
        self.moved: set[Hashable] = set()
        """Uses whose rows the model has moved."""
        self.reached: set[Hashable] = set()
        self.lengths: dict[Hashable, set[int]] = {}
        """Entries a sample of what gradients have reached."""
        self.owned: dict[Hashable, list[Tensor | None]] = {}
        """The sample of every entry of what was moved, call by call; None where no gradient reached."""
        self.several: tuple[Any, list[int]] | None = None
        """The output of a run on several rows, and which they are."""

    def hold_apart(self) -> None:
        """No row follows from another one, nor from how many there are.

        Raises:
            BatchSizeError: one does.
        """
        real = self.run.distinct(self.cuts)
        two_rows = self.run.distinct(self.cuts, 2)
        attempts = [(real, False, False), (two_rows, False, True)]  # they may have to be in order
        if len(real) < 2:  # a row made up of the first one's values, if the model can take it
            attempts = [(real, True, False), (real, False, False)]
        for number, (rows, synthetic, ordered) in enumerate(attempts, 1):
            try:
                self._compare(rows, synthetic, ordered)
                break
            except (FastclipError, Opened):
                raise
            except Exception as error:
                if no_memory(error) or number == len(attempts):
                    raise
        two, three = self.probes
        for probe in self.probes:
            check_constants(probe, self.layout.places)
        if not two.draws and not three.draws:
            pair = (self.unfolded(self.outputs[0], 2), self.unfolded(self.outputs[1], 3))
            self.sizes.compare_copies(two, three, pair)
            if self.several is not None:
                copied = rows.index(self.run.copied) if real else 0
                check_copied(pair[0], *self.several, copied, self.unfolded.axes)
        self.layout.compared = max(self.layout.compared, len(real))

    def _compare(self, real: list[int], synthetic: bool, ordered: bool) -> None:
        choice = self.run.cut(self.cuts, real or None, synthetic)
        rows, groups = spread(choice, ordered)
        self.candidates, self.owned, self.lengths = {}, {}, {}
        self.moved, self.reached = set(), set()
        if choice > 1:
            self.unfolded.find(self.run, self.probes, rows, groups, _SEEDS[0])
        for seed in _SEEDS:
            some = rows if seed == _SEEDS[0] else few(rows)
            try:
                drawn = self._influence(some, seed)
            except FastclipError:
                raise
            except Exception as error:
                if not self.run.asks_inputs or no_memory(error):
                    raise
                self.run.asks_inputs = False  # x.numpy(), or x.requires_grad = True, in its forward
                drawn = self._influence(some, seed)
            if not drawn:
                break
        self._settle()
        for seed in _SEEDS if choice > 1 else ():
            if not self._disturb(rows, groups, seed):
                break
        self._choose()
        axes = self.unfolded.owned_axes
        if choice > 1 and any(axis < 0 for axis in axes):  # only now all places are known
            settled = {n: c[0] for n, c in self.candidates.items() if len(c) == 1}
            find_mixed(self.run, rows, groups, settled, axes, self.sizes.of_rows)

    # Influence

    def _influence(self, rows: list[int], seed: int) -> bool:
        """Whose the entries of everything are; whether random numbers were drawn."""
        probe = Probe(self.layout, len(rows), differentiable=True)

        def ask(out: Any) -> None:
            count = len(rows)
            influence = Influence(self.unfolded(out, count), self.unfolded.axes, count)
            for name in self.axes.keys() | probe.shapes.keys():
                self._guess(name, probe)
            for source in probe.sources:
                if source.name not in self.candidates:
                    self.candidates[source.name] = [Place(own_axis(str(source.name), self.cuts))]
            owned: dict[Hashable, list[Tensor | None]] = {}
            for name, owner in influence.owners(probe.sources):
                owned.setdefault(name, []).append(owner)
                if owner is None:
                    continue
                self.reached.add(name)
                influence.check_unmixed(name, owner, probe.sources)
                self._narrow(name, owner, count)
            moved = self.layout.moved
            self.owned = self.owned or {n: x if n in moved else [] for n, x in owned.items()}
            uncertain = self.moved | {
                n for n, c in self.candidates.items() if len(c) > 1 and not c[0].plain
            }
            if uncertain:
                returned = places_returned(probe, influence)
                for name in route(uncertain, (probe, *self.probes), returned) & self.reached:
                    if not isinstance(name, str):
                        raise coupled(called(name))

        self.run.once(probe, rows, seed, ask)
        return probe.draws

    def _guess(self, name: Hashable, probe: Probe) -> None:
        """Where shapes alone let the samples be; nowhere if they do not grow with the batch."""
        axis = self.axes.get(name)
        two, now = self.probes[0].shapes.get(name, []), probe.shapes.get(name, [])
        if not now:  # left out by chance
            return
        if axis is None:  # met for the first time: gradients tell
            axes = list(range(len(now[0])))
            self.candidates.setdefault(name, list(places(now[0], probe.rows, axes)))
            return
        grows = axis >= 0 and len(two) == len(now) and all(
            len(a) == len(b) and a[axis] * probe.rows == b[axis] * self.probes[0].rows
            for a, b in zip(two, now, strict=True)
        )  # fmt: skip
        if not grows or name in self.layout.moved:
            self.candidates[name] = []
            self.moved.add(name)
        elif name not in self.candidates:
            self.candidates[name] = list(places(now[0], probe.rows, [axis]))

    def _narrow(self, name: Hashable, owner: Tensor, count: int) -> None:
        kept = [place for place in self.candidates[name] if agrees(place, owner, count)]
        if not kept:
            if isinstance(name, str) and name.startswith(INPUT):
                raise coupled(called(name))
            self.moved.add(name)
        self.candidates[name] = kept
        if kept:
            self.lengths.setdefault(name, set()).add(owner.shape[kept[0].axis] // count)

    def _settle(self) -> None:
        """Layers whose rows were moved run as they were from now on."""
        opened = {name for name in self.moved if isinstance(name, str)}
        if opened - self.layout.open:
            self.layout.open |= opened  # type: ignore[arg-type]
            raise Opened
        for name in self.moved:
            self.layout.places.pop(name, None)
        self.layout.places |= {n: c[0] for n, c in self.candidates.items() if len(c) == 1}

    def _folds(self, name: Hashable, place: Place) -> None:
        known = self.lengths.get(name)
        if known is None:  # no gradient says it: what shapes and values let be
            known = {shape[place.axis] // 2 for shape in self.probes[0].shapes.get(name, [])}
        lengths = self.layout.lengths(self.run.args, self.run.kwargs)
        self.layout.folds.note(name, place, known, lengths)

    # Disturbance

    def _disturb(self, rows: list[int], groups: list[frozenset[int]], seed: int) -> bool:
        """Rows are changed, to one of the others or to noise, of which the others must show nothing.

        Returns whether other random numbers may show more, where no gradient tells.
        """
        count, first = len(rows), seed == _SEEDS[0]
        base = Probe(self.layout, count)
        out = self.unfolded.once(self.run, base, rows, seed)
        drawn = base.draws
        self.several = None if drawn else (out, rows)
        extreme = extreme_rows(base, self.layout.places)[:_SMALLEST]
        small = [frozenset({row}) for row in {**self.telling, **dict.fromkeys(extreme)}]
        halves = []
        for kept in (*groups, *small):
            noisy = frozenset(range(count)) - kept if kept in groups else frozenset()
            beside = Beside(base.seen, self._settled(), count, kept, copies=kept in small)
            probe = Probe(self.layout, count, replaced=noisy, beside=beside)
            found = self.unfolded.once(self.run, probe, others_changed(rows, kept), seed)
            if kept in small and not probe.draws:  # copies of one row
                check_copies(probe, found, self.unfolded.axes, self.layout.places)
                check_copied_slopes(probe, self.layout.places)
            self._narrow_by_values(base, probe, sorted(kept))
            moved = moved_between(base, probe, sorted(kept), self.layout.where_they_stay())
            if moved:  # the same rows in other places, or other rows
                self.telling |= dict.fromkeys(kept if kept in small else ())
                self.layout.moved |= dict.fromkeys(moved)
                self.layout.open |= {name for name in moved if isinstance(name, str)}
                raise Opened
            owned = self.owned if first else {}
            with told_apart(base, probe):
                check_somewhere(self.layout.moved, base, probe, owned, kept)
                check_values(base, probe, (out, found), sorted(kept), self.unfolded.axes)
                check_slopes(base, probe, sorted(kept), self.layout.places)
            halves += [probe.without(self.reached)] * (kept in groups)
            del probe, found  # before the next run
        if not drawn:
            unknown = {n for n, c in self.candidates.items() if not c or n in self.layout.moved}
            check_in_either(unknown - self.reached, base, halves)
            self.sizes.compare(rows, base, out, seed)
            self.sizes.compare_many(rows, base, out, seed)
        elif first:
            del base, beside, halves  # which are as large as what comes
            self.several = self.sizes.compare_undrawn(rows, seed)
        return drawn and bool(self.candidates.keys() - self.reached)

    def _settled(self) -> dict[Hashable, Place]:
        """Places of what values need not tell any more: the others are held until all have run."""
        open_ = {n for n, c in self.candidates.items() if len(c) != 1} | self.layout.moved.keys()
        return {n: place for n, place in self.layout.places.items() if n not in open_}

    def _narrow_by_values(self, base: Probe, probe: Probe, kept: list[int]) -> None:
        """Where gradients could not tell, rows that were kept are the same."""
        for name, candidates in self.candidates.items():
            if len(candidates) < 2 or name not in base.seen:
                continue
            fit = [p for p in candidates if not moved_between(base, probe, kept, {name: p})]
            self.candidates[name] = fit

    def _choose(self) -> None:
        """What is left of where samples may be."""
        for name, candidates in self.candidates.items():
            known = len(candidates) == 1 or (candidates and candidates[0].plain)
            if known and name not in self.moved:
                self.layout.places[name] = candidates[0]
                self._folds(name, candidates[0])
                continue
            self.layout.places.pop(name, None)
            if isinstance(name, str) and name in self.layout.met - self.layout.open:
                self.layout.open.add(name)
                raise Opened

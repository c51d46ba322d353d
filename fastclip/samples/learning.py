"""Runs on a few rows: the first find the samples, the others hold rows against each other.

The axis of a layer's input, or of what a use of a parameter gives, that goes from 2 to 3 where the
model's input does holds the samples, alone or folded with other dimensions. What was computed from
parameters and constants alone has none. A layer whose input has no samples, or rows that the model
has moved, is opened: the uses of its parameters are followed one by one. Then gradients are asked
for (samples.influence), and rows changed (samples.independence, samples.special). That makes 12 forward
and 12 backward passes of at most 8 rows, and one forward pass of as many as the batch has; more where
functions draw random numbers, something is opened, an output is no one's, or gradients are large.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastclip.errors import BatchSizeError, FastclipError, where
from fastclip.memory import no_memory
from fastclip.samples.carried import Kept, next_batch, note_kept
from fastclip.samples.chosen import say_chosen
from fastclip.samples.comparison import Comparison
from fastclip.samples.crossed import GivenUp, crossed
from fastclip.samples.drawn import has_time_first, in_lists, tells, time_first, unclear
from fastclip.samples.foreign import described, is_foreign
from fastclip.samples.freed import give_back
from fastclip.samples.independence import UNBATCHED, Coupled, by_row, followed, rows_come_out
from fastclip.samples.inputs import Cuts, without_graph
from fastclip.samples.layout import BatchLayout
from fastclip.samples.lengths import check_lengths
from fastclip.samples.outlets import note_outlets
from fastclip.samples.place import called
from fastclip.samples.plain import note_plain
from fastclip.samples.probe_state import stirred
from fastclip.samples.probing import Misjudged, Opened, Probe, Runs
from fastclip.samples.rehearsal import rehearsed
from fastclip.samples.routers import selected, shorter
from fastclip.samples.special import check_special
from fastclip.samples.taint import Taint
from fastclip.samples.watch import Watch

_MOST_CUTS, _MOST_ROUNDS = 64, 8
_TRIALS = 8
"""Seeds under which a layer that runs by chance is looked for."""


class _Unstable(Exception):
    """Outputs are not finite once the model's parameters are stirred: `where`, they are."""

    def __init__(self, where: list[Tensor]) -> None:
        self.where = where


class _NotFound(Exception):
    """No way of cutting the inputs gives rows of output."""


def learn(
    layout: BatchLayout, run: Runs, path: Hashable | None = None, *, compare: bool = False
) -> None:
    """Note where the samples of this call are, and that its rows are apart.

    Generators, buffers, attributes and parameters are as before afterwards. Inputs that cannot be cut
    are accepted only where a layer is seen to count its samples itself (EmbeddingBag over the flat ids
    of all bags).

    Args:
        layout: what is known so far. run: the call.
        path: a layer or use that has just been reached and must be among those seen.
        compare: values must say it: a traced run does not suffice.

    Raises:
        BatchSizeError: the samples are not to be found, or the model couples them.
    """
    if run.has_none(layout.axis):  # the next call is looked at
        layout.known = False
        return
    if not layout.known:  # nothing of an earlier refusal is left
        layout.forget_all()
    try:
        if _found(layout, run, path, compare=compare):
            _note(layout, run)
            say_chosen(run.model, layout.chosen, layout.told_of)
            layout.chosen.clear()
            return
        foreign = None
    except BaseException as error:
        layout.known = False
        if not is_foreign(error):
            raise
        foreign = error
    layout.known = False
    if foreign is None:
        raise BatchSizeError(
            f"{where(called(path))}: this layer runs with this batch, but not with a few rows of it, so "
            "where its samples lie is not known; let the model use the same layers for any number of "
            "rows"
        )
    run.as_called()  # a model that fails on its own input says why itself
    if isinstance(foreign, _NotFound):
        raise _unclear(layout, run)
    raise BatchSizeError(
        "the model runs on this batch, but not where every operation on a few rows of it is followed "
        f"({described(foreign)}). Let it take any number of rows, and use torch's dense operations there"
    ) from foreign


def _found(layout: BatchLayout, run: Runs, path: Hashable | None, *, compare: bool) -> bool:
    """Note what a traced run proves, or values say; whether what is at `path` was among what has run."""
    run.check_unnested()
    if not (run.as_they_are or compare) and rehearsed(layout, run, path):
        return True
    layout.proven = False
    found = _compared(layout, run, path)
    if found:
        give_back()
    return found


def _unclear(layout: BatchLayout, run: Runs) -> BatchSizeError:
    return BatchSizeError(
        "cannot tell which axis of the model's inputs holds the samples: no way of cutting them "
        "to 2 and to 3 rows gives as many rows of output. Pass tensors with one row a sample "
        f"along axis {layout.axis} (a list of tensors: stack or pad them), and let the model "
        f"take any number of rows{run.unread}{run.last_error}"
    )


def _compared(layout: BatchLayout, run: Runs, path: Hashable | None) -> bool:
    """Note what values say; whether the layer or use at `path` was among what has run."""
    learner = _Learner(layout, run)
    for run.trial in range(_TRIALS):
        with saved_tensors_hooks(Tensor.detach, lambda x: x):  # not those of a checkpoint
            learner.look()
        layout.settle()
        layout.known = True
        if not run.copies_another() and (path is None or layout.knows(path)):
            return True
    return False


def _note(layout: BatchLayout, run: Runs) -> None:
    """What is known of the call holds for the model as it is now."""
    given = run.args, run.kwargs
    layout.known = True
    layout.watch = layout.watch or Watch(run.model, *given, layout.read, layout.axis)
    layout.tried = max(layout.tried, layout.batch_size(*given) or 0)


class _Learner:
    def __init__(self, layout: BatchLayout, run: Runs) -> None:
        self.layout, self.run = layout, run

    def look(self) -> None:
        """Once, with parameters that say something; or as they are, if the model needs that."""
        if self.run.as_they_are:
            self._look_as_they_are()
            return
        for must_be_finite in (True, False):
            try:
                with stirred(self.run.private):
                    self._learn(must_be_finite)
                    return
            except _NotFound:
                break
            except _Unstable as unstable:
                if not self._are_finite(unstable.where):
                    break
        self._learn(must_be_finite=False)

    def _look_as_they_are(self) -> None:
        """What parameters that say something have shown stays so, unless rows are seen to move."""
        layout = self.layout
        places, folds = dict(layout.places), layout.folds.copy()
        self._learn(must_be_finite=False)
        layout.places |= {name: place for name, place in places.items() if name in layout.places}
        layout.folds.put_back(folds)

    def _are_finite(self, where: list[Tensor]) -> bool:
        """Whether outputs are finite there and nowhere else, as parameters are: masked scores."""
        found = self._first_run()
        own = [] if found is None else _finite(found[2])
        same_shapes = [x.shape for x in own] == [x.shape for x in where]
        return same_shapes and all(map(torch.equal, own, where))

    def _learn(self, must_be_finite: bool) -> None:
        found = self._first_run()
        if found is None and not self.layout.flat:
            raise _NotFound
        if found is None:
            return
        cuts, probes, outputs = found
        if must_be_finite and not all(bool(x.all()) for x in _finite(outputs)):
            raise _Unstable(_finite(outputs))
        try:
            self._find(cuts, probes, outputs)
        except Exception as error:
            if isinstance(error, BatchSizeError) and self.run.in_lists(cuts):
                raise in_lists(error) from error
            if (
                self.layout.axis == 0
                and isinstance(error, Coupled)
                and has_time_first(self.run.model)
            ):
                raise time_first(error) from error
            if not self.layout.flat or no_memory(error):
                raise
            # ids of all bags in one row: not to be cut
            self.layout.forget()

    def _first_run(self) -> tuple[Cuts, list[Probe], list[Any]] | None:
        """The first way to cut the inputs with which rows go in and come out."""
        unfollowed, given_up = None, GivenUp(self.run)
        # of one row alone, what has as many entries may be anything
        known = self.layout.cuts if self.layout.tried > 1 else lambda _: None
        for cuts in self.run.ways(self.layout.axis, known, _MOST_CUTS):
            self.run.cut(cuts)
            if not self.layout.known:  # nothing of another way of cutting
                self.layout.forget()
            try:
                probes, outputs = self._both()
            except FastclipError:
                raise
            except Exception as error:  # this way does not fit the model
                if no_memory(error):
                    raise
                self.run.last_error = f" ({described(error)})"
                given_up.fails(cuts, self.run.last_error)
                continue
            axes = followed(probes[0].shapes, probes[1].shapes)
            follows = (*axes.values(), *followed(probes[0].derived, probes[1].derived).values())
            layers = any(axis != UNBATCHED for axis in follows)
            if not rows_come_out(outputs, self.layout.axis):
                given_up.note(cuts, outputs)
                continue
            if given_up.check(cuts):
                if not self.layout.known:
                    self.layout.forget()
                probes, outputs = self._both()
            if layers:
                return self._only_way(cuts, probes, outputs)
            if unfollowed is None:
                unfollowed = cuts, self.run.way
        if unfollowed is None:
            return None
        self.run.read_as(unfollowed[1], self.layout.axis)
        self.run.cut(unfollowed[0])  # all layers run on constants
        return unfollowed[0], *self._both()

    def _only_way(self, cuts: Cuts, *found: list[Any]) -> tuple[Cuts, list[Probe], list[Any]]:
        """This one; refused where a list may hold a sample in each entry, or all of them in each."""
        run, way = self.run, self.run.way
        if not run.in_lists(cuts) or self.layout.cuts(way) is not None:
            return cuts, found[0], found[1]
        likely, rows, sizes = run.drawn(), run.rows(cuts), {0}
        for others in run.ways(self.layout.axis, self.layout.cuts, _MOST_CUTS):
            size = run.rows(others)
            if run.way == way or size in sizes or (size in likely) != (rows in likely):
                continue
            sizes.add(size)
            run.cut(others)
            try:
                out = self._both()[1]
            except Exception as error:
                if no_memory(error):
                    raise
                continue
            if tells(out):
                raise unclear(rows, size)
        if not self.layout.known:
            self.layout.forget()
        run.read_as(way, self.layout.axis)
        run.cut(cuts)
        return cuts, *self._both()

    def _both(self) -> tuple[list[Probe], list[Any]]:
        """Runs on 2 and on 3 copies of the first row."""
        for _ in range(_MOST_ROUNDS):
            two, three = probes = [Probe(self.layout, rows, taint=Taint(())) for rows in (2, 3)]
            kept: list[Kept] = []
            try:
                first = self.run.once(two, [0, 0], then=partial(note_kept, self.run, two, kept))
                outputs = [without_graph(x) for x in (first, next_batch(self.run, three, kept[0]))]
                self.layout.copied |= two.shapes.keys() | two.derived.keys()
                return probes, outputs
            except Misjudged:
                continue
        raise BatchSizeError("what the model computes from its parameters alone cannot be told")

    def _find(self, cuts: Cuts, probes: list[Probe], outputs: list[Any]) -> None:
        way = self.run.way
        self.layout.cut_by(way, cuts)
        telling: dict[int, None] = {}
        for _ in range(_MOST_ROUNDS):
            while self._opened(probes):
                self.run.cut(cuts)
                probes[:], outputs[:] = self._both()
            note_plain(self.layout, probes)
            masked = any(probe.taint and probe.taint.selects for probe in probes)
            if (masked and selected(self.run, cuts)) or shorter(self.run, probes[1]):
                self.run.cut(cuts)
                probes[:], outputs[:] = self._both()
                continue
            try:
                comparison = Comparison(self.layout, self.run, cuts, probes, outputs, telling)
                comparison.hold_apart()
                check_lengths(self.run, cuts, comparison.unfolded)
                check_special(self.run, cuts, comparison.unfolded)
                break
            except Opened:
                self.run.cut(cuts)
                probes[:], outputs[:] = self._both()
        else:
            raise BatchSizeError(
                "where the samples are in the model's layers changes with every look at it; let every "
                "row of the batch be computed from itself alone"
            )
        note_outlets(self.layout, probes, outputs)
        self.layout.guards.mixed |= {n: x.dim() for n, x in crossed(outputs).items()}
        self.layout.size_told_by(way, cuts)

    def _opened(self, probes: list[Probe]) -> bool:
        """Note layers to be opened, and what turned out to be a use; whether any is new."""
        layout = self.layout
        axes = followed(probes[0].shapes, probes[1].shapes)
        opened = {
            name for name, axis in axes.items()
            if isinstance(name, str) and axis < 0 and name not in layout.open
        }  # fmt: skip
        layout.open |= opened
        follows = followed(probes[0].derived, probes[1].derived)
        uses = [key for key, axis in follows.items() if axis != UNBATCHED]
        layout.uses |= dict.fromkeys(uses, True)
        return bool(opened or uses)


def _finite(outputs: list[Any]) -> list[Tensor]:
    return [torch.isfinite(x) for output in outputs for x in by_row(output)]

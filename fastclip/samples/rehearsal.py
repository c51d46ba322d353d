"""A call on few of its rows, under a tracer: where the samples are, and that they are independent.

Where the tracer proves it, whatever the numbers are, nothing need be compared
(fastclip.samples.learning). It does not where Python reads numbers of the batch, rows are moved by their
values, something is kept, or an operation has no rule: there values decide.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Container, Hashable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip._torch import tree_leaves
from fastclip.errors import FastclipError
from fastclip.graph import Node, reached_without
from fastclip.memory import no_memory
from fastclip.samples.carried import Kept
from fastclip.samples.groups import MANY
from fastclip.samples.inputs import Cuts, flatten, rows_of
from fastclip.samples.layout import BatchLayout
from fastclip.samples.outlets import outlets_of
from fastclip.samples.place import Place, places
from fastclip.samples.probe_state import own_tensors, stirred
from fastclip.samples.probing import Misjudged, Probe, Runs
from fastclip.samples.questions import Given, have_no_effect, unmasked
from fastclip.samples.row_lists import is_list
from fastclip.samples.seeding import seed_input
from fastclip.samples.steps import is_of_one
from fastclip.samples.taint import SINGLE
from fastclip.samples.taken import MOST_ROWS
from fastclip.samples.trail import Trail
from fastclip.samples.unsaved import unsaved
from fastclip.trace import attribution as at
from fastclip.trace.law import Law
from fastclip.trace.memory import BY_VALUE, MOVED, ORDER, Shadow, key_of
from fastclip.trace.numbers import Questions
from fastclip.trace.operation import tensors_in
from fastclip.trace.tracer import Tracer, all_aside

_FEW = 2
_QUESTIONS = frozenset({"item", "is_nonzero", "equal"})
"""By which Python may ask yes or no."""


class _Unproven(Exception):
    """Values must decide."""


def rehearsed(layout: BatchLayout, run: Runs, path: Hashable | None) -> bool:
    """Note where the samples of this call are, if a traced run proves that they are independent.

    Args:
        layout: what is known so far; unchanged where the answer is no. run: the call.
        path: a layer or use that must be among those seen.
    """
    known = layout.cuts if layout.tried > 1 else lambda _: None
    cuts = next(run.ways(layout.axis, known, 1), None)
    if (
        cuts is None
        or not _is_clear(run, cuts, layout.axis)
        or not all(_is_followed(run.leaves[n]) for n, a in enumerate(cuts) if a is not None)
    ):
        return False
    try:
        with stirred(run.private, entries=False):
            found = _rehearse(layout, run, cuts)
    except (_Unproven, FastclipError, Misjudged):
        return False
    except Exception as error:  # the model does not run on these rows: more is tried
        if no_memory(error):
            raise
        return False
    if not found.is_like(layout, path):
        return False
    found.tell(layout, run, cuts)
    return True


def _is_followed(leaf: Any) -> bool:
    """Its numbers reach the model by operations alone."""
    if is_list(leaf):
        return all(isinstance(x, Tensor) and x.layout is torch.strided for x in tree_leaves(leaf))
    return isinstance(leaf, (Tensor, PackedSequence))


def _is_clear(run: Runs, cuts: Cuts, axis: int) -> bool:
    """Where lists hold the samples, as many were drawn, and no tensor in them has as many rows, or
    another number that may have been drawn.
    """
    pairs = zip(run.leaves, cuts, strict=True)
    inside = [x for leaf, a in pairs if a is not None and is_list(leaf) for x in tensors_in(leaf)]
    drawn = run.drawn() if inside else ()
    return not inside or (
        run.rows(cuts) in drawn and not any(rows_of(x, axis) in drawn for x in inside)
    )


def _rehearse(layout: BatchLayout, run: Runs, cuts: Cuts) -> _Rehearsal:
    """Runs on few rows and on more: nothing but sizes may follow how many there are.

    Raises:
        _Unproven: the tracer does not prove that samples are independent.
    """
    trial = BatchLayout(layout.axis, layout.drawn)
    trial.uses = {key: used for key, used in layout.uses.items() if used}
    many = max(_FEW + 1, min(run.rows(cuts), MANY))
    first = _once(trial, run, cuts, _FEW, {})
    if layers := {name for name in first.turns if isinstance(name, str)}:
        trial.open |= layers  # the uses of their parameters are followed one by one
        first = _once(trial, run, cuts, _FEW, {})
    once = partial(_checked, trial, run, cuts, drawn=first.drawn)
    few = once(_FEW, {}) if first.drawn else first.checked()
    # by generators that the model seeds itself: the same numbers in each call
    once = partial(once, drawn={state for state in first.drawn if state in few.drawn})
    if any(trial.uses.get(key) for key in few.derived):  # such as a loop that begins with zeros
        few = once(_FEW, {})
    for rows in sorted({_FEW + 1, many}):
        more = once(rows, {})
        more.check_beside(few)
    grown = _growing(few, more)
    if grown:
        trial.forget()
        trial.uses |= dict.fromkeys(grown, True)
        with stirred(more.derived_of):  # a row for each sample is none that is equal
            more = once(_FEW, grown)
    if more.answers:
        again = partial(once, min(many, MOST_ROWS), grown, asks=True)
        first = again(wanted={})
        if not have_no_effect(first, lambda wanted: again(wanted=wanted)):
            raise _Unproven
    return more


def _checked(*args: Any, **kwargs: Any) -> _Rehearsal:
    """A run that proves what it has seen."""
    return _once(*args, seed=1, **kwargs).checked()


def _once(
    layout: BatchLayout, run: Runs, cuts: Cuts, rows: int, grown: dict[Hashable, int], *,
    asks: bool = False, wanted: Mapping[int, bool] = MappingProxyType({}),
    drawn: Collection[int] = (), seed: int = 0,
) -> _Rehearsal:  # fmt: skip
    """One run.

    Args:
        grown: uses of nothing but parameters and the number of rows, and the axis of these.
        asks: for gradients. wanted: answers to questions of Python's, by their numbers.
        drawn: states of generators in which an earlier run has drawn. seed: of those that are known.
    """
    there = min(rows, run.rows(cuts))
    if not there:
        raise _Unproven

    def once() -> _Rehearsal:
        run.cut(cuts, list(range(there)))
        found = _Rehearsal(layout, _Followed(set(run.private), cuts, rows), grown)
        found.differentiable, found.change = asks, unmasked
        found.followed.tracer.questions.wanted = dict(wanted)
        found.followed.tracer.memory.drawn_before = drawn
        found.followed.knows(
            run.model, [x for x, a in zip(run.leaves, cuts, strict=True) if a is None]
        )
        taken = [min(i, there - 1) for i in range(rows)]
        taken = taken[::-1] if rows == _FEW + 1 else taken
        run.once(found, taken, seed, then=partial(found.note_output, run.model))
        return found

    return once() if asks else unsaved(once)


def _growing(few: _Rehearsal, more: _Rehearsal) -> dict[Hashable, int]:
    """The axis along which values of parameters and constants follow the number of rows.

    Raises:
        _Unproven: it cannot be told.
    """
    found: dict[Hashable, int] = {}
    for name, shapes in few.derived.items():
        others = more.derived.get(name, [])
        in_turns = len(shapes) * more.rows == len(others) * few.rows
        if in_turns and {*shapes} == {*others} and len({*shapes}) == 1:
            continue
        if len(shapes) != len(others):
            raise _Unproven
        axes = {_grown(a, b, few.rows, more.rows) for a, b in zip(shapes, others, strict=True)}
        if len(axes) > 1:
            raise _Unproven
        if (axis := next(iter(axes), None)) is not None:
            found[name] = axis
    return found


def _grown(one: tuple[int, ...], other: tuple[int, ...], rows: int, others: int) -> int | None:
    if len(one) != len(other):
        raise _Unproven
    changed = [axis for axis, sizes in enumerate(zip(one, other, strict=True)) if len({*sizes}) > 1]
    if not changed:
        return None
    if len(changed) > 1 or (one[changed[0]], other[changed[0]]) != (rows, others):
        raise _Unproven
    return changed[0]


class _Followed:
    """Tells of the tensors of a run what a tracer knows, in the place of fastclip.samples.taint.Taint.

    Args:
        known: the model's trained parameters. cuts: the axes of the inputs that hold samples.
    """

    undrawn: Any = None
    selects, rounding = False, SINGLE

    def __init__(self, known: Container[Tensor], cuts: Cuts, rows: int) -> None:
        self.tracer, self.trail, self.rows = Tracer(known), Trail(), rows
        self.tracer.takes_others = False
        self.told: dict = {}
        self._cuts = cuts
        self._found: dict[tuple[int, tuple[int, ...]], Place | None] = {}
        self._named: list[Any] = []

    def of(self, leaves: list[Any], cut: list[Any]) -> _Followed:
        """The same, of a run on these inputs."""
        tracer = self.tracer
        tracer.begin()
        tracer.trail = self.trail
        for leaf, axis in zip(leaves, self._cuts, strict=True):
            if axis is not None:
                seed_input(tracer, leaf, axis, self.rows)
                self._begins_with(leaf)
                if isinstance(leaf, Tensor) and leaf.dim() > 1 and not leaf.is_floating_point():
                    tracer.questions.masks.add(leaf.numel())
        return self

    def _begins_with(self, leaf: Any) -> None:
        """Of each sample's own tensors the same ones have the same name."""
        number = len(self._named)
        self._named.append(leaf)
        for entry in leaf if is_list(leaf) else [leaf]:
            for k, x in enumerate(tensors_in(entry)):
                self.trail.begins_with(x, (number, k))

    def __enter__(self) -> None:
        if not self.tracer.enter():
            raise _Unproven
        self.tracer.lines.enter_model()
        self._law = Law(self.tracer)

    def __exit__(self, *error: Any) -> None:
        self._law.end_step(())
        self.tracer.end()
        self.tracer.leave()

    def knows(self, model: nn.Module, others: Iterable[Any]) -> None:
        """What the model holds, and its inputs without samples, are constants."""
        held = (*model.parameters(), *model.buffers(), *own_tensors(model), *others)
        for x in held:
            if isinstance(x, Tensor):
                self.tracer.memory.know(x)
                self.trail.begins_with(x, key_of(x))

    def holds(self, x: Tensor) -> bool:
        """Whether `x` follows from a sample."""
        return self.shadow_of(x).held

    def shadow_of(self, x: Tensor) -> Shadow:
        """What is known of `x`."""
        with all_aside():
            return self.tracer.shadow_of(x)

    follows = holds

    def mark(self, x: Tensor) -> None:
        """`x` is what it is."""

    def place_of(self, x: Tensor) -> Place | None:
        """Where the samples are in `x`; None if not one alone is where another could be."""
        with all_aside():
            shadow = self.shadow_of(x)
            if not _is_plain(shadow):
                return None
            key = id(shadow), tuple(x.shape)
            if key not in self._found:
                assert shadow.sample is not None
                self._found[key] = _place(shadow.sample, tuple(x.shape), self.rows)
            return self._found[key]

    def sample_of(self, x: Tensor) -> int | None:
        """The sample that `x` is of alone, where others have tensors of their own."""
        with all_aside():
            shadow = self.shadow_of(x)
            alone = is_of_one(shadow) and _is_sure(shadow)
            return next(iter(shadow.samples)) if alone else None


def _is_plain(shadow: Shadow) -> bool:
    return shadow.held and shadow.whole and not shadow.mixed and _is_sure(shadow)


def _is_sure(shadow: Shadow) -> bool:
    return shadow.factor is None and not shadow.flags & (ORDER | MOVED | BY_VALUE)


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """What these were computed by."""
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    return reached_without(roots, lambda node: False)[0]


def _is_a_users(node: Node) -> bool:
    """Somebody's own function computes its gradient: a forward pass shows nothing of that."""
    made = getattr(node, "_forward_cls", None)
    if made is None:
        return False
    name = made.__module__
    return not name.startswith("fastclip.") or made not in vars(sys.modules[name]).values()


def _turns(calls: list[int | None], rows: int) -> Place | None:
    """How samples take turns in these calls, if that is certain; a call of constants is of any."""
    found = [
        place for place in places((len(calls),), rows, [0])
        if all(
            sample in (None, own)
            for sample, own in zip(
                calls, place.owners(len(calls), rows, torch.device("cpu")).tolist(), strict=True
            )
        )
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _place(found: Tensor, shape: tuple[int, ...], rows: int) -> Place | None:
    axes = [axis for axis, size in enumerate(found.shape) if size > 1]
    for place in places(shape, rows, axes):
        owners = place.owners(shape[place.axis], rows, found.device).to(found.dtype)
        owners = owners.view([-1 if axis == place.axis else 1 for axis in range(len(shape))])
        if bool(((found == owners) | (found == at.NONE)).all()):
            return place
    return None


class _Rehearsal(Probe):
    """One traced run, and what it has shown.

    Args:
        grown: uses of nothing but parameters and the number of rows, and the axis of these.
    """

    def __init__(
        self, layout: BatchLayout, followed: _Followed, grown: Mapping[Hashable, int]
    ) -> None:
        super().__init__(layout, followed.rows, natural=True, shows=False)
        self.taint = self.followed = followed  # type: ignore[assignment]
        self._grown = grown
        self.places: dict[Hashable, Place] = {}
        self._calls: dict[Hashable, list[int | None]] = {}
        """The sample of each call of a layer or use that runs on one alone; None: of constants."""
        self.entries: dict[Hashable, set[int]] = {}
        """How many a sample has, by layer or use."""
        self._constants: list[tuple[Hashable, tuple[int, ...]]] = []
        """What uses have given of constants, and has the place of what they give of samples."""
        self.derived_of: set[nn.Parameter] = set()
        """Parameters from which values were computed that are of no sample."""
        self.outlets: set[Any] = set()
        self.unproven: list[Hashable] = []
        self.given: Given | None = None
        """What it has given, if gradients were asked for."""

    @property
    def turns(self) -> dict[Hashable, Place | None]:
        """Layers and uses in which samples take turns: of which sample each call is, by its number, as
        entries of an axis are; None where that follows no order.
        """
        found = self._calls.items()
        return {
            n: _turns(calls, self.rows) for n, calls in found if any(x is not None for x in calls)
        }

    @property
    def answers(self) -> list[bool]:
        """What Python got, in the order of its yes-or-no questions."""
        return self.questions.answers

    @property
    def drawn(self) -> Collection[int]:
        """States of generators in which it has drawn."""
        return self.followed.tracer.memory.drawn_before

    @property
    def questions(self) -> Questions:
        """What Python asked."""
        return self.followed.tracer.questions

    def is_again(self, other: _Rehearsal) -> bool:
        """The other run has done the same."""
        return self.followed.trail == other.followed.trail

    def gives_the_same(self, other: _Rehearsal, question: int) -> bool:
        """Another answer to this question changes no operation; or, if it is whether all of a mask is
        true, none of the places, outputs and gradients.
        """
        if self.is_again(other):
            return True
        if not other.questions.whole[question]:
            return False
        assert self.given is not None
        assert other.given is not None
        return self.places == other.places and self.given.is_like(other.given)

    def show(self, name: Hashable, value: Tensor) -> None:
        """The input of a layer, or the output of a use."""
        super().show(name, value)
        if self.closed or self.trusted:
            return
        place = self.followed.place_of(value)
        sample = self.followed.sample_of(value) if place is None else None
        if place is None and (sample is not None or not self.followed.holds(value)):
            self._calls.setdefault(name, []).append(sample)
        if sample is not None:
            return
        if place is None and not self.followed.holds(value):
            if name not in self._grown:  # constants, in the place of samples
                self._constants.append((name, tuple(value.shape)))
                return
            place = Place(self._grown[name])
        if place is None or not place.fits(value, self.rows):
            self.unproven.append(name)
            return
        each = value.shape[place.axis] // self.rows
        known = self.places.setdefault(name, place)
        folded = known.fold(each * self.rows, self.rows)
        if not known.like(place) or folded != (place.outer, place.inner):
            self.unproven.append(name)
        self.entries.setdefault(name, set()).add(each)

    def note_output(self, model: nn.Module, output: Any) -> None:
        """What the call returns, and leaves on the model."""
        with all_aside():
            self._note_output(model, output)

    def _note_output(self, model: nn.Module, output: Any) -> None:
        leaves = [x.data if isinstance(x, PackedSequence) else x for x in flatten(output)[0]]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        axes, report = set(), self.followed.tracer.report
        nodes = _nodes(tensors) if self.rows == _FEW else ()  # the others run the same
        if report.hooked or any(map(_is_a_users, nodes)):
            self.unproven.append("a gradient that is not torch's")
        for x in tensors:
            shadow = self.followed.shadow_of(x)
            if not shadow.held and shadow.factor is None:
                continue
            place = self.followed.place_of(x)
            of_all = shadow.mixed and shadow.degree is not None and shadow.factor is None
            if place is None and (x.dim() or not of_all or report.drew):
                self.unproven.append("an output")
            axes.add(None if place is None else place.axis)
        if not axes & {0, self.layout.axis} and any(x.dim() for x in tensors):
            self.unproven.append("the output")
        if self.differentiable:
            self.given = Given(self, tensors)
        self.derived_of = set() if self.graph is None else set(self.graph.leaves)
        self.without(())
        if kept := Kept(model, self).names:
            self.unproven.append(f"what the model keeps: {kept}")
        self.outlets = outlets_of(output, self.rows)

    def checked(self) -> _Rehearsal:
        """This one: what was seen holds for all numbers.

        Raises:
            _Unproven: it does not.
        """
        turns = self.turns
        if turns.keys() & self.places.keys() or None in turns.values():
            raise _Unproven
        for name, shape in self._constants:
            if name in turns:
                continue
            place = self.places.get(name, Place(len(shape)))
            if place.axis >= len(shape) or not place.plain or shape[place.axis] != self.rows:
                raise _Unproven
        report, memory = self.followed.tracer.report, self.followed.tracer.memory
        asks = {read.what for read in report.reads} <= _QUESTIONS and self.followed.tracer.trail
        values = report.findings or report.by_value or report.probed or report.by_chance
        values = values or report.unknown
        given = () if self.given is None else self.given.outputs
        if kept := memory.alive(given):
            gc.collect()
            kept = memory.alive(given)
        drew = self.elsewhere or memory.lengths_read
        if values or not asks or kept or drew or self.unproven or self.layout.counting:
            raise _Unproven
        return self

    def check_beside(self, other: _Rehearsal) -> None:
        """A run on other rows has computed the same.

        Raises:
            _Unproven: it has not, or it cannot be told.
        """
        one, two = self.followed.trail, other.followed.trail
        same = self.places == other.places and self.turns == other.turns
        if not same or not one.agrees(two, self.rows, other.rows):
            raise _Unproven

    def is_like(self, layout: BatchLayout, path: Hashable | None) -> bool:
        """It has met this layer or use, and contradicts nothing that is known."""
        trial = self.layout
        axes = {name: place.axis for name, place in layout.places.items()}
        return (
            (path is None or trial.knows(path))
            and all(axes.get(name, place.axis) == place.axis for name, place in self.places.items())
            and not (trial.open | self.turns.keys()) & layout.places.keys()
            and not self.places.keys() & (layout.open | layout.turns)
            and not layout.moved.keys() & {*self.places, *trial.met}
        )

    def tell(self, layout: BatchLayout, run: Runs, cuts: Cuts) -> None:
        """Note it."""
        trial = self.layout
        layout.cut_by(run.way, cuts)
        lengths = layout.lengths(run.args, run.kwargs)
        for name, place in self.places.items():
            layout.places[name] = place
            layout.folds.note(name, place, self.entries[name], lengths)
        for name, calls in self.turns.items():
            assert calls is not None
            layout.turns.add(name)
            layout.folds.note(name, calls, {calls.outer * calls.inner}, lengths)
        layout.met |= trial.met
        layout.copied |= trial.met
        layout.open |= trial.open
        layout.uses |= trial.uses
        layout.users |= trial.users
        layout.chosen |= trial.chosen
        layout.proxied |= trial.proxied
        layout.guards.outlets |= self.outlets
        layout.settle()
        layout.proven, layout.asked = True, bool(self.answers)
        layout.entries |= layout.entries_of(run.args, run.kwargs)
        layout.compared = max(layout.compared, min(run.rows(cuts), MOST_ROWS))
        layout.size_told_by(run.way, cuts)

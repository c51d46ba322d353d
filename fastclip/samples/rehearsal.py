"""A call on few of its samples and on many, under a tracer: where samples are, and whether independent.

The tracer knows the batch axis of a layer's input, or of what a use of a parameter gives. A layer
without one batch axis is opened: the uses of its parameters are followed one by one, and gradients show
which sample each entry belongs to. What follows from several samples raises an error.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.core.system import no_memory
from fastclip.errors import BatchSizeError, FastclipError, UnsupportedLayerError
from fastclip.samples.agreement import Given, Kept, Matters, have_no_effect, hold_apart, unmasked
from fastclip.samples.batch_axis import BatchAxis, called
from fastclip.samples.inputs import Cuts, inside, is_list
from fastclip.samples.layout import MANY, BatchLayout
from fastclip.samples.outputs import outlets_of
from fastclip.samples.probing import (
    HOW_MANY,
    NUMBER,
    OTHERS,
    Coupled,
    Followed,
    Opened,
    Probe,
    Runs,
    Shown,
    coupled,
    unsaved,
)
from fastclip.samples.runs import Trail, growing_axes
from fastclip.samples.state import stirred
from fastclip.samples.subsets import MOST_SAMPLES
from fastclip.trace.memory import ORDER, Memory
from fastclip.trace.numbers import Questions

_FEW = 2
_MOST_ROUNDS = 8
_QUESTIONS = frozenset({"item", "is_nonzero", "equal"})
"""By which Python may ask yes or no."""


class Rehearsal:
    """Traced runs of one call.

    Args:
        layout: what is known so far; `update_layout` changes it. run: the call. cuts: its batch axes.
        whole: use as many samples as the batch has.
    """

    def __init__(self, layout: BatchLayout, run: Runs, cuts: Cuts, *, whole: bool = False) -> None:
        self._layout, self._run, self._cuts = layout, run, cuts
        self._rows, self._whole = run.rows(cuts), whole
        self._many = max(_FEW + 1, self._rows if whole else min(self._rows, MANY))
        self.trial = BatchLayout(layout.axis, layout.drawn)
        self.trial.uses = {key: used for key, used in layout.uses.items() if used}
        self.trial.open, self.trial.moved = set(layout.open), dict(layout.moved)
        self.unproven: list[str] = []
        """Reasons why values must be compared."""
        self._asked, self._lenient = False, False
        self._runs: list[_Run] = []
        self._grown: dict[Hashable, int] = {}
        """Uses that depend only on parameters and the number of samples, and their batch axes."""
        self._stirred: set[nn.Parameter] = set()
        """Parameters that they use."""
        self._drawn: Collection[int] = ()
        self._as_said: set[Hashable] = set()
        """Uses with samples that data have moved to one batch axis in every run."""
        self._astray: set[str] = set()
        """Modules that have returned samples in another order in another call."""

    def hold(self) -> None:
        """Run the call.

        Raises:
            BatchSizeError: samples are not independent, or cannot be located.
        """
        for _ in range(_MOST_ROUNDS):
            with self._changed():
                try:
                    self._runs = self._on_all_sizes()
                    break
                except Opened:
                    continue
        else:
            raise _unstable()
        self._check_outputs()
        self._check_next()
        self._route()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Give constant or tiny parameters random values inside."""
        plain = () if self._run.as_they_are else self._run.private
        with stirred(plain, entries=False), stirred(self._stirred):
            yield

    def compare(self) -> None:
        """Compare values to check that samples are independent.

        Raises:
            BatchSizeError: they are not.
        """
        for _ in range(_MOST_ROUNDS):
            mixed = self.trial.guards.mixed
            try:
                moved = hold_apart(
                    self._run, self._cuts, self._probe_unlearned, mixed, whole=self._whole
                )
            except Coupled:  # by a loss that may be returned, but not trained on
                sums = {n: dims for n, dims in self._sums() if n not in mixed}
                if not sums:
                    raise
                mixed |= sums
                continue
            moved -= self._as_said
            if moved <= self.trial.moved.keys():
                return
            self.trial.moved |= dict.fromkeys(moved)
            self.trial.open |= {name for name in moved if isinstance(name, str)}
            self.hold()
        raise _unstable()

    def _probe_unlearned(self, samples: int, **how: Any) -> Probe:
        """A probe that learns nothing about layers."""
        probe, trial = self.probe(samples, **how), self.trial
        assert probe.followed is not None
        probe.followed.keeps_trail = False
        probe.layout = BatchLayout(trial.axis, trial.drawn)
        probe.layout.open, probe.layout.uses = set(trial.open), dict(trial.uses)
        return probe

    # Runs

    def _on_all_sizes(self) -> list[_Run]:
        """Run on few samples and on more; only sizes may depend on the number of samples."""
        first = self._once(_FEW)
        try:
            self._settle(first)
        except Coupled:
            # inputs that must not be cut this way fail, or give no samples
            _check_samples([first, self._once(_FEW + 1)], {0, self._layout.axis})
            raise
        drawn: Collection[int] = first.drawn
        again = drawn or first.probe.draws
        few = self._once(_FEW, drawn=drawn, seed=1) if again else first
        # by generators that the model seeds itself: the same numbers in each call
        self._drawn = {state for state in drawn if state in few.drawn}
        found = [few]
        for samples in sorted({_FEW + 1, self._many}):
            try:
                more = self._once(samples, drawn=self._drawn, seed=1, backwards=samples == _FEW + 1)
            except (RuntimeError, ValueError) as error:  # it takes samples in their order alone
                if samples != _FEW + 1 or isinstance(error, FastclipError) or no_memory(error):
                    raise
                more = self._once(samples, drawn=self._drawn, seed=1)
            self._settle(more)
            self._settle_growing(few, more)
            found.append(more)
        self.unproven = [why for one in found for why in one.unproven()]
        self.trial.by_values |= any(one.counted or one.by_chance for one in found)
        self._settle_read(found)
        self._check_sizes(found)
        if any(
            not self.unproven or isinstance(x, float) for x in more.answers
        ):  # a fraction always
            self._ask()
        return found

    def _settle_growing(self, few: _Run, more: _Run) -> None:
        """Assign values that parameters and constants give per sample; runs begin anew."""
        grown, unclear = _growing(few, more)
        if unclear - self.trial.moved.keys():
            self.trial.moved |= dict.fromkeys(unclear)
            raise Opened
        if grown:
            self._grown |= grown
            self._stirred |= more.derived_of  # makes the values of the samples differ
            self.trial.uses |= dict.fromkeys(grown, True)
            raise Opened

    def _check_sizes(self, found: list[_Run]) -> None:
        """Check that runs that depend on sizes or chance alone are the same for any number of samples.

        Raises:
            BatchSizeError: they are not, and random numbers may hide how.
        """
        few, *others = found
        if any(one.reads_samples for one in found):
            return
        if all(one.is_beside(few, constants=not few.by_chance) for one in others):
            return
        if any(one.probe.draws for one in found) and not all(
            one.is_beside(few, constants=False) for one in others
        ):
            raise coupled("The model", None, HOW_MANY)
        self.unproven = self.unproven or ["it computes differently for more samples"]
        self._whole = True

    def _ask(self) -> None:
        """Find out whether answers to Python's questions have an effect."""
        self._asked = True
        samples = min(self._many, MOST_SAMPLES)
        again = partial(self._once, samples, drawn=self._drawn, seed=1, asks=True)
        asked = again(wanted={})
        try:
            if not have_no_effect(asked, lambda wanted: again(wanted=wanted)):
                self.unproven = self.unproven or ["questions of Python about the batch"]
        except Matters:
            raise coupled("The model", f"a number that Python reads at {asked.line}") from None

    def _settle(self, found: _Run) -> None:
        """Open layers without one batch axis, and begin runs anew. Runs also begin anew if one has taken
        a use for a derived value at first (a loop that begins with zeros)."""
        if any(self.trial.uses.get(key) for key in found.probe.derived):
            raise Opened
        moved = found.probe.moved.keys() - self.trial.moved.keys()
        self.trial.moved |= dict.fromkeys(moved)
        turning = {name for name in found.probe.turns if isinstance(name, str)}
        ordered = any(x.shadow.flags & ORDER for x in found.probe.outputs)
        if (found.probe.coupled or ordered) and not self._lenient and found.knows_samples:
            self._lenient = True
            raise Opened
        opened = {name for name in moved if isinstance(name, str)} | turning
        midway = self.trial.open & found.probe.batch_axes.keys()  # it ran as a layer before
        if midway or opened - self.trial.open:
            self.trial.open |= opened
            raise Opened
        for error in found.probe.coupled.values():
            raise error

    def _settle_read(self, found: list[_Run]) -> None:
        """If Python has read numbers of samples, these may be lengths or turns of samples. Then layers
        that are flattened, or take one sample after another, have no one batch axis."""
        if not any(one.reads for one in found):
            return
        folded = {n for one in found for n, x in one.probe.batch_axes.items() if not x.plain}
        turning = {name for one in found for name in one.probe.turns}
        for one in found:
            one.probe.moved |= dict.fromkeys(folded | turning)
        for one in found:
            self._settle(one)

    def probe(self, samples: int, memory: Memory | None = None, **how: Any) -> Probe:
        """A probe for a run on so many samples."""
        followed = Followed(
            set(self._run.private), self._cuts, samples, memory=memory,
            lenient=self._lenient, takes_others=self.by_python,
        )  # fmt: skip
        followed.knows(self._run.model, [x for x, a in self._pairs if a is None])
        probe = Probe(self.trial, followed, self._grown, **how)
        probe.by_python = self.by_python
        return probe

    @property
    def by_python(self) -> bool:
        """Whether numbers of samples come in lists or arrays, which no operation reads."""
        return any(not _is_followed(x) for x, a in self._pairs if a is not None)

    @property
    def _pairs(self) -> Iterator[tuple[Any, int | None]]:
        return zip(self._run.leaves, self._cuts, strict=True)

    def _once(
        self, samples: int, *, asks: bool = False, backwards: bool = False, drawn: Collection[int] = (),
        wanted: Mapping[int, bool | float] = MappingProxyType({}), seed: int = 0,
    ) -> _Run:  # fmt: skip
        """One run.

        Args:
            asks: compute gradients. backwards: the last sample comes first. wanted: answers to Python's
                questions, by their numbers.
            drawn: states of generators in which an earlier run has drawn.
        """
        there = max(1, min(samples, self._rows))

        def once() -> _Run:
            self._run.cut(self._cuts, list(range(there)))
            probe = self.probe(samples, compares=asks, change=unmasked if asks else None)
            assert probe.followed is not None
            probe.followed.tracer.questions.wanted = dict(wanted)
            probe.followed.tracer.memory.drawn_before = drawn
            found = _Run(probe)
            taken = [min(i, there - 1) for i in range(samples)]
            taken = taken[::-1] if backwards else taken
            self._run.once(probe, taken, seed, partial(found.returns, self._run.model))
            return found

        return once() if asks else unsaved(once)

    # What they have shown

    def _check_outputs(self) -> None:
        """Check that samples come out, and note outputs that couple them.

        Raises:
            BatchSizeError: a sample of the output depends on several samples.
        """
        own, more = {0, self._layout.axis}, self._runs[-1]
        _check_samples(self._runs, own)
        guards = self.trial.guards
        for other, samples in _axes_of_rows(self._runs[0], more):
            x, shadow = other.value, other.shadow
            if other.batch_axis is not None or (other.of_all and not x.dim()):
                continue
            if shadow.mixed or shadow.factor is not None or shadow.flags & ORDER:
                if len(samples) == 1 and own & {*samples} and len(self._runs) > 1:
                    by_number = not shadow.mixed and shadow.factor is None
                    raise coupled("The output", more.cause(x), NUMBER if by_number else OTHERS)
                guards.mixed[int(str(other.name))] = x.dim()

    def _check_next(self) -> None:
        """Check that what a batch has left does not affect the next one, as large or larger.

        Raises:
            UnsupportedLayerError: an output or a layer's input of the next batch depends on it.
        """
        for one, left in ((x, x.left) for x in self._runs if x.left is not None):
            if left.sparse:
                raise UnsupportedLayerError(
                    f"Attributes {left.sparse} keep sparse tensors of a batch, which cannot be followed "
                    "into the next one. Compute them in every forward pass.", doc="carried-state",
                )  # fmt: skip
            for samples in (one.probe.rows, one.probe.rows + 1):
                there = [max(0, min(i, self._rows - 1)) for i in range(samples)][::-1]
                self._run.cut(self._cuts, sorted({*there}))
                probe = self.probe(samples, one.memory)
                with suppress(RuntimeError, ValueError):  # a state of as many samples
                    self._run.once(probe, there, 2, probe.close, left=left)
                if met := self._carried(one.probe, probe):
                    what = f"Attributes {left.names} keep" if left.names else "The model keeps"
                    raise UnsupportedLayerError(
                        f"{what} values of one batch, which get no noise, and {met} of the next batch "
                        "depends on them. Compute them in every forward pass.", doc="carried-state",
                    )  # fmt: skip

    @staticmethod
    def _carried(first: Probe, after: Probe) -> str:
        """Name what of a batch depends on the one before."""
        names = [*after.unseen, *after.coupled]
        before = {out.name for out in first.outputs if out.shadow.mixed}
        outputs = any(out.shadow.mixed and out.name not in before for out in after.outputs)
        return called(names[0]) if names else "an output" * outputs

    def _route(self) -> None:
        """Find, for uses with moved samples, the innermost modules that return them in their order.

        Raises:
            BatchSizeError: there is none.
        """
        trial, returned = self.trial, [one.probe.returned for one in self._runs]
        sure: dict[str, dict[int, BatchAxis]] = {}
        for path, held in returned[-1].items():
            if held and all(all((r.get(path) or {0: None}).values()) for r in returned):
                found = {n: batch_axis for n, batch_axis in held.items() if batch_axis is not None}
                known = self._layout.returns.get(path, {})
                if path in self._layout.astray or not all(
                    known[n].like(batch_axis) for n, batch_axis in found.items() if n in known
                ):
                    self._astray.add(path)
                    continue
                sure[path] = found
        for name in list(trial.moved):
            if isinstance(name, str):
                continue
            made_in = dict.fromkeys(u for one in self._runs for u in one.probe.users.get(name, ()))
            for users in made_in:
                around = next((path for path in reversed(users) if path in sure), None)
                if around is None and self._lies_as_said(name):
                    break
                if around is None:
                    raise BatchSizeError(
                        f"{called(name)}: the samples have no fixed batch axis there, and no module "
                        "around it returns them in their order. Restore the order inside the module "
                        "that moves them."
                    )
                trial.routers.setdefault(name, set()).add(around)
                trial.returns[around] = sure[around]

    def _lies_as_said(self, name: Hashable) -> bool:
        """Whether data have moved samples to one axis in every run; then each step is traced."""
        found = [one.probe.loose[name] for one in self._runs if name in one.probe.loose]
        first = found[0] if found else None
        if first is None or not all(x is not None and first.like(x) for x in found):
            return False
        del self.trial.moved[name]
        for one in self._runs:
            if (batch_axis := one.probe.loose.get(name)) is not None:
                one.probe.batch_axes[name] = batch_axis
                one.probe.entries[name] = {batch_axis.outer * batch_axis.inner}
        self.trial.by_values = True
        self._as_said.add(name)
        return True

    def meets(self, path: Hashable | None) -> bool:
        """Whether this layer or use was met."""
        return path is None or path in self.trial.met

    def update_layout(self) -> None:
        """Add the results to the layout."""
        layout, trial, run = self._layout, self.trial, self._run
        layout.cut_by(run.way, self._cuts)
        lengths = layout.lengths(run.args, run.kwargs)
        gone = trial.moved.keys() | trial.open
        for one in self._runs:
            for name, batch_axis in one.probe.batch_axes.items():
                if name in gone:
                    layout.batch_axes.pop(name, None)
                    continue
                layout.batch_axes[name] = batch_axis
                layout.folds.note(name, batch_axis, one.probe.entries[name], lengths)
            for name, calls in one.probe.turns.items():
                if calls is not None and name not in trial.moved:
                    layout.turns.add(name)
                    layout.folds.note(name, calls, {calls.outer * calls.inner}, lengths)
            layout.guards.outlets |= one.outlets
        pairs: tuple[tuple[set[Any], set[Any]], ...] = (
            (layout.met, trial.met), (layout.open, trial.open), (layout.users, trial.users),
            (layout.proxied, trial.proxied), (layout.counting, trial.counting),
        )  # fmt: skip
        for known, new in pairs:
            known |= new
        layout.uses |= trial.uses
        layout.moved |= trial.moved
        layout.chosen |= trial.chosen
        layout.lost(self._astray)
        layout.returns |= trial.returns
        for name, paths in trial.routers.items():
            layout.routers.setdefault(name, set()).update(paths)
        layout.guards.mixed |= trial.guards.mixed
        if self.unproven:
            plain = {
                int(str(x.name)): -1 if x.batch_axis is None else x.batch_axis.axis
                for x in self._outputs()
            }
            layout.guards.spreading |= plain
        layout.settle()
        layout.by_values |= trial.by_values
        layout.by_chance |= any(one.by_chance for one in self._runs)
        layout.lenient |= self._lenient
        layout.proven, layout.asked = not self.unproven, self._asked
        layout.entries |= layout.entries_of(run.args, run.kwargs)
        layout.compared = max(layout.compared, min(self._rows, MOST_SAMPLES))
        layout.size_shown_by(run.way, self._cuts)

    def _sums(self) -> Iterator[tuple[int, int]]:
        """Outputs that are sums over samples, and their dimensions."""
        outputs = (x for x in self._runs[-1].probe.outputs if x.of_all and x.edge is not None)
        return ((int(str(x.name)), x.value.dim()) for x in outputs)

    def _outputs(self) -> Iterator[Any]:
        yield from (x for x in self._runs[-1].probe.outputs if not x.shadow.mixed)


def _is_followed(leaf: Any) -> bool:
    """Whether its numbers reach the model through operations only."""
    if is_list(leaf):
        held = [x for entry in leaf for x in inside(entry)]
        return all(isinstance(x, Tensor) and x.layout is torch.strided for x in held)
    return isinstance(leaf, (Tensor, PackedSequence))


def _unstable() -> BatchSizeError:
    return BatchSizeError(
        "The batch axes of the model's layers change with every trace. Compute each sample of the "
        "batch independently of the others.",
        doc="coupled-samples",
    )


class NoSamples(Exception):
    """The inputs, cut this way, give no samples of output; the argument says where samples mixed."""


def _axes_of_rows(few: _Run, more: _Run) -> Iterator[tuple[Shown, list[int]]]:
    """The outputs, each with its axes that are longer for more samples."""
    shapes = {x.name: x.value.shape for x in few.probe.outputs}
    for out in more.probe.outputs:
        shape = shapes.get(out.name, ())  # few samples may not give it
        yield out, growing_axes(shape, out.value.shape, few.probe.rows, more.probe.rows)


def _check_samples(runs: list[_Run], own: set[int]) -> None:
    """Check that samples come out, unless the output is a number.

    Args:
        own: possible batch axes.

    Raises:
        NoSamples: they do not.
    """
    if len(runs) < 2:
        return
    few, more = runs[0], runs[-1]
    found = set[int]()
    for out, axes in _axes_of_rows(few, more):
        shadow = out.shadow
        if out.batch_axis is None and not (shadow.mixed or shadow.flags & ORDER):
            return  # data select the samples
        found.update(axes)
    shapes = more.probe.constant_outputs
    for one, other in zip(few.probe.constant_outputs, shapes, strict=False):
        found.update(growing_axes(one, other, few.probe.rows, more.probe.rows))
    dims = any(out.value.dim() for out in more.probe.outputs) or any(shapes)
    if dims and not found & own:
        met = (more.cause(out.value) for out in more.probe.outputs if out.shadow.mixed)
        raise NoSamples(next(met, ""))


class _Run:
    """One traced run, and its results."""

    def __init__(self, probe: Probe) -> None:
        assert probe.followed is not None
        self.probe, self._tracer = probe, probe.followed.tracer
        self.trail: Trail = probe.followed.trail
        self.derived_of: set[nn.Parameter] = set()
        """Parameters of values that depend on no sample."""
        self.outlets: set[Any] = set()
        self.given: Given | None = None
        """Outputs and gradients, if gradients were asked for."""
        self.left: Kept | None = None
        """What it has left of its batch, if anything."""

    def returns(self, model: nn.Module, output: Any) -> None:
        """Note the output of the call."""
        probe = self.probe
        tensors = probe.returns(output)
        if probe.compares:  # it leaves the same as the run without gradients
            self.given, probe.graph = Given(probe.shown, tensors), None
            return
        self.derived_of = set() if probe.graph is None else set(probe.graph.leaves)
        kept = Kept(model, probe)
        self.outlets = outlets_of(output, probe.rows)
        probe.graph = None
        self.left = kept if kept.names or kept.sparse or self._is_held(tensors) else None

    def _is_held(self, given: Collection[Tensor]) -> bool:
        """Whether something of the batch is still held, except the output."""
        for generation in range(3):  # what a run has made is young; all of a heap takes long
            if not self.memory.alive(given):
                return False
            gc.collect(generation)
        return bool(self.memory.alive(given))

    @property
    def by_chance(self) -> bool:
        """Whether Python has drawn random numbers, or has read some."""
        return self.probe.elsewhere or any(r.of == "chance" for r in self._tracer.report.reads)

    @property
    def reads_samples(self) -> bool:
        """Whether Python may know numbers of samples, or their lengths."""
        known = any(read.of != "chance" for read in self._tracer.report.reads)
        return known or self.probe.by_python or self._tracer.memory.lengths_read

    @property
    def counted(self) -> bool:
        """Whether the result holds only for as many entries per sample as this batch has selected."""
        return self._tracer.report.counted

    @property
    def knows_samples(self) -> bool:
        """Whether Python may know numbers of samples, or has drawn some for them."""
        return self.reads_samples or self.by_chance

    @property
    def memory(self) -> Memory:
        """What its tracer knows about tensors."""
        return self._tracer.memory

    def cause(self, x: Tensor) -> object | None:
        return self.memory.cause(x)

    @property
    def answers(self) -> list[bool | float]:
        """The answers that Python got, in the order of its questions."""
        return self.questions.answers

    @property
    def drawn(self) -> Collection[int]:
        """States of generators in which random numbers were drawn."""
        return self._tracer.memory.drawn_before

    @property
    def questions(self) -> Questions:
        """Python's questions."""
        return self._tracer.questions

    def is_again(self, other: _Run) -> bool:
        """Whether the other run has done the same."""
        return self.trail == other.trail

    def gives_the_same(self, other: _Run, question: int) -> bool:
        """Whether another answer to this question changes no operation. If the question is whether all
        of a mask is true or no sample is an edge sample, whether it changes no batch axis, output and
        gradient on a proven path."""
        if self.is_again(other):
            return True
        if not other.questions.whole[question]:
            return False
        assert self.given is not None
        assert other.given is not None
        same = self.probe.shape == other.probe.shape and not self.unproven()
        return same and self.given.is_like(other.given)

    @property
    def line(self) -> str:
        """The line where Python has read the first number of several samples."""
        return next(r.line for r in self._tracer.report.reads if r.of == "several samples")

    @property
    def reads(self) -> list[str]:
        """Lines where Python has read numbers, except for questions."""
        reads = self._tracer.report.reads
        found = [f"{read.what} at {read.line}" for read in reads if read.what not in _QUESTIONS]
        return found or ([] if self._tracer.trail else ["numbers that Python reads"])

    def unproven(self) -> list[str]:
        """Reasons why the run is no proof."""
        report, probe = self._tracer.report, self.probe
        found = {
            "properties of these values": probe.by_value or report.by_value or report.probed,
            "random order": report.by_chance or (report.chance_of_all and self.reads_samples),
            "constants of unknown origin": report.unknown,
            "random numbers of other libraries": probe.elsewhere,
            "lengths of samples": self._tracer.memory.lengths_read,
            "gradients computed outside torch": probe.foreign_gradients,
            "numbers in lists": probe.by_python,
        }
        return [*self.reads, *(why for why, is_so in found.items() if is_so)]

    def is_beside(self, few: _Run, *, constants: bool = True) -> bool:
        """Whether a run on other samples has computed the same.

        Args:
            constants: compare the numbers of constants, too.
        """
        one, two = self.probe, few.probe
        same = one.batch_axes == two.batch_axes and one.turns == two.turns
        return same and self.trail.agrees(few.trail, one.rows, two.rows, constants=constants)


def _growing(few: _Run, more: _Run) -> tuple[dict[Hashable, int], set[Hashable]]:
    """The axis along which values of parameters and constants grow with the number of samples; and the
    uses of constants for which it is unknown.

    Raises:
        BatchSizeError: it is unknown for a value of parameters.
    """
    found: dict[Hashable, int] = {}
    unclear: set[Hashable] = set()
    samples, others_samples = few.probe.rows, more.probe.rows
    placed = few.probe.batch_axes.keys() | few.probe.turns.keys()
    constants = {n: x for n, x in few.probe.constants.items() if n not in placed}
    for name, shapes in (*few.probe.derived.items(), *constants.items()):
        others = more.probe.derived.get(name) or more.probe.constants.get(name, [])
        in_turns = len(shapes) * others_samples == len(others) * samples
        if in_turns and {*shapes} == {*others} and len({*shapes}) == 1:
            continue
        try:
            axes = {
                _grown(name, a, b, samples, others_samples)
                for a, b in zip(shapes, others, strict=False)
            }
            if len(axes) > 1:
                raise coupled(called(name))
        except BatchSizeError:
            if name not in constants:
                raise
            unclear.add(name)
            continue
        if (axis := next(iter(axes), None)) is not None:
            found[name] = axis
    return found, unclear


def _grown(
    name: Hashable, one: tuple[int, ...], other: tuple[int, ...], samples: int, others: int
) -> int | None:
    pairs = list(zip(one, other, strict=False))
    changed = [axis for axis, sizes in enumerate(pairs) if len({*sizes}) > 1]
    if not changed and len(one) == len(other):
        return None
    if len(one) != len(other) or len(changed) != 1:
        raise coupled(called(name), None, HOW_MANY)
    mine, theirs = pairs[changed[0]]
    if mine * others != theirs * samples:
        raise coupled(called(name), None, HOW_MANY)
    return changed[0]

"""Runs of a model on a few rows of its inputs, whose values say what becomes of its samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastclip._torch import tree_unflatten
from fastclip.errors import UnsupportedLayerError, where
from fastclip.samples.beside import Beside
from fastclip.samples.elsewhere import drawn_by, evenly
from fastclip.samples.ignored import Told, labels
from fastclip.samples.inputs import INPUT, NESTED, take_rows, tensors_of
from fastclip.samples.place import Place, called
from fastclip.samples.probe_state import generators_of, tables_of, undisturbed
from fastclip.samples.randomness import OF_TORCH
from fastclip.samples.seen import Seen
from fastclip.samples.selected import MASKS, Fewer, Shorter, fillers, holds_ids, shortened
from fastclip.samples.taint import SINGLE, Taint
from fastclip.samples.taken import TakenRows
from fastclip.samples.ties import Ties
from fastclip.samples.undrawn import Even
from fastclip.waiting import Work

if TYPE_CHECKING:
    from fastclip.samples.layout import BatchLayout

_NOISE = 3.0
_LOOKING = Work("looks at the model")
Shapes = dict[Hashable, list[tuple[int, ...]]]


class Opened(Exception):
    """Layers were found that must run as they were: what they do is looked at anew."""


class Misjudged(Opened):
    """Something was taken for a value of parameters alone, and is known to be a use now."""


@dataclass
class Output:
    """A tensor that layers or uses returned in a run: gradients of it may be asked for."""

    name: Hashable
    edge: GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Probe:
    """One run of the model on a few rows: layers show it their inputs, and run as they were."""

    layout: BatchLayout
    rows: int
    replaced: frozenset[int] = frozenset()
    """In these rows the first layer gives noise: numbers unlike those that other rows hold."""
    differentiable: bool = False
    taint: Taint | None = None
    """Tells which tensors hold numbers of the batch, in the first runs."""
    shortened: frozenset[int] = frozenset()
    """These rows say that they are shorter."""
    filler: Shorter = MASKS  # how they say so
    fewer: bool = False  # masks select one entry less
    change: Callable[[Any, int, int], Any] | None = None
    """What is done to the rows of every input, along its axis; its number comes last."""
    natural: bool = False  # as in a step: nothing is evened out
    shows: bool = True  # what layers and uses show is kept
    beside: Beside | None = None  # or held against an earlier run at once
    shapes: Shapes = field(default_factory=dict)
    """Of the inputs of layers and the outputs of uses, in the order of the calls."""
    seen: Seen = field(default_factory=Seen)
    """The same tensors."""
    derived: Shapes = field(default_factory=dict)
    """Of what was computed from parameters and constants alone."""
    first: tuple[Place, Tensor] | None = None
    """The output of the first layer that was reached, and where its samples are."""
    sources: list[Output] = field(default_factory=list)
    """What gradients are asked for."""
    returned: list[Output] = field(default_factory=list)
    """What modules returned; their names are (path, number)."""
    came_out: Shapes = field(default_factory=dict)
    """Of the same, by the modules' paths."""
    inside: list[str] = field(default_factory=list)  # paths of the modules that run at the moment
    constants: set[Hashable] = field(default_factory=set)
    """Uses of nothing but parameters and the number of rows."""
    closed: bool = False  # the run is over: a backward pass may compute parts of it again
    users: dict[Hashable, dict[tuple[str, ...], None]] = field(default_factory=dict)
    """The modules inside which a use was made, wherever that was."""
    graph: Any = None  # of the values derived in this run
    trusted: bool = False  # inside a layer that is known to keep account of its rows
    draws: bool = False
    """Random numbers were drawn, in the forward pass or in the gradients that were asked for."""
    elsewhere: bool = False  # from other generators than torch's own
    stand: dict[str, Any] = field(default_factory=dict)  # of the generators, afterwards
    slopes: list[tuple[Hashable, Tensor | None]] | None = None
    """Gradients of the sources, if they are asked for: fastclip.samples.slopes."""
    rounding: float = SINGLE
    """Of the coarsest type in which the batch is computed, as the last run with a taint has told."""

    def reaches(self, values: Iterable[Any]) -> bool:
        """Whether one of these may hold numbers of the batch."""
        taint = self.taint
        return taint is None or any(isinstance(x, Tensor) and taint.holds(x) for x in values)

    def without(self, names: Collection[Hashable]) -> Probe:
        """This one, with nothing kept of these any more: its graph and their values are freed."""
        self.seen.drop(names)
        self.sources, self.returned, self.slopes = [], [], None
        self.first = self.graph = None
        return self

    def noisy(self, place: Place, value: Tensor) -> Tensor:
        """The first layer's output, with what stands in the replaced rows."""
        if not self.replaced or self.trusted or not value.is_floating_point():
            return value
        if not place.plain or not place.fits(value, self.rows):
            return value
        value = value.clone()
        generator = torch.Generator().manual_seed(0)
        for i in self.replaced:
            row = value.select(place.axis, i)
            noise = torch.randn(row.shape, generator=generator, dtype=torch.float32, device="cpu")
            row.copy_(_NOISE * noise)
        return value

    def source(self, name: Hashable, value: Any) -> None:
        """Gradients of `value` will be asked for."""
        if self.trusted or self.closed or not (self.differentiable or self.slopes is not None):
            return
        if isinstance(value, Tensor) and value.requires_grad:
            edge = get_gradient_edge(value)
            self.sources.append(Output(name, edge, tuple(value.shape), value.dtype))

    def show(self, name: Hashable, value: Tensor) -> None:
        """The input of a layer, or the output of a use."""
        if self.closed:
            return
        if value.is_nested and value.layout == torch.strided:  # it has no shape
            raise UnsupportedLayerError(f"{where(called(name))}: {NESTED}")
        self.shapes.setdefault(name, []).append(tuple(value.shape))
        kept = self.shows and not self.trusted and not self.differentiable
        if kept and not (self.beside and self.beside.show(name, value)):
            self.seen.note(name, value)

    def leaves(self, path: str, output: Any) -> None:
        """A module returned this."""
        if not self.closed:
            self.came_out.setdefault(path, []).extend(tuple(x.shape) for x in tensors_of(output))
        if self.differentiable and not self.trusted and not self.closed:
            for number, value in enumerate(tensors_of(output)):
                if type(value) is Tensor and value.requires_grad:
                    edge = get_gradient_edge(value)
                    shape, name = tuple(value.shape), (path, number)
                    self.returned.append(Output(name, edge, shape, value.dtype))


class Runs(TakenRows):
    """Runs of one call of the model (or of one of its methods) on a few of its rows.

    Args:
        layout: what is being learnt. model: whose state is put back after every run.
        forward: what is run. args, kwargs: of the real call.
        private: the trained parameters. watch: tells the model's layers which probe runs, and lets
            parameters notice their uses if it is to.
    """

    def __init__(
        self, layout: BatchLayout, model: nn.Module, forward: Callable[..., Any], args: tuple,
        kwargs: dict, private: Iterable[nn.Parameter],
        watch: Callable[[Probe, bool], AbstractContextManager],
    ) -> None:  # fmt: skip
        super().__init__(args, kwargs, layout.drawn)
        self.layout, self.model, self.forward = layout, model, forward
        self.private, self._watch = private, watch
        self.last_error = ""
        self.passes = 0
        """Forward passes so far."""
        self.trial = 0
        """Which seeds are used."""
        self.as_they_are = False
        """Parameters are not stirred."""
        self.asks_inputs = True
        """Gradients of the inputs are asked for, too; a few models cannot run on such inputs."""
        self._rounding = SINGLE
        self._told: Told = {}

    def copies_another(self) -> bool:
        """Let another row be run in copies, if there are uses to which other rows alone have come.

        Returns:
            False where there are none, or enough rows were copied: they have been looked for.
        """
        beside = [name for name in self.layout.met if self.layout.beside(name)]
        if not beside:
            return False
        if self.takes_another():
            return True
        self.layout.copied.update(beside)
        return False

    def fillers(self, *, counted: bool = False) -> list[Shorter]:
        """How a row may say that it is shorter; `counted`: by labels that are left out, too."""
        held = any(map(holds_ids, self._pool))
        ids = fillers(table for _, table in tables_of(self.model)) if held else []
        shorter = [MASKS, *ids] if self.counted else []
        cut = [None if a is None else x for x, a in zip(self._pool, self._cuts, strict=True)]
        return [*shorter, *(labels(cut, self._told) if counted else ())]

    def once(
        self, probe: Probe, rows: list[int], seed: int = 0,
        then: Callable[[Any], None] | None = None, left: AbstractContextManager[Any] | None = None,
    ) -> Any:  # fmt: skip
        """The output on these rows of those that `cut` took.

        Args:
            then: is called with it while the probe still runs: a backward pass may compute parts of
                the model again. left: what an earlier run has left on the modules.
        """
        leaves, cut = [], []
        for number, (leaf, axis) in enumerate(zip(self._pool, self._cuts, strict=True)):
            if axis is None:
                leaves.append(leaf)
                continue
            few = take_rows(leaf, axis, rows)
            if probe.shortened:
                few = shortened(few, number, axis, probe.shortened, probe.filler)
            if probe.change is not None:
                few = probe.change(few, axis, number)
            numbers = isinstance(few, Tensor) and few.is_floating_point()
            if probe.differentiable and self.asks_inputs and numbers:
                few = few.detach().clone().requires_grad_()
                probe.source(f"{INPUT}{number}", few)
                few = few.clone()  # which the model may change in place
            leaves.append(few)
            cut.append(few)
        if probe.taint is not None:
            probe.taint = probe.taint.of(leaves, cut)
        probe.seen = Seen(len(rows) if len(set(rows)) == 1 < len(rows) else 0)
        return self._run(probe, leaves, seed, then, left)

    def as_called(self) -> None:
        """Run the call on all its rows as it is, only to see whether it fails by itself."""
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        probe = Probe(self.layout, 0, trusted=True)
        alone = undisturbed(self.model, 0, followed=False)
        with self._watch(probe, False), alone, torch.enable_grad():
            self.forward(*args, **kwargs)

    def _run(
        self, probe: Probe, leaves: list[Any], seed: int,
        then: Callable[[Any], None] | None = None, left: AbstractContextManager[Any] | None = None,
    ) -> Any:  # fmt: skip
        self.passes += 1
        args, kwargs = tree_unflatten(leaves, self._structure)
        graph = torch.enable_grad()  # without, parameters would take it for a look: it is not kept
        alone = undisturbed(self.model, seed + 1000 * self.trial)
        with _LOOKING.bit(), self._watch(probe, True), alone as writes, graph:
            generators = generators_of(self.model)
            before = generators.states()
            with ExitStack() as stack:
                plain = probe.trusted or probe.natural
                if not plain:
                    draw = evenly if probe.taint is None else probe.taint.undrawn.elsewhere
                    tables = [table for _, table in tables_of(self.model)]
                    stack.enter_context(drawn_by(draw, tables))
                ties = None if plain else Ties()
                even = None if plain else Even()
                for mode in (even, left, probe.taint, ties, Fewer() if probe.fewer else None):
                    if mode is not None:
                        stack.enter_context(mode)
                out = self.forward(*args, **kwargs)
                if probe.taint is not None:
                    self._rounding = probe.taint.rounding
                    self._told |= probe.taint.told
                    writes.check(probe.taint.holds)
                probe.rounding, probe.closed = self._rounding, True
                probe.seen.close()
                if then is not None:
                    then(out)
                probe.stand = generators.states()
                probe.draws = probe.stand != before
                others = before.keys() - {"torch", OF_TORCH}
                probe.elsewhere = any(probe.stand[x] != before[x] for x in others)
            return out

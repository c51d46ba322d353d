"""Runs of a call on few of its samples, under a tracer: the inputs of layers and uses, and the sample
that each entry belongs to."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence

from fastclip.core.autograd import Node, reached_without
from fastclip.core.system import Work, no_memory
from fastclip.core.torch_names import tree_unflatten
from fastclip.errors import BatchSizeError, FastclipError, UnsupportedLayerError, where
from fastclip.samples.batch_axis import BatchAxis, batch_axes, called
from fastclip.samples.inputs import NESTED, Cuts, flatten, inside, is_list, take_samples, tensors_of
from fastclip.samples.randomness import OF_TORCH, drawn_by, draws_alike, evenly
from fastclip.samples.runs import Trail, is_of_one
from fastclip.samples.seeding import seed_input
from fastclip.samples.state import generators_of, own_tensors, tables_of, undisturbed
from fastclip.samples.subsets import TakenSamples
from fastclip.trace import attribution as at
from fastclip.trace.findings import line_of
from fastclip.trace.law import Law
from fastclip.trace.memory import BY_VALUE, MOVED, ORDER, Memory, Shadow, key_of
from fastclip.trace.tracer import Tracer, all_aside

if TYPE_CHECKING:
    from fastclip.samples.layout import BatchLayout


# -------------------------------------------------------------------------------------------------
# Runs that need only values: autograd records the operations, but saves no tensors.
#
# Grad mode is unchanged, because a model may read it. If a model computes gradients itself, it gets an
# error and runs once more with saved tensors. So does a model that fails, because transforms of
# torch.func do not run if nothing is saved.


class _Unsaved(Exception):
    """A saved tensor was read, but none is saved."""


class _Nothing:
    """Keeps no tensor that autograd would save.

    `asked` says whether one was read, because a model may catch the error.
    """

    def __init__(self) -> None:
        self.asked = False

    def pack(self, x: Tensor) -> None:
        pass

    def unpack(self, nothing: None) -> Tensor:
        self.asked = True
        raise _Unsaved("no gradients here: nothing was saved for them")


def unsaved(run: Callable[[], Any]) -> Any:
    """The result of `run`; it runs once more with saved tensors if it fails or reads one."""
    nothing = _Nothing()
    with suppress(Exception), saved_tensors_hooks(nothing.pack, nothing.unpack):
        out = run()
        if not nothing.asked:
            return out
        del out
    return run()


# -------------------------------------------------------------------------------------------------
# The error for a model with samples that are not independent.


class Coupled(BatchSizeError):
    """The result of one sample depends on other samples."""

    doc = "coupled-samples"
    of = ""
    """What it depends on."""


OTHERS, HOW_MANY, NUMBER = "another sample", "the number of samples", "its position in the batch"
"""What one sample must not depend on."""


def coupled(where: str, cause: object = None, of: str = OTHERS, *, of_all: bool = False) -> Coupled:
    """The error.

    Args:
        where: the layer, use or output. cause: the operation that mixed samples, and its line, if known.
        of: what the result depends on. of_all: it got one number of all samples.
    """
    fix = "Compute each sample of the batch independently of the others"
    if of_all:
        fix += ", for example before a mean of losses"
    if str(cause).startswith("_unique"):  # E(ids.unique())[inverse]
        fix = "Look up the ids directly, not ids.unique() of the batch"
    by = f" ({cause})" if cause is not None else ""
    error = Coupled(
        f"{where}: the result of one sample depends on {of}{by}, so no per-sample gradient exists. "
        f"{fix}."
    )
    error.of = of
    return error


# -------------------------------------------------------------------------------------------------


_LOOKING = Work("looks at the model")
Shapes = dict[Hashable, list[tuple[int, ...]]]


class Opened(Exception):
    """A value does not depend on parameters alone, or a layer's samples move, unlike assumed."""


class NotFollowed(Exception):
    """No tracer can follow this run."""


class Followed:
    """What a tracer knows about the tensors of one run.

    Args:
        known: the model's trained parameters. cuts: the batch axes of the inputs.
        samples: their number. memory: of the batch before, which must not be read.
        takes_others: tensors as long as the batch that no operation has made hold the samples.
        lenient: constants that Python makes may differ from sample to sample.
    """

    def __init__(
        self, known: Container[Tensor], cuts: Cuts, samples: int, *, memory: Memory | None = None,
        lenient: bool = False, takes_others: bool = False,
    ) -> None:  # fmt: skip
        self.tracer, self.trail, self.rows = Tracer(known, memory=memory), Trail(), samples
        self.tracer.takes_others, self.tracer.lenient = takes_others, lenient
        self.keeps_trail = True
        """Record the operations, to compare runs."""
        self._cuts = cuts
        self._found: dict[tuple[int, tuple[int, ...]], BatchAxis | None] = {}
        self._named = 0
        self._sparse: list[Tensor] = []

    def begins_on(self, leaves: list[Any]) -> None:
        """Begin the run on these inputs."""
        tracer = self.tracer
        tracer.begin()
        tracer.trail = self.trail if self.keeps_trail else None
        for leaf, axis in zip(leaves, self._cuts, strict=True):
            if axis is not None:
                seed_input(tracer, leaf, axis, self.rows)
                self._begins_with(leaf)
                if isinstance(leaf, Tensor) and leaf.dim() > 1 and not leaf.is_floating_point():
                    tracer.questions.masks.add(leaf.numel())

    def _begins_with(self, leaf: Any) -> None:
        """Name the tensors of each sample, equally for all samples."""
        self._named += 1
        for entry in leaf if is_list(leaf) else [leaf]:
            for k, x in enumerate(y for y in inside(entry) if isinstance(y, Tensor)):
                self.trail.begins_with(x, (self._named, k))

    def __enter__(self) -> None:
        if not self.tracer.enter():
            raise NotFollowed
        self.tracer.lines.enter_model()
        self._law = Law(self.tracer)

    def __exit__(self, *error: Any) -> None:
        try:
            self._law.end_step(())
            self.tracer.end()
        finally:
            self.tracer.leave()

    def knows(self, model: nn.Module, others: Iterable[Any]) -> None:
        """Record the model's tensors, and its inputs without samples, as constants."""
        held = (*model.parameters(), *model.buffers(), *own_tensors(model), *others)
        self._sparse = [x for x in held if isinstance(x, Tensor) and not key_of(x)]
        for x in held:
            if isinstance(x, Tensor):
                self.tracer.memory.know(x)
                self.trail.begins_with(x, key_of(x))

    def shadow_of(self, x: Tensor) -> Shadow:
        """What is known about `x`."""
        with all_aside():
            return self.tracer.shadow_of(x)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` depends on a sample, and was not just allocated without numbers."""
        record = self.tracer.memory.record(x)
        return self.shadow_of(x).held and not (record is not None and record.fresh)

    def has_made(self, x: Tensor) -> bool:
        """Whether it is sparse or nested and new, while such tensors were computed from samples."""
        if key_of(x) or any(x is y for y in self._sparse):
            return False
        return any("layout" in read.what for read in self.tracer.report.reads)

    def place_of(self, x: Tensor, shadow: Shadow, *, moved: bool = False) -> BatchAxis | None:
        """The batch axis of `x`; None if there is none, or, unless `moved`, if data move the samples."""
        if not shadow.held or shadow.mixed or shadow.factor is not None:
            return None
        if shadow.flags & (ORDER if moved else ORDER | MOVED):
            return None
        with all_aside():
            key = id(shadow), tuple(x.shape)
            if key not in self._found:
                assert shadow.sample is not None
                self._found[key] = _place(shadow.sample, tuple(x.shape), self.rows)
            return self._found[key]

    def sample_of_entry(self, x: Tensor, shadow: Shadow) -> Tensor:
        """The sample of every entry of `x`; negative if it depends on none, or on several."""
        with all_aside():
            return at.expanded(shadow.sample, x.shape)


def _place(found: Tensor, shape: tuple[int, ...], samples: int) -> BatchAxis | None:
    axes = [axis for axis, size in enumerate(found.shape) if size > 1]
    for batch_axis in batch_axes(shape, samples, axes):
        expected = batch_axis.sample_of_entry(shape[batch_axis.axis], samples, found.device).to(
            found.dtype
        )
        expected = expected.view(
            [-1 if axis == batch_axis.axis else 1 for axis in range(len(shape))]
        )
        if bool(((found == expected) | (found == at.NONE)).all()):
            return batch_axis
    return None


@dataclass
class Shown:
    """The input of a layer, or the output of a use or of the call.

    Args:
        name: of the layer or use; the number of an output. edge: for its gradient; None without one.
        moved: data move its samples. of_all: a sum over samples.
    """

    name: Hashable
    value: Tensor
    shadow: Shadow
    batch_axis: BatchAxis | None
    edge: GradientEdge | None = None

    @property
    def moved(self) -> bool:
        return self.batch_axis is None

    @property
    def of_all(self) -> bool:
        return self.shadow.mixed and self.shadow.degree is not None and self.shadow.factor is None


class Probe:
    """One run: layers show it their inputs, and otherwise run unchanged.

    Args:
        layout: what is known, to which this run adds. followed: the tracer's knowledge; None for a run
            that is only executed. grown: uses that depend only on parameters and the number of samples,
            and their batch axes. compares: keep values and gradients. draws_alike: all samples draw the
            same random numbers. change: applied to the samples of every input.
    """

    def __init__(
        self, layout: BatchLayout, followed: Followed | None = None,
        grown: Mapping[Hashable, int] = MappingProxyType({}), *, compares: bool = False,
        draws_alike: bool = False, change: Callable[[Any, int], Any] | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.followed = layout, followed
        self.rows = 0 if followed is None else followed.rows
        self._grown, self.compares, self.change = grown, compares, change
        self.draws_alike = draws_alike
        self.trusted = followed is None
        """Inside a layer that is known to follow its samples itself."""
        self.closed = False
        """The run is over; a backward pass may compute parts of it again."""
        self.inside: list[str] = []
        """Paths of the running modules."""
        self.users: dict[Hashable, dict[tuple[str, ...], None]] = {}
        """The modules around each use, for each of its calls."""
        self.graph: Any = None
        """Graph of the values derived from parameters in this run."""
        self.derived: Shapes = {}
        """Shapes of values computed from parameters and constants alone."""
        self.batch_axes: dict[Hashable, BatchAxis] = {}
        self.entries: dict[Hashable, set[int]] = {}
        """Numbers of entries per sample, by layer or use."""
        self.moved: dict[Hashable, None] = {}
        """Layers and uses without one batch axis."""
        self.loose: dict[Hashable, BatchAxis | None] = {}
        """The batch axes of these in this run, if data have moved the samples to one axis."""
        self.coupled: dict[Hashable, Coupled] = {}
        """Errors of layers and uses with inputs that depend on several samples, or on their order."""
        self.unseen: list[Hashable] = []
        """Layers and uses that depend on the batch before, or on memory with an unknown writer."""
        self.returned: dict[str, dict[int, BatchAxis | None]] = {}
        """Batch axes of modules' outputs, by their paths and numbers."""
        self.shown: list[Shown] = []
        self.outputs: list[Shown] = []
        """The outputs of the call that depend on samples."""
        self.constant_outputs: list[tuple[int, ...]] = []
        """The shapes of its other outputs."""
        self.by_value = False
        """The sample of some entries depends on values."""
        self.foreign_gradients = False
        """Custom code computes gradients, or changes them."""
        self.draws = self.elsewhere = self.by_python = self.opaque = False
        """Random numbers were drawn; generators outside torch drew; numbers come in lists; a custom
        operator drew."""
        self._calls: dict[Hashable, list[int | None]] = {}
        """The sample of each call of a layer or use that takes one sample; None: a call on constants."""
        self.constants: Shapes = {}
        """Shapes of outputs of uses that depend on constants instead of samples."""

    def holds(self, x: Tensor) -> bool:
        """Whether `x` may hold numbers of the batch."""
        return self.followed is None or self.followed.holds(x)

    def is_new_and_sparse(self, x: Tensor) -> bool:
        """Whether this run has made the tensor without memory of its own, perhaps from the batch."""
        return self.followed is not None and self.followed.has_made(x)

    def reaches(self, values: Iterable[Any]) -> bool:
        """Whether one of these may hold numbers of the batch."""
        return any(isinstance(x, Tensor) and self.holds(x) for x in values)

    def observe(self, path: str, x: Any, counts_samples: bool) -> None:
        """Note a layer's input; `counts_samples`: its rule counts the samples itself."""
        if not isinstance(x, Tensor):
            return
        self.layout.met.add(path)
        if counts_samples:
            self.layout.counting.add(path)
            self.layout.flat |= x.dim() == 1
        else:
            self.show(path, x)

    def show(self, name: Hashable, value: Tensor) -> None:
        """Note the input of a layer, or the output of a use."""
        if self.closed or self.followed is None:
            return
        if value.is_nested and value.layout == torch.strided:  # it has no shape
            raise UnsupportedLayerError(f"{where(called(name))}: {NESTED}")
        if not self.trusted:
            self._note(name, value, self.followed.shadow_of(value))

    def _note(self, name: Hashable, value: Tensor, shadow: Shadow) -> None:
        assert self.followed is not None
        batch_axis = self.followed.place_of(value, shadow)
        self._keep(name, value, shadow, batch_axis)
        self.by_value |= bool(shadow.flags & BY_VALUE)
        if batch_axis is None:
            alone = is_of_one(shadow) and not shadow.flags & ORDER
            if alone or not shadow.held:
                sample = next(iter(shadow.samples)) if alone else None
                self._calls.setdefault(name, []).append(sample)
                if alone:
                    return
            if not shadow.held and shadow.factor is None:
                if name not in self._grown:  # constants instead of samples
                    self.constants.setdefault(name, []).append(tuple(value.shape))
                    return
                batch_axis = _repeated(value, self._grown[name], self.rows)
                if batch_axis is None:
                    self.moved[name] = None
                    return
            elif shadow.mixed or shadow.factor is not None or shadow.flags & ORDER:
                self._note_coupled(name, value, shadow)
                return
        if batch_axis is None or not batch_axis.fits(value, self.rows):
            found = self.followed.place_of(value, shadow, moved=True)
            if self.loose.setdefault(name, found) != found:
                self.loose[name] = None
            self.moved[name] = None
            return
        each = value.shape[batch_axis.axis] // self.rows
        known = self.batch_axes.setdefault(name, batch_axis)
        folded = known.fold(each * self.rows, self.rows)
        if not known.like(batch_axis) or folded != (batch_axis.outer, batch_axis.inner):
            self.moved[name] = None
        self.entries.setdefault(name, set()).add(each)

    def _note_coupled(self, name: Hashable, value: Tensor, shadow: Shadow) -> None:
        assert self.followed is not None
        if is_unseen(shadow):
            self.unseen.append(name)
        by_number = not shadow.mixed and shadow.factor is None
        cause = self.followed.tracer.memory.cause(value)
        of = NUMBER if by_number else OTHERS
        error = coupled(called(name), cause, of, of_all=not value.dim())
        self.coupled.setdefault(name, error)

    def _keep(
        self, name: Hashable, value: Tensor, shadow: Shadow, batch_axis: BatchAxis | None
    ) -> None:
        if not self.compares:
            return
        with all_aside():
            edge = get_gradient_edge(value) if value.requires_grad else None
            self.shown.append(Shown(name, value.detach().clone(), shadow, batch_axis, edge))

    def gives(self, path: str, out: Any) -> None:
        """Note a layer's output."""
        if self.compares and not (self.closed or self.trusted) and type(out) is Tensor:
            assert self.followed is not None
            shadow = self.followed.shadow_of(out)
            self._keep(path, out, shadow, self.followed.place_of(out, shadow))

    def leaves(self, path: str, output: Any) -> None:
        """Note a module's output."""
        if self.closed or self.trusted or self.followed is None:
            return
        known = self.returned.setdefault(path, {})
        for number, value in enumerate(tensors_of(output)):
            if type(value) is Tensor and value.requires_grad:
                batch_axis = self.followed.place_of(value, self.followed.shadow_of(value))
                first = known.setdefault(number, batch_axis)
                if batch_axis is None or first is None or not first.like(batch_axis):
                    known[number] = None

    @property
    def turns(self) -> dict[Hashable, BatchAxis | None]:
        """Layers and uses that take one sample after another: the order of the samples over the calls,
        like entries along an axis; None if it follows no order.
        """
        found = self._calls.items()
        return {
            n: _turns(calls, self.rows) for n, calls in found if any(x is not None for x in calls)
        }

    @property
    def shape(self) -> tuple[Any, ...]:
        """Batch axes of layers, uses and outputs, and where samples mix."""
        outputs = [(x.name, x.batch_axis, x.shadow) for x in self.outputs]
        kinds = [
            (n, p, s.mixed, s.degree, s.factor is None, s.flags & ORDER) for n, p, s in outputs
        ]
        return self.batch_axes, list(self.coupled), kinds

    def close(self, output: Any) -> None:
        """End the run with this output."""
        self.returns(output)

    def returns(self, output: Any) -> list[Tensor]:
        """Note the call's output; returns its tensors."""
        assert self.followed is not None
        leaves = [x.data if isinstance(x, PackedSequence) else x for x in flatten(output)[0]]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        report = self.followed.tracer.report
        with all_aside():
            self.foreign_gradients = report.hooked or any(map(_is_a_users, _nodes(tensors)))
            for number, x in enumerate(tensors):
                shadow = self.followed.shadow_of(x)
                self.by_value |= bool(shadow.flags & BY_VALUE)
                if is_unseen(shadow):
                    self.unseen.append("the output")
                if shadow.held or shadow.factor is not None:
                    edge = get_gradient_edge(x) if x.requires_grad else None
                    batch_axis = self.followed.place_of(x, shadow)
                    self.outputs.append(Shown(number, x, shadow, batch_axis, edge))
                else:
                    self.constant_outputs.append(tuple(x.shape))
        turns = self.turns
        for name, shapes in self.constants.items():
            batch_axis = self.batch_axes.get(name)
            if batch_axis is not None and name not in turns and any(
                batch_axis.axis >= len(shape)
                or not batch_axis.plain
                or shape[batch_axis.axis] != self.rows
                for shape in shapes
            ):  # fmt: skip
                self.moved[name] = None
        for name in turns:
            if name in self.batch_axes or turns[name] is None:
                self.moved[name] = None
        return tensors


def _repeated(value: Tensor, axis: int, samples: int) -> BatchAxis | None:
    """The batch axis of a tensor that repeats the same values for each sample along this axis."""
    if value.shape[axis] == samples:
        return BatchAxis(axis)
    with all_aside():
        x = value.detach()
        found = [
            p for p in batch_axes(tuple(x.shape), samples, [axis])
            if bool((r := p.samples(x, samples)).eq(r[:1]).all())
        ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def is_unseen(shadow: Shadow) -> bool:
    """Whether it depends on numbers with an unknown origin in this run."""
    return shadow.sample is not None and bool((shadow.sample == at.UNSEEN).any())


def _turns(calls: list[int | None], samples: int) -> BatchAxis | None:
    """The order of the samples over these calls, if certain; a call on constants fits any sample."""
    found = [
        batch_axis for batch_axis in batch_axes((len(calls),), samples, [0])
        if all(
            sample in (None, own)
            for sample, own in zip(
                calls,
                batch_axis.sample_of_entry(len(calls), samples, torch.device("cpu")).tolist(),
                strict=True,
            )
        )
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes that computed these, and all nodes behind them."""
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    return reached_without(roots, lambda node: False)[0]


def _is_a_users(node: Node) -> bool:
    """Whether a custom function computes its gradient, which a forward pass does not show."""
    made = getattr(node, "_forward_cls", None)
    if made is None:
        return False
    name = made.__module__
    return not name.startswith("fastclip.") or made not in vars(sys.modules[name]).values()


class Runs(TakenSamples):
    """Runs of one call of the model (or of one of its methods) on a few of its samples.

    Args:
        layout: what is being learnt. model: its state is restored after every run.
        forward: the function to run. args, kwargs: of the real call.
        private: the trained parameters. watch: tells the model's layers which probe runs, and records
            uses of parameters if asked to.
    """

    def __init__(
        self, layout: BatchLayout, model: nn.Module, forward: Callable[..., Any], args: tuple,
        kwargs: dict, private: Iterable[nn.Parameter],
        watch: Callable[[Probe, bool], AbstractContextManager],
    ) -> None:  # fmt: skip
        super().__init__(args, kwargs, layout.drawn)
        self.layout, self.model, self.forward = layout, model, forward
        self.private, self._watch = private, watch
        self.passes = 0
        """Forward passes so far."""
        self.as_they_are = False
        """Parameters are not changed by small random values."""

    def once(
        self, probe: Probe, samples: list[int], seed: int = 0, then: Callable[[Any], None] | None = None,
        *, left: AbstractContextManager[Any] | None = None,
    ) -> Any:  # fmt: skip
        """The output on these samples of those that `cut` took.

        Args:
            then: called with the output while the probe still runs, because a backward pass may compute
                parts of the model again. left: what an earlier run has left on the modules.
        """
        leaves = []
        for leaf, axis in zip(self._pool, self._cuts, strict=True):
            few = leaf if axis is None else take_samples(leaf, axis, samples)
            leaves.append(few if axis is None or probe.change is None else probe.change(few, axis))
        assert probe.followed is not None
        probe.followed.begins_on(leaves)
        return self._run(probe, leaves, seed, then, left)

    def as_called(self) -> None:
        """Run the call on all its samples unchanged, only to see whether it fails by itself."""
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        alone = undisturbed(self.model, 0, followed=False)
        with self._watch(Probe(self.layout), False), alone, torch.enable_grad():
            self.forward(*args, **kwargs)

    def _run(
        self, probe: Probe, leaves: list[Any], seed: int, then: Callable[[Any], None] | None,
        left: AbstractContextManager[Any] | None,
    ) -> Any:  # fmt: skip
        self.passes += 1
        args, kwargs = tree_unflatten(leaves, self._structure)
        graph = torch.enable_grad()  # without it, parameters would assume a run without training
        assert probe.followed is not None
        with _LOOKING.bit(), self._watch(probe, True), ExitStack() as stack:
            writes = stack.enter_context(undisturbed(self.model, seed))
            stack.enter_context(graph)
            generators = generators_of(self.model)
            before = generators.states()
            if left is not None:
                stack.enter_context(left)
            mode = None
            if probe.compares:  # random numbers of one sample must not affect those of the next
                tables = [table for _, table in tables_of(self.model)]
                alike = draws_alike(tables) if probe.draws_alike else drawn_by(evenly, tables)
                mode = stack.enter_context(alike)
            with probe.followed:
                out = self.forward(*args, **kwargs)
                writes.check(probe.holds)
                probe.closed = True
                if then is not None:
                    then(out)
            probe.opaque = mode is not None and mode.opaque
            after = generators.states()
            probe.draws = after != before
            others = before.keys() - {"torch", OF_TORCH}
            probe.elsewhere = any(after[x] != before[x] for x in others)
        return out


# -------------------------------------------------------------------------------------------------
# Errors of other code in what this package does in addition to a user's call: what failed, and where.


def is_foreign(error: BaseException) -> bool:
    """Whether it is neither this package's own error nor a lack of memory."""
    own = isinstance(error, FastclipError) or not isinstance(error, Exception)
    return not own and not no_memory(error)


def described(error: BaseException) -> str:
    """What failed, and the user's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = line_of(frames[-1]) if frames else "unknown line"
    return f"{type(error).__name__} at {line}: {error}"


@contextmanager
def of_samples(label: str) -> Iterator[None]:
    """Compute per-sample gradients inside, of a layer or use with this name.

    Raises:
        UnsupportedLayerError: torch has no such gradients.
    """
    try:
        yield
    except Exception as error:
        if not is_foreign(error):
            raise
        raise UnsupportedLayerError(
            f"{label}: the per-sample gradients cannot be computed ({described(error)}). Use dense "
            "tensors and other functions there, or freeze the parameters."
        ) from error

"""The calls of the model, of its methods and of its parts: what runs, and where its samples are."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fastclip.distributed.shards import Shards
from fastclip.errors import BatchSizeError, GraphError, StepError, say
from fastclip.samples import runs
from fastclip.samples.batch_axis import called as called_by
from fastclip.samples.batch_axis import check_rows
from fastclip.samples.inputs import Drawn, batch_sizes_of, tensors_of
from fastclip.samples.layout import BatchLayout, Lengths
from fastclip.samples.learning import check_look, check_moves, learn
from fastclip.samples.outputs import guarded
from fastclip.samples.probing import Probe, Runs, coupled
from fastclip.samples.settings import Look
from fastclip.samples.state import Trains, no_training
from fastclip.trace.tracer import all_aside

FORWARD = "forward"  # the name of the call that is the model's own


def _not_traced(begins: bool) -> bool:
    return False


def _is_not() -> bool:
    return False


@dataclass(eq=False)
class Forward:
    """One forward pass of the model; private layers stamp their graph with it."""

    batch_size: int | None
    finished: bool = False
    """A backward pass has taken its contributions; a second one would clip each part separately."""
    layout: BatchLayout | None = None
    """The batch axes in this kind of call, as far as known."""
    sample_order: Tensor | None = None
    """Inside a packed recurrent layer: the sample of each row."""
    trains: bool = field(default_factory=torch.is_grad_enabled)
    """It builds a graph, although parts of it may not (reentrant checkpoints run without)."""
    lengths: Lengths | None = None
    """Of the inputs of the call that it belongs to."""
    derived: Any = None
    """The values that were computed from parameters alone."""
    cast: Any = None
    """The input that was cast last."""
    inside: list[tuple[str, Any]] = field(default_factory=list)
    """The running modules: their paths, and what follows the samples if they are moved there."""
    reached: set[Hashable] = field(default_factory=set)
    """Layers and uses that it has reached."""
    inputs: Any = None
    """Inputs of the call, until a backward pass has taken its contributions."""
    turns: dict[Hashable, int] = field(default_factory=dict)
    """How often each use ran that takes one sample after another."""

    def turn(self, name: Hashable, label: str) -> Callable[[], int]:
        """Count a use that takes one sample after another. Its sample is known once all have had a turn.

        Args:
            label: of the use, for messages.

        Returns:
            A function that gives the sample.
        """
        number = self.turns.get(name, 0)
        self.turns[name] = number + 1
        if self.lengths is None and self.layout is not None and self.inputs is not None:
            self.lengths = self.layout.lengths(*self.inputs)
        return partial(self._sample_of_call, name, number, label)

    def _sample_of_call(self, name: Hashable, number: int, label: str) -> int:
        layout, calls, batch = self.layout, self.turns[name], self.batch_size or 1
        assert layout is not None
        each, rest = divmod(calls, batch)
        batch_axis = None if rest else layout.folds.find(name, each, self.lengths or ())
        if batch_axis is None:
            raise BatchSizeError(
                f"{label} runs {calls} times for {batch} samples, so fastclip cannot identify the "
                "sample of each call. Compute all samples in the same way."
            )
        return number // batch_axis.inner % batch

    @property
    def routings(self) -> list[tuple[str, Any]]:
        """The modules among `inside` that move samples."""
        returns = () if self.layout is None else self.layout.returns
        return [entered for entered in self.inside if entered[0] in returns] if returns else []


@dataclass
class Entered:
    """A call of the model, or of one of its methods, that is running."""

    name: str
    model: nn.Module
    plain: Callable[..., Any]
    args: tuple
    kwargs: dict
    forward: Forward | None = None
    drives: bool = False
    """It is no computation over one batch (Lightning's optimizer_step); the calls in it are traced."""
    noticing: ExitStack = field(default_factory=ExitStack)
    """Records uses of parameters until the call ends."""
    probed: bool = False
    """Dry runs have been made for it."""
    sizes: list[int] = field(default_factory=list)
    """Of its inputs, if its path is followed."""
    compiles: bool = False
    """It has made torch.compile trace new code, and is not followed any further."""
    following: Any = None
    """Follows its path through torch's operators."""
    path: Any = None
    """That path, once it has run."""

    def follow(self, *, eager: bool = False) -> None:
        """Begin to follow it; `eager` as in `runs.begin`."""
        tensors = [*tensors_of((self.args, self.kwargs))]
        self.sizes = [size for x in tensors for size in x.shape]
        self.following = runs.begin(tensors, eager=eager)

    def ran(self) -> None:
        """Stop following it, because it has returned or failed."""
        if self.following is not None:
            self.path, self.following = self.following.stop(), None


class Calls:
    """The running calls, and the known batch axes in each kind of call.

    Args:
        batch_axis: of the model's inputs. private: the trained parameters. drawn: gives the numbers of
            samples of the sampled batches.
    """

    def __init__(self, batch_axis: int, private: Mapping[nn.Parameter, str], drawn: Drawn) -> None:
        self.batch_axis, self._private, self.drawn = batch_axis, private, drawn
        self.layouts: dict[str, BatchLayout] = {}
        """By the name of the method, or the path of the part, that is called."""
        self.probe: Probe | None = None
        """The running probe: layers show it their inputs, and otherwise run unchanged."""
        self.intercepting: (
            Callable[[Iterable[nn.Parameter]], AbstractContextManager[None]] | None
        ) = None
        """Records uses of parameters."""
        self.known: set[nn.Parameter] = set()
        """All parameters of the model as it was intercepted."""
        self.paused = False
        """The running calls contribute nothing."""
        self.traces: Callable[[bool], bool] = _not_traced
        """Called for a new kind of call, with whether the model's own forward is about to begin. Returns
        whether the step is traced."""
        self.traced: Callable[[], bool] = _is_not
        """Whether the running call is a part of a traced step."""
        self.shards: Shards | None = None
        """How the parameters are sharded over ranks; None if they are not."""
        self._running: list[Entered] = []
        self.replaces_losses = False
        """Mean cross entropies inside the model are per sample."""
        self.looks: list[Look] = []
        """The costs of the calls that were traced on a few samples."""

    def __getstate__(self) -> dict[str, Any]:
        """Omit layouts: a copy, which may be pickled, learns them anew."""
        left: dict[str, Any] = dict.fromkeys(("probe", "intercepting", "shards"))
        left = {
            **left,
            "traces": _not_traced,
            "traced": _is_not,
            "_running": [],
            "layouts": {},
            "looks": [],
            "trusted": [],
            "paused": False,
        }
        return {**self.__dict__, **left}

    @property
    def outermost(self) -> Entered | None:
        """The call that private layers belong to, if one runs."""
        return next((called for called in self._running if not called.drives), None)

    def runs(self, name: str) -> bool:
        """Whether a call of this name is running."""
        return any(called.name == name for called in self._running)

    def begin(self, called: Entered, noticed: Iterable[nn.Parameter] = ()) -> None:
        """Begin a call that records uses of these parameters."""
        called.noticing.enter_context(self.intercepted(noticed))
        outermost = not called.drives and self.outermost is None
        self._running.append(called)
        if outermost and self._follows:
            called.follow()

    @property
    def _follows(self) -> bool:
        """Whether calls that begin now are followed, if they can be."""
        return torch.is_grad_enabled() and not (self.paused or self.shards)

    def due(self, layout: BatchLayout, called: Entered) -> bool:
        """Whether a dry run on a few samples must come before this call; to be asked once per call.

        If the batch has grown, and the model's forward is proven for any number of samples, none is
        needed. The step itself is traced and its path followed, which shows at its end whether the proof
        applies.
        """
        given = called.args, called.kwargs
        if layout.due(called.model, *given):
            return True
        if not layout.has_grown(layout.batch_size(*given) or 0):
            return False
        followed = called.name == FORWARD and self._follows and runs.can_follow()
        return not (followed and layout.holds_for_any and self.traces(True))

    def end(self, called: Entered) -> None:
        """End a call that has returned or failed; does nothing if it was dropped."""
        while any(running is called for running in self._running):
            ended = self._running.pop()
            ended.ran()
            ended.noticing.close()

    def drop_forward(self) -> None:
        """Drop the model's own forward, and all calls that have begun inside it."""
        while self.runs(FORWARD):
            self._running.pop().noticing.close()

    @contextmanager
    def inside(
        self, name: str, module: nn.Module, plain: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Iterator[Callable[[Any], Any]]:
        """Run a method of the model, or a part of it, inside; the layers that it reaches belong to it.

        Yields a function for its output. The method may turn on gradients (torch.enable_grad).
        """
        if self.probe:
            yield lambda out: out
            return
        called, layout = Entered(name, module, plain, args, kwargs), self.layout_of(name)
        called.drives = layout.drives or not batch_sizes_of(args, kwargs, self.batch_axis)
        noticed = layout.proxied if layout.known else self._private
        self.begin(called, noticed if torch.is_grad_enabled() and not called.drives else ())
        try:
            yield partial(self._returned_by, called)
        finally:
            self.end(called)

    def _returned_by(self, called: Entered, out: Any) -> Any:
        return out if called.forward is None or self.paused else self.returned(called, out)

    def reached(self, path: Hashable | None) -> Entered | None:
        """The call that a private layer belongs to, with its Forward; None if it is called by itself.

        Raises:
            BatchSizeError: the call's samples cannot be located, or it couples them.
        """
        called = self.outermost
        while called is not None and called.forward is None:
            layout = self.layout_of(called.name)
            try:
                if self.due(layout, called):
                    self.learn(layout, called, path)
                    called.noticing.enter_context(self.intercepted(layout.proxied))
                given = called.args, called.kwargs
                size = layout.batch_size(*given, begins=True)
                long = layout.lengths(*given) if layout.folds else None
                called.forward = Forward(size, layout=layout, lengths=long, inputs=given)
            except Trains:
                called.drives = layout.drives = True
                called = self.outermost
        if called is None:
            check_rows(self._running, self.layouts, path)
        return called

    def returned(self, called: Entered, out: Any) -> Any:
        """A call's output; tensors in it that couple samples accept no gradient."""
        called.ran()
        self._check_path(called)
        layout = None if self.probe else self.layouts.get(called.name)
        look = None if self.shards else self._learn_inside
        return out if layout is None else guarded(
            layout, called, out, look, replaced=self.replaces_losses
        )  # fmt: skip

    def layout_of(self, name: str) -> BatchLayout:
        """The batch axes in calls of this method, as far as known."""
        return self.layouts.setdefault(name, BatchLayout(self.batch_axis, self.drawn))

    def layout_with(self, path: Hashable, forward: Forward) -> BatchLayout:
        """The batch axes in this call, including the layer at `path`.

        A layer that no probe has met (in a branch that is reached for the first time) is traced from
        inside the call that reaches it.
        """
        if (layout := forward.layout) is None:
            return self.layout_of(FORWARD)
        if not layout.knows(path) and (called := self._called(forward)) is not None:
            self._learn_inside(layout, called, forward, path)
        return layout

    def look_again_at_all(self) -> None:
        """Trace the next calls on all samples, because samples lie where no dry run has seen them."""
        for layout in self.layouts.values():
            layout.watch, layout.whole = None, True

    def intercepted(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Record uses of these parameters inside."""
        return nullcontext() if self.intercepting is None else self.intercepting(parameters)

    def look_again(self, layout: BatchLayout, forward: Forward, name: Hashable, x: Tensor) -> None:
        """Locate the samples again, because the shape of `x` does not fit their known batch axis.

        Lengths may have changed. Or samples are moved by their values, which other samples or changed
        parameters did not show.
        """
        called = self._called(forward)
        if called is None or self.probe is not None:
            return
        samples = forward.batch_size or 0
        for as_they_are in (False, True):
            self._learn_inside(layout, called, forward, name, as_they_are=as_they_are, whole=True)
            forward.lengths = layout.lengths(called.args, called.kwargs)
            batch_axis = layout.place_of(name, x, samples, forward.lengths)
            if batch_axis is not None or name not in layout.batch_axes or name in layout.open:
                return

    def _called(self, forward: Forward) -> Entered | None:
        """The running call of this forward pass."""
        return next((c for c in reversed(self._running) if c.forward is forward), None)

    def _learn_inside(
        self, layout: BatchLayout, called: Entered, forward: Forward, path: Hashable | None,
        *, whole: bool = False, as_they_are: bool = False, compare: bool = False,
    ) -> None:  # fmt: skip
        """Learn in the middle of a forward pass, for the rest of it.

        Raises:
            GraphError: the result contradicts layers that have run.
        """
        before = layout.facts()
        self.learn(layout, called, path, whole=whole, as_they_are=as_they_are, compare=compare)
        wrong = {name for name, _ in before - layout.facts()} & forward.reached
        if wrong:
            raise GraphError(
                f"{sorted(map(called_by, wrong))}: this batch shows that the samples lie elsewhere "
                "there than in earlier calls, and these layers have run. Call the model on this batch "
                "again.",
                doc="batch-axis",
            )
        called.noticing.enter_context(self.intercepted(layout.proxied))

    def _check_known(self, model: nn.Module, layout: BatchLayout) -> None:
        """Check that every trained parameter was there when the model was made private.

        Raises:
            StepError: one has been added, or has replaced another one.
        """
        now = ((n, p) for n, p in model.named_parameters() if isinstance(p, nn.Parameter))
        new = [name for name, p in now if p.requires_grad and p not in self.known]
        if new:
            layout.known = False  # the next call is traced, too
            raise StepError(
                f"Parameters {new} were added to the model after make_private, so they would not be "
                "trained. Call make_private again.",
                doc="changed-model",
            )

    def compare(self, called: Entered, mixes: object | None) -> None:
        """Compare values, because the step itself does not prove what a dry run on few samples has.

        Args:
            mixes: where it was seen to mix samples.

        Raises:
            BatchSizeError, GraphError: samples are not independent, or lie elsewhere.
        """
        layout = self.layout_of(called.name)
        if called.forward is None or layout.lenient:
            return
        if mixes is not None and layout.by_chance:  # no dry run would take that path again
            raise coupled("The model", mixes)
        if layout.proven or mixes is not None:
            self._learn_inside(layout, called, called.forward, None, whole=True, compare=True)

    def _check_path(self, called: Entered) -> None:
        """Check that the call has taken a known path, or trace it now.

        Raises:
            BatchSizeError, GraphError: as of `compare`.
        """
        path, sizes = called.path, called.sizes
        if called.forward is None:
            return
        layout, samples = self.layout_of(called.name), called.forward.batch_size or 0
        grown = layout.has_grown(samples)
        if path is None and not (called.compiles or grown):
            return
        known, traced = path is not None and layout.paths.knows(path, sizes), self.traced()
        seen = called.probed or ((known and traced) if grown else (known or traced))
        # torch.compile makes few graphs, and batches seldom grow: each is traced
        each = called.compiles or grown
        if not seen and (each or layout.paths.next_due(sizes, turns=bool(layout.turns))):
            self._learn_inside(layout, called, called.forward, None, whole=True)
            self.traces(called.name == FORWARD)
        elif grown:
            layout.tried = samples
        if path is not None:
            layout.paths.note(path, sizes, known=known)

    def learn(
        self, layout: BatchLayout, called: Entered, path: Hashable | None = None,
        *, whole: bool = False, as_they_are: bool = False, compare: bool = False,
    ) -> None:  # fmt: skip
        """Run the call on a few of its samples; `path` is a layer that must be met.

        Args:
            whole: run it on all of them, too. as_they_are: with unchanged parameters.
            compare: compare values to show that samples are independent.
        """
        self.traces(called.name == FORWARD and called.forward is None)

        @contextmanager
        def watch(probe: Probe, noticing: bool) -> Iterator[None]:
            self.probe = probe
            try:
                with self.intercepted(self._private if noticing else ()):
                    yield
            finally:
                self.probe = None

        run = Runs(
            layout, called.model, called.plain, called.args, called.kwargs, self._private, watch
        )
        run.as_they_are = as_they_are
        check_look(self.shards, called.name, called_by(path or ""))
        self._check_known(called.model, layout)
        begun = time.perf_counter()
        layout.version += 1
        before = layout.facts()
        with all_aside(), nullcontext() if called.name == FORWARD else no_training():
            learn(layout, run, path, whole=whole or layout.whole, compare=compare)
        if before - layout.facts():  # paths that were proven with these must be proven again
            layout.paths = runs.Paths()
        check_moves(self.shards, called.model, layout.returns)
        called.probed = True
        self.looks.append(Look(called.name, run.passes, time.perf_counter() - begun))
        # in a branch that has not run yet; it is traced when it does
        unmet = (
            p for p, name in self._private.items() if name.rpartition(".")[0] not in layout.met
        )
        layout.proxied.update(unmet)


# -------------------------------------------------------------------------------------------------
# Forward passes under one loss hold the same samples at the same positions: the first are compared.


_COMPARED = 4
"""Number of backward passes over several forward passes with compared samples; reading waits for a
GPU."""

_FEW = 4
"""With fewer whole numbers, samples are alike by coincidence: a letter, a category."""


_FEW_SHARED = (
    "Two forward passes under one loss have few samples in common, and fastclip clips entry i of both "
    "as one sample. If their sources differ (a replay buffer), let the data set return both entries of "
    "each pair."
)


class SampleOrders:
    """Checks that no sample is at two positions in one backward pass, where it would contribute 2 C.

    `criterion(model(x), y) + criterion(model(x[order]), y[order])` clips gradients of two samples as one
    sample. Inputs are compared bit for bit. If passes have few samples in common (two views of each
    sample, or samples of two sources), a warning says once what is assumed.
    """

    def __init__(self) -> None:
        self._left, self._warned = _COMPARED, False

    def finish(self, forwards: Sequence[Forward]) -> None:
        """Finish forward passes that one backward pass has reached; none may reach them again.

        Raises:
            GraphError: two of them hold the same samples at different positions.
        """
        for forward in forwards:
            forward.finished = True
        several = len(forwards) > 1 and self._left > 0
        if several and torch.cuda.is_available():
            several = (
                not torch.cuda.is_current_stream_capturing()
            )  # the passes before the capture were compared
        seen = (
            [samples for samples in map(_rows, forwards) if samples is not None] if several else []
        )
        for number, (kind, samples) in enumerate(seen):
            for other, before in seen[:number]:
                if kind == other and (_moved(before, samples) or _moved(samples, before)):
                    raise GraphError(
                        "Two forward passes under one loss hold the same samples at different "
                        "positions, such as model(x) and model(x[order]), so a sample could contribute "
                        "up to 2 C. Keep one order of the samples in all forward passes.",
                        doc="data-order",
                    )
                if (
                    kind == other
                    and not self._warned
                    and 2 * len({*before} & {*samples}) < len({*samples})
                ):
                    self._warned = True
                    say(_FEW_SHARED, doc="data-order")
        self._left -= len(seen) > 1
        for forward in forwards:
            forward.inputs = None
            if forward.layout is not None:
                forward.layout.ended()


def _rows(forward: Forward) -> tuple[Hashable, list[int]] | None:
    """The structure of a call's inputs, and a hash of each sample in them."""
    size, layout = forward.batch_size or 0, forward.layout
    if forward.inputs is None or layout is None or size < 2:
        return None
    given = layout.read(*forward.inputs)
    leaves, structure = given.leaves, given.structure
    axes = layout.cuts(given.way) or (layout.axis,) * len(leaves)
    keys: list[list[bytes]] = []
    keys_size = 0
    for leaf, axis in zip(leaves, axes, strict=True):
        if isinstance(leaf, PackedSequence):
            leaf, axis = pad_packed_sequence(leaf, batch_first=True)[0], 0
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or axis is None:
            continue
        if leaf.dim() > axis and leaf.shape[axis] == size:
            samples = leaf.detach().movedim(axis, 0).cpu().reshape(size, -1).contiguous()
            keys.append([sample.tobytes() for sample in samples.view(torch.uint8).numpy()])
            keys_size += _FEW if leaf.is_floating_point() else samples.shape[1]
    if keys_size < _FEW:
        return None
    return structure, [hash(sample) for sample in zip(*keys, strict=True)]


def _moved(distinct: list[int], others: list[int]) -> bool:
    """Whether half of the `others`, at least two, are samples at other positions.

    Samples that are not all distinct show nothing: categories or empty texts are alike by coincidence.
    """
    places = {sample: place for place, sample in enumerate(distinct)}
    if len(places) < len(distinct) or len(distinct) != len(others):
        return False
    moved = sum(places.get(sample, place) != place for place, sample in enumerate(others))
    return moved >= 2 and 2 * moved >= len(others)

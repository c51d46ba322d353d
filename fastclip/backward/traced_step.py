"""The first steps of a private model, traced from the batch to the clipped sums.

Dry runs on few samples have located the samples inside the model (fastclip.samples). The rest is
checked here, in the user's first two steps and in steps that take a new path. This concerns operations
between the loader and the model that mix samples, the loss outside the model, trained tensors outside
the model (fastclip.trace), and, if no values were compared, the model's forward at its full size.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from fastclip.backward.guards import trained_outside, watch_outside
from fastclip.backward.loss import LossGuard, is_output, of_a_part, running_losses
from fastclip.core.torch_names import (
    backward_calls,
    batch_calls,
    current_task,
    in_compiled_call,
    number_of,
    transformed,
)
from fastclip.data.draws import SampledBatches
from fastclip.errors import GraphError
from fastclip.samples.inputs import flatten, tensors_of
from fastclip.samples.seeding import (
    as_given,
    check_input,
    check_views,
    note_samples,
    samples_of_input,
    seed_batch,
    seed_gradient,
    seed_input,
    seed_output,
)
from fastclip.trace import attribution as at
from fastclip.trace.findings import IGNORED_LABELS, Report, TraceLog
from fastclip.trace.law import Law
from fastclip.trace.memory import MOVED, ORDER, SHADOWS, Memory, Shadow
from fastclip.trace.numbers import Numbers
from fastclip.trace.tracer import RUNNING, Tracer, all_aside

_STEPS = 2
"""Steps that are traced. With another batch size, the second shows whether a factor is 1 / b."""
JUDGED: list[Callable[[TraceLog], None]] = []
"""Called with the verdict on each traced step, before anything of it is summed."""
_OUTPUT = "the model's output"
_DEGREES = {"sum": 0, "mean": -1}
_LATE: list[Tracer] = []
"""Tracers that could not leave the mode stack when their models were gone."""


def _nothing() -> None:
    """Ignore the call."""


def leave_late() -> None:
    """Try again for tracers for which `_leave_for_good` failed."""
    _LATE[:] = [tracer for tracer in _LATE if not tracer.leave()]


def _leave_for_good(tracers: list[Tracer]) -> None:
    """Let tracers leave: their models are gone, perhaps as garbage in the middle of an operation."""
    _LATE.extend(tracers)
    leave_late()


@dataclass(frozen=True, eq=False)
class Seen:
    """What was known about a layer's output when it was computed."""

    shadow: Shadow
    cause: object | None
    rows: Tensor | None = None
    """The sample of each entry of the model's input, [b]; None: entry i is sample i."""


@dataclass(eq=False)
class _Step:
    """The step that is being traced."""

    tracer: Tracer
    law: Law
    uses: int = 0
    """Number of outputs of layers and uses with a graph that still exists."""
    seeded: bool = False
    """The loader's batch has been recorded."""
    unproven: object | None = None
    """What the trace does not prove in the model's forward; dry runs on few samples decide there."""
    mixes: object | None = None
    """Where the output of a layer or use depended on several samples."""
    forwards: int = 0
    reads: int = 0
    """How often Python had read numbers when the model was called; all, if it branched before."""
    proven: bool = False
    """No values were compared in the model's forward, so the trace decides there."""
    judged: bool = False
    """A backward pass has been judged; others of the same batch may come until the optimizer steps."""
    rows: Tensor | None = None
    """The sample of each entry of the inputs that the model was called with last."""
    opened: bool = False
    """The running backward pass trains the model."""
    by_outputs: bool = True
    """The loss depends on the model through its outputs alone, which dry runs compare."""
    outputs: set[int] = field(default_factory=set)
    """The numbers of the nodes of the model's outputs."""
    reached: set[int] = field(default_factory=set)
    """The numbers of the nodes behind the losses."""
    came: list[tuple[Tensor, str]] = field(default_factory=list)
    """Trained tensors outside the model that got a gradient, and where they met data."""
    handles: list[RemovableHandle] = field(default_factory=list)

    def next_pass(self) -> None:
        """Prepare for another part of the batch."""
        self.judged, self.unproven, self.mixes, self.rows = True, None, None, None
        self.tracer.report, self.law = Report(), Law(self.tracer)


class StepTrace:
    """Traces the first steps of one private model.

    Args:
        names: its trained parameters. others: its other parameters. axis: of the samples.
        steps: number of steps to trace; 0 in a copy, which has no optimizer.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], others: Mapping[nn.Parameter, str], axis: int,
        *, steps: int = _STEPS,
    ) -> None:  # fmt: skip
        self._names, self._others, self._axis = names, others, axis
        self.left, self._alone, self._traces = steps, steps, bool(steps)
        """Number of steps on one sample that are still traced; these cannot show mixing."""
        self.log = TraceLog()
        self._memory, self._numbers = Memory(SHADOWS), Numbers()
        self._placed: list[Tracer] = []
        """Tracers on the mode stack of a thread: the running step's, and those that could not leave."""
        weakref.finalize(self, _leave_for_good, self._placed)
        self._step: _Step | None = None
        self.misplaced: Callable[[], None] = _nothing
        """Called if samples lie elsewhere than the engine assumes."""
        self.owns: Callable[[Any], bool] = bool
        """Whether a node of C++ is a layer of this model that contributes."""
        self._begin_early = False
        """The next step must be traced from before the call of a compiled function."""
        self._remove: Callable[[], None] | None = None
        self._guard: LossGuard | None = None
        self._constants: list[weakref.ref[Tensor]] = []
        """Tensors that the model held at make_private."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTrace:
        return StepTrace({}, {}, self._axis, steps=0)

    def __reduce__(self) -> Any:
        return partial(StepTrace, steps=0), ({}, {}, self._axis)

    # What is traced

    def know(self, model: nn.Module) -> None:
        """Record the tensors that the model holds now as constants."""
        self._constants = [weakref.ref(x) for x in _tensors_in(model)]

    def listen(self, draws: SampledBatches, views: int = 1) -> None:
        """Observe the batches that loaders hand out, in so many views, while steps are traced."""
        self._memory.views = views
        if not self.left:
            return
        me = weakref.ref(self)

        def handed(iterator: Any, batch: Any) -> None:
            leave_late()
            trace = me()
            if trace is None or not trace.wanted:
                batch_calls.remove(handed)
            elif draws.reads(iterator):
                trace.handed(iterator, batch, draws.in_hand)

        self._remove = partial(batch_calls.remove, handed)
        batch_calls.add(handed, all_aside)  # the next batch is sampled outside the step
        weakref.finalize(self, batch_calls.remove, handed)

    @property
    def wanted(self) -> bool:
        """Whether a step is traced now or later."""
        return bool(self.left) or self._step is not None

    @property
    def observing(self) -> bool:
        """Whether operations of this thread are traced."""
        step = self._step
        return step is not None and step.tracer.observing

    def aside(self) -> AbstractContextManager[None]:
        """Hide the engine's own operations inside, from traced steps of other models too."""
        return all_aside() if RUNNING else nullcontext()

    def handed(self, iterator: Any, batch: Any, drawn: Collection[int]) -> None:
        """Begin a step: a loader hands out a batch, with one of these numbers of samples."""
        step = self._step
        if not torch.is_grad_enabled() or self._is_enough(max(drawn, default=0)):
            return
        if step is not None:
            if step.tracer.here and step.seeded and not step.forwards:
                return  # a prefetcher samples ahead: its first batch is the step's
            if step.forwards and not step.tracer.here:
                return  # another thread trains
        self.end()
        step = self._begin()
        if step is None:
            return
        with step.tracer.aside():
            step.seeded = seed_batch(step.tracer, batch, self._axis, drawn)
            step.tracer.python.handed = step.seeded
        weakref.finalize(iterator, self._gone, weakref.ref(self), weakref.ref(step)).atexit = False

    def _is_enough(self, samples: int | None) -> bool:
        """Whether the step has one sample and shows nothing new."""
        return samples == 1 and not self._alone

    @staticmethod
    def _gone(me: weakref.ref[StepTrace], step: weakref.ref[_Step]) -> None:
        """End the step, because the loop over the loader has been left."""
        trace, left = me(), step()
        if trace is not None and left is not None and trace._step is left:
            trace.end()
        elif trace is not None:
            trace.leave()

    def forward(
        self, leaves: list[Any], cuts: tuple[int | None, ...] | None, batch: int | None, *,
        flat: bool, proven: bool = False, asked: bool = False,
    ) -> None:  # fmt: skip
        """Begin the model's own forward on these inputs, with the samples along these axes.

        Args:
            flat: the samples' ids are in one list, divided by offsets. proven: no values of it were
                compared. asked: its branches are known to have no effect.
        """
        if current_task() != -1 or not torch.is_grad_enabled():
            return
        step = self._step
        if step is not None and not self._continues(step, leaves, batch):
            self.end()
            step = None
        if self._is_enough(batch) and not (step and step.forwards):
            self.end()
            return
        if step is None and in_compiled_call():
            self._begin_early = True
            return
        step = step or self._begin()
        if step is None:
            return
        step.forwards += 1
        step.proven, reads = proven, len(step.tracer.report.reads)
        step.reads = sys.maxsize if asked else reads
        step.tracer.lines.enter_model()
        pairs = list(zip(leaves, cuts or [self._axis] * len(leaves), strict=True))
        with step.tracer.aside():
            for leaf, axis in pairs:
                check_input(step.tracer, leaf)
                if not seed_input(step.tracer, leaf, axis, batch) or flat:
                    step.unproven = "inputs without a batch axis"
            step.rows = next(
                (r for x in pairs if (r := samples_of_input(step.tracer, *x)) is not None), None
            )
            if step.rows is not None:
                note_samples(step.tracer, step.rows)

    @staticmethod
    def _continues(step: _Step, leaves: list[Any], batch: int | None) -> bool:
        """Whether the call has the batch of the running step, or a part of it, on its thread."""
        memory = step.tracer.memory
        if not step.tracer.here:
            return False
        if memory.samples == memory.samples_in(batch or 0) or not (step.seeded or step.forwards):
            return True
        return any(step.tracer.shadow_of(x).held for x in leaves if isinstance(x, Tensor))

    def _begin(self) -> _Step | None:
        leave_late()
        self.leave()
        if not self.left or transformed():  # under which memory is not what it seems
            return None
        for known in self._constants:
            if (x := known()) is not None:
                self._memory.know(x.detach().to_local() if hasattr(x, "to_local") else x.detach())  # type: ignore[attr-defined]
        tracer = Tracer(
            _Known(self._names, self._others), memory=self._memory, numbers=self._numbers
        )
        tracer.begin()
        if not tracer.enter():
            return None
        self._placed.append(tracer)
        self._step = step = _Step(tracer, Law(tracer))
        tracer.on_outside = partial(watch_outside, weakref.ref(step))
        backward_calls.add(self)
        return step

    def end(self) -> None:
        """End the step, or give it up."""
        step, self._step = self._step, None
        if step is None:
            return
        for handle in step.handles:
            handle.remove()
        step.tracer.end(ran=bool(step.forwards))
        self.leave()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if not self.left and self._remove is not None:
            self._remove()
            self._remove = None

    def over(self) -> None:
        """End a judged step, because the optimizer steps or clears the sums."""
        if self._step is not None and self._step.judged:
            self.end()
        self.leave()
        if self._begin_early and self._step is None and not in_compiled_call():
            self._begin_early = False
            self._begin()

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A backward pass is about to begin."""
        step = self._step
        if step is None:
            return
        step.opened = False
        step.came.clear()
        step.tracer.lines.enter_backward()
        self._walk(step, losses)
        with step.tracer.aside():
            for loss, gradient in zip(losses, gradients, strict=False):  # torch reports too few
                seed_gradient(step.tracer, loss, gradient)

    def is_public(self, gradient: Tensor) -> bool:
        """Whether a gradient depends on no sample, as far as the running step is traced."""
        step = self._step
        if step is None or step.tracer.python.may_hold_samples:
            return False
        with step.tracer.aside():
            own = step.tracer.shadow_of(gradient)
        return not own.held and own.factor is None

    @staticmethod
    def _walk(step: _Step, losses: Sequence[Tensor]) -> None:
        """Find the nodes behind the losses, and whether these reach the model's forward through its
        outputs alone.
        """
        step.by_outputs = True
        ahead = [(x.grad_fn, False) for x in losses]
        while ahead:
            node, from_model = ahead.pop()
            if node is None:
                continue
            number = number_of(node)
            of_model = step.tracer.lines.is_of_model(number)
            step.by_outputs &= from_model or not of_model or number in step.outputs
            if number not in step.reached:
                step.reached.add(number)
                ahead += [(below, of_model) for below, _ in node.next_functions]

    def ended(self, failed: bool) -> None:
        """Note that a backward pass is over and has restored the modes."""
        if failed:
            self.end()
        self.leave()

    def leave(self) -> None:
        """Remove modes of ended steps that could not be removed before."""
        running = None if self._step is None else self._step.tracer
        self._placed[:] = [x for x in self._placed if x is running or not x.leave()]
        if self._step is None and not self._placed:
            backward_calls.remove(self)

    # What a step shows

    def seen(self, out: Tensor, made_of: Tensor | None = None) -> Seen | None:
        """What is known about the output of a layer or of a use of a parameter, just computed.

        Args:
            made_of: the layer's input. If it holds samples and the output holds none, the output was
                computed outside torch.
        """
        step = self._step
        if step is None or not step.tracer.observing:
            return None
        tracer = step.tracer
        shadow = tracer.shadow_of(out)
        unmade = out.numel() and (not shadow.held or tracer.memory.is_given(out))
        if unmade and made_of is not None and tracer.shadow_of(made_of).held:
            with tracer.aside():
                shadow = tracer.made(at.everywhere(at.UNSEEN, out.dim()))
                tracer.memory.write(out, shadow, tracer.cause("a kernel outside torch"))
        found = Seen(shadow, tracer.memory.cause(out), step.rows)
        if step.unproven is None and (shadow.mixed or shadow.flags & ORDER):
            step.unproven = step.mixes = found.cause or "order"
        step.uses += 1
        weakref.finalize(found, self._freed, weakref.ref(self), weakref.ref(step)).atexit = False
        return found

    @staticmethod
    def _freed(me: weakref.ref[StepTrace], held: weakref.ref[_Step]) -> None:
        """Note that the graph of an output is gone. Without any graph, no backward pass can follow."""
        trace, step = me(), held()
        if step is None:
            return
        step.uses -= 1
        over = not (step.uses or step.tracer.lines.inside or step.seeded) and current_task() == -1
        if trace is not None and over and trace._step is step:
            trace.end()

    def arrived(
        self, use: str, seen: Seen | None, gradient: Tensor,
        samples_of: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """Check the gradient of a layer's output.

        Args:
            use: the layer, or the use. samples_of: the sample of every entry, as the engine assumes.
        """
        step = self._step
        if step is None or seen is None or not step.tracer.observing:
            return
        tracer, out = step.tracer, seen.shadow
        report, before = tracer.report, len(tracer.report.findings)
        report.uses[use] = out
        if samples_of is not None and out.sample is not None and not out.mixed:
            with tracer.aside():
                expected = as_given(samples_of(gradient), seen.rows)
                if expected is not None and bool(
                    ((out.sample != at.NONE) & (expected >= 0) & (out.sample != expected)).any()
                ):
                    report.add("place", None, use)
        if step.unproven is not None or len(report.findings) > before:
            return
        if not step.law.is_given(seen.rows):
            report.add("calls", None, use)
        step.law.gradient_arrived(use, use, out, seen.cause, gradient)

    def passed_on(
        self, x: Tensor | None, g: Tensor, seen: Seen | None,
        samples_of: Callable[[Tensor], Tensor | None],
    ) -> None:  # fmt: skip
        """Record a private layer's input gradient in the traced steps of all models.

        Args:
            x: that gradient. g: of the layer's output. seen: of that output. samples_of: the sample of
                every entry of x.
        """
        if x is None:
            return
        own = None if self._step is None else self._step.tracer
        for tracer in RUNNING:
            if not tracer.observing:
                continue
            with tracer.aside():
                came = tracer.shadow_of(g)
                if not came.held and not (tracer is own and seen is not None and seen.shadow.held):
                    continue  # it depends on no sample, as random noise does
                samples = as_given(samples_of(x), None if seen is None else seen.rows)
                if samples is None or (tracer is not own and (own is None or came.mixed)):
                    samples = at.everywhere(at.SEVERAL, x.dim())
                factor = came.factor
                if tracer is own and came.mixed and factor is None:  # the engine knows the samples
                    factor = next(iter(tracer.report.factors), None)
                moved = came.flags & MOVED if seen is None else seen.shadow.flags & MOVED
                shadow = tracer.made(samples.to(at.KIND).contiguous(), moved, factor=factor)
                cause = None if factor is None else tracer.memory.cause(g)
                tracer.memory.write(x, shadow, cause)

    def proves(self, out: Any) -> bool:
        """Whether the forward that returns this is proven, or not traced."""
        step = self._step
        if step is None or not step.tracer.observing:
            return True
        if step.unproven is None and step.proven:
            reads = len(step.tracer.report.reads) > step.reads
            step.unproven = self._mixing_of(step, out) or (
                "numbers that Python reads" if reads else None
            )
        step.proven &= step.unproven is None
        return step.unproven is None

    @property
    def mixes(self) -> object | None:
        """Where the running forward was seen to mix samples, if it was."""
        return None if self._step is None else self._step.mixes

    def returned(self, out: Any, batch: int | None) -> None:
        """End the model's forward. If it is not proven, values have located samples in its outputs."""
        step = self._step
        if step is None:
            return
        step.tracer.lines.leave_model()
        step.outputs.update(number_of(x.grad_fn) for x in tensors_of(out) if x.grad_fn is not None)
        if not step.tracer.observing or step.unproven is None:
            return
        tracer = step.tracer
        tracer.memory.samples = tracer.memory.samples_in(batch or tracer.memory.samples)
        with tracer.aside():
            leaves = flatten(out)[0]
            # Next to a packed sequence are a recurrent layer's states: layers, then samples.
            axis_of = 1 if any(isinstance(x, PackedSequence) for x in leaves) else self._axis
            for leaf in leaves:
                x = leaf.data if isinstance(leaf, PackedSequence) else leaf
                if not isinstance(x, Tensor):
                    continue
                own = tracer.shadow_of(x)
                if not own.held or own.mixed or own.flags & ORDER:
                    seed_output(tracer, leaf, axis_of, batch, _DEGREES["mean"])
                if x.grad_fn is not None:
                    seen = Seen(tracer.shadow_of(x), None)
                    step.handles.append(x.register_hook(partial(self._at_output, step, seen)))

    @staticmethod
    def _mixing_of(step: _Step, out: Any) -> object | None:
        """Where outputs became other functions of several samples than sums."""
        for x in tensors_of(out):
            own = step.tracer.shadow_of(x)
            if own.flags & ORDER or (own.mixed and (own.degree is None or own.factor is not None)):
                return step.tracer.memory.cause(x) or "an output"
        return None

    def check_outside(self) -> None:
        """Check a pass that trains the model, as it opens.

        Raises:
            ParameterLeakError: it has trained another tensor that meets data, too. Later ones raise it
                as their gradient comes.
        """
        step = self._step
        if step is not None and step.tracer.observing:
            step.opened = True
            for x, line in step.came:
                raise trained_outside(step.tracer.report, x, line)

    def _at_output(self, step: _Step, seen: Seen, gradient: Tensor) -> None:
        if not step.tracer.observing:
            return
        got = step.tracer.shadow_of(gradient)
        if not seen.shadow.mixed or got.held:
            step.law.gradient_arrived(_OUTPUT, _OUTPUT, seen.shadow, seen.cause, gradient)

    # The verdict

    def judge(self, mean: bool, batch_size: int, *, scale_invariant: bool, whole: int = 0) -> None:
        """Judge a backward pass that has ended, before anything is summed.

        Args:
            mean: `loss_reduction`. whole: `LogicalBatch.whole`. scale_invariant: of the strategy.

        Raises:
            GraphError: samples are not independent, or the loss has another weight.
        """
        step = self._step
        if step is None:
            return
        report = step.tracer.report
        try:
            with step.tracer.aside():
                step.law.end_step(step.reached)
                check_views(step.tracer, step.rows, batch_size)
                losses = [
                    x for x in running_losses() if not x.dim() and not is_output(x, step.outputs)
                ]
                degrees = {step.tracer.shadow_of(x).degree for x in losses}
            by_values = step.by_outputs and not (step.proven or report.hooked)
            inside = [
                f for f in report.findings
                if by_values and f.cause is not None and f.cause.inside
            ]  # fmt: skip
            step.unproven = step.unproven or next((f.cause for f in inside), None)
            found = [f for f in report.findings if f not in inside]
            if scale_invariant and len(report.factors) == 1:
                found = [f for f in found if f.kind != "factor"]
            if found and batch_size > 1:
                if any(f.kind == "place" for f in found):
                    self.misplaced()
                raise GraphError(found[0].said, doc="coupled-loss")
            self._check_degree(degrees, mean, batch_size, report.shifts, whole)
        except GraphError as error:
            self.log.error = error
            self._report()
            raise
        finally:
            self.log.reports[:] = [*self.log.reports[1 - _STEPS :], report]
            if step.unproven is not None:
                self.log.unproven.append(f"the model's forward ({step.unproven})")
            if not step.seeded or sys.exc_info()[0] is not None:
                self.end()
        if batch_size > 1:
            if IGNORED_LABELS in report.guards and not scale_invariant and self._guard is None:
                self._guard = LossGuard(self._is_ours, report.constant_labels)
            self.left = max(self.left - (not step.judged), report.counted)
            self._report()
        elif self._alone:
            self._alone -= not step.judged
        if self._step is step:
            step.next_pass()
        elif not self.left:
            self.end()

    def _report(self) -> None:
        for judged in JUDGED:
            judged(self.log)

    def _is_ours(self, node: Any) -> bool:
        call = getattr(node, "call", None)
        if call is None:
            return self.owns(node)
        grad_state = (
            call.handle.grad_state if hasattr(call, "handle") else call.interceptor.grad_state
        )
        return grad_state.trace is self and not (call.paused or grad_state.paused)

    def guarded(self, norm_sq: Tensor, batch_size: int) -> Tensor:
        """Squared norms; an error or NaN if what was found about the loss does not hold in this step."""
        return norm_sq if self._guard is None else self._guard.checked(norm_sq, batch_size)

    def _check_degree(
        self, degrees: set[int | None], mean: bool, batch_size: int, shifts: set[int], whole: int
    ) -> None:
        if len(degrees) != 1 or batch_size < 2:
            return
        (degree,) = degrees
        wanted = _DEGREES["mean" if mean else "sum"]
        if degree is None or wanted in {degree, *(degree + shift for shift in shifts)}:
            return
        expected = "mean" if mean else "sum"
        if batch_size < whole:
            raise of_a_part(batch_size, whole, expected)
        found = next((name for name, d in _DEGREES.items() if d == degree), None)
        kind = f"a {found} over the batch" if found else "neither a sum nor a mean over the batch"
        fix = f"Pass loss_reduction={found!r}, or take" if found else "Take"
        raise GraphError(
            f"Your loss is {kind}, but loss_reduction={expected!r}, so each contribution depends on the "
            f"batch size. {fix} the {expected} of the samples' losses.",
            doc="coupled-loss",
        )

    def again(self, begins: bool) -> bool:
        """Trace a step that takes a new path, if possible.

        Args:
            begins: with the model's own forward.

        Returns:
            Whether it is traced.
        """
        if not self._traces or in_compiled_call() or transformed():
            return False
        if begins:
            self.left = max(self.left, 1)
        return begins or self.observing

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Trace no pass inside, because none of them contributes."""
        self.end()
        before, self._traces = self._traces, False
        try:
            yield
        finally:
            self._traces = before


def _tensors_in(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and other tensors of a model's modules."""
    yield from model.parameters()
    for module in model.modules():
        for held in (*module._buffers.values(), *vars(module).values()):
            for x in held if isinstance(held, (list, tuple)) else (held,):
                if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                    yield x


class _Known:
    """The parameters of a model."""

    def __init__(self, *groups: Mapping[nn.Parameter, str]) -> None:
        self._groups = groups

    def __contains__(self, x: object) -> bool:
        return any(x in group for group in self._groups)

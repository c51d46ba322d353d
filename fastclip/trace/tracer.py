"""The dispatch mode that follows samples through every operation of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.core.compiler import run_eagerly
from fastclip.core.torch_names import (
    TorchDispatchMode,
    base_of,
    current_task,
    hear_exports,
    in_compiled_call,
    loader_runs,
    place_beneath,
    take_away,
    watch_loaders,
)
from fastclip.trace import attribution as at
from fastclip.trace import indices, law, layers  # noqa: F401 - they register their rules
from fastclip.trace.findings import BY_PYTHON, Cause, Lines, Read, Report
from fastclip.trace.memory import (
    BY_VALUE,
    CHANCE,
    FOREIGN,
    LEARNED,
    MOVED,
    ORDER,
    RANDOM,
    READ,
    SHADOWS,
    STICKY,
    TRAINED,
    Memory,
    Record,
    Shadow,
    lies_in,
    state_of,
)
from fastclip.trace.movement import exchanged
from fastclip.trace.numbers import (
    Counts,
    Numbers,
    Python,
    Questions,
    compared_with_before,
    exported,
    is_fraction,
)
from fastclip.trace.operation import (
    Kind,
    Operation,
    Out,
    generator_of,
    has_zeros,
    is_leaf,
    is_of_losses,
    taken_apart,
    tensors_in,
)
from fastclip.trace.pointwise import ADDING, POINTWISE, factored, pointwise
from fastclip.trace.probe import of_other_layout, probed

_SHARP = frozenset((
    "bmm", "baddbmm", "mm", "addmm", "convolution", "convolution_backward", "index_add",
    "masked_scatter", "cumsum", "_scaled_dot_product_flash_attention_for_cpu",
))  # fmt: skip
"""Operations in which weights of 0 may keep samples independent that the rule joins."""
_KINDS: dict[Any, Kind] = {}
"""The kind of every operator that has run under a tracer."""
_OF_CHANNELS = frozenset({"weight", "bias", "running_mean", "running_var"})
"""Arguments that never hold samples."""
_LITERALS = frozenset({"lift_fresh", "lift"})
"""Operations of torch.tensor(...), whose numbers are made in this step."""
_DISPATCHING = [0]
"""The number of operations that tracers are processing."""
RUNNING: list[Tracer] = []
"""The tracers with a running step, of all private models of this process."""
ASIDE: list[Callable[[int], None]] = []
"""Called with 1 when the internal work of a private model begins, and with -1 when it ends."""
_AFTERWARDS: list[Callable[[], None]] = []
"""Callbacks for the time when no tracer runs any more."""


@contextmanager
def all_aside() -> Iterator[None]:
    """Context for the internal work of a private model, which no tracer of this thread observes."""
    here = [tracer for tracer in RUNNING if tracer.here]
    for tracer in here:
        tracer.idle += 1
    for listener in ASIDE:
        listener(1)
    try:
        yield
    finally:
        for listener in ASIDE:
            listener(-1)
        for tracer in here:
            tracer.idle -= 1


def _export(what: str, x: Tensor) -> None:
    for tracer in RUNNING if not _DISPATCHING[0] else ():
        if tracer.observing:
            exported(tracer, what, x)


class Tracer(TorchDispatchMode):
    """Follows samples through the operations of one step after another.

    Args:
        known: trained tensors of the model. probes: operations without a rule are run again on
        changed operands; otherwise they are assumed to join samples. memory, numbers: of earlier
        steps.
    """

    supports_higher_order_operators = True

    def __init__(
        self, known: Container[Tensor] = (), *, probes: bool = True, memory: Memory | None = None,
        numbers: Numbers | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.known, self.probes, self.idle = known, probes, 0
        self.shadows, self.memory = SHADOWS, memory or Memory(SHADOWS)
        self.report, self.lines = Report(), Lines()
        self.read_by_python = False
        """Python has read numbers of samples in this step."""
        self.same_samples: bool | None = None
        """Whether the batch is that of an earlier step; None: nothing of it was seen."""
        self.guarded_labels: set[int] = set()
        """Memory of labels that a guard watches in later steps."""
        self.on_outside: Callable[[Tensor, str], None] | None = None
        """Called with a trained tensor outside the model, and the line where it meets data."""
        self._outside_met: set[int] = set()
        self.numbers, self.python = numbers or Numbers(), Python()
        self.powers: dict[float, tuple[int, bool]] = {}
        """The result of `compared_with_before` for the numbers given to the running operation."""
        self.counts = Counts()
        self._thread: int | None = None
        self.takes_others = True
        """Tensors as long as the batch, made by no operation of the step, hold samples."""
        self.odd = False
        """Samples have been in tensors without memory of their own (sparse, nested)."""
        self.lenient = False
        """Constants that Python computes from samples may differ alongside each sample."""
        self.questions = Questions()
        self.trail: Any = None
        """Takes the operations and their operands, if they are wanted."""
        self.stopped = self._compiled = False
        """It observes no more, and is removed when possible; it was set in compiled code."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first mode of a process imports dynamo

    # The mode's place among others

    def enter(self) -> bool:
        """Starts to observe the computations of this thread.

        Returns:
            Whether it does: not if torch's own modes make fake tensors.
        """
        self.stopped = False
        self._thread = threading.get_ident() if place_beneath(self) else None
        self._compiled = in_compiled_call()
        if self._thread is not None:
            if not RUNNING:
                _AFTERWARDS.extend((run_eagerly(), hear_exports(_export)))
            RUNNING.append(self)
            watch_loaders(self)
        return self._thread is not None

    @property
    def here(self) -> bool:
        """Whether it observes this thread, or a backward pass, which may use other threads."""
        return current_task() != -1 or self._thread == threading.get_ident()

    @property
    def hears(self) -> bool:
        """Whether it follows the operations that reach its mode."""
        return not (self.idle or self.stopped)

    @property
    def observing(self) -> bool:
        """Whether operations of this thread are followed."""
        return self._thread is not None and self.hears and self.here

    def begin(self) -> None:
        """Begins a step, whose batch is unknown."""
        self.report, self.read_by_python, self.odd, self.memory.samples = Report(), False, False, 0
        self.memory.present = None
        self.same_samples = None
        self.guarded_labels.clear()
        self._outside_met.clear()
        self.counts = Counts()
        self.numbers.begin()
        self.python = Python()

    def end(self, *, ran: bool = True) -> None:
        """Ends the step. The next one may read tensors of it that are still held.

        Args:
            ran: the model ran. Otherwise batches were only prepared for later steps.
        """
        self.lines.forget()
        self.on_outside = None
        if not ran:
            self.memory.forget_step()
            return
        with self.aside():
            self.report.carried = [record.cause for record in self.memory.end_step()]  # type: ignore[misc]

    def leave(self) -> bool:
        """Stops observing.

        Returns:
            Whether the mode was removed. It is only disabled on another thread, in a backward pass or
            compiled call (which restore modes), and during an operation (garbage collection).
        """
        if self._thread is None:
            return True
        self.stopped = True
        if self in RUNNING:
            RUNNING.remove(self)
            while not RUNNING and _AFTERWARDS:
                _AFTERWARDS.pop()()
        here = self._thread == threading.get_ident() and current_task() == -1
        here = here and in_compiled_call() is self._compiled
        if not here or _DISPATCHING[0] or not take_away(self):
            return False
        self._thread = None
        return True

    aside = staticmethod(all_aside)
    """Context that is not observed; the tracers' own operations are not observed either."""

    # Shadows

    def seed(self, x: Tensor, axis: int = 0) -> None:
        """Marks position i of this axis as sample i, or `views` positions from i * `views` on."""
        each = self.memory.each_at(x.shape[axis])
        self.memory.samples = max(self.memory.samples, x.shape[axis] // each)
        self.python.extents.add(x.numel())
        found = at.along(x.shape[axis] // each, axis, x.dim(), each)
        again = self.memory.give(x, self.shadows.of(found, self.memory.samples))
        self.same_samples = self.same_samples is not False and again

    def seed_all(self, x: Tensor, sample: int, part: int | None = None) -> None:
        """Marks all of a tensor as one sample; the others have tensors of the same part."""
        found = self.shadows.of(at.everywhere(sample, x.dim()), self.memory.samples, part=part)
        self.memory.give(x, found)

    def shadow_of(self, x: Tensor) -> Shadow:
        """Returns what is known of a tensor."""
        return self.memory.found(x) or self.shadows.constant

    def made(self, sample: at.Attribution, flags: int = 0, **more: Any) -> Shadow:
        """Makes a shadow in this batch."""
        if self.lenient and flags & ORDER:
            flags = flags & ~ORDER | BY_VALUE
        return self.shadows.of(sample, self.memory.samples, flags, **more)

    def read(self, what: str, shadows: Iterable[Shadow], *, each: bool = False) -> str:
        """Notes that Python reads numbers: one, or `each` entry.

        Returns:
            What they depend on: "several samples", "one sample" or "chance".
        """
        held = [shadow for shadow in shadows if shadow.held]
        self.memory.lengths_read |= what.startswith(("lengths", "number of"))
        if not held and loader_runs():
            return "chance"  # the seed of its workers
        mixed = any(s.mixed or (not each and s.sample.unique().numel() > 1) for s in held)  # type: ignore[union-attr]
        of = ("several samples" if mixed else "one sample") if held else "chance"
        found = Read("item" if what == "_local_scalar_dense" else what, of, self.lines.current())
        if found not in self.report.reads:
            self.report.reads.append(found)
        return of

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _DISPATCHING[0] += 1
        try:
            if not self.hears:
                return func(*args, **(kwargs or {}))
            out = self._dispatched(func, args, kwargs or {})
            if self.trail is not None:
                self.trail.gave(self, tensors_in(out))
            if self.counts.nodes and func in _KINDS and not _KINDS[func].aliases:
                self.counts.divide(self, tensors_in(out))
            return out
        finally:
            _DISPATCHING[0] -= 1

    def _dispatched(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        kind = _KINDS.get(func) or self._kind(func)
        if kind is None:
            return self._higher_order(func, args, kwargs)
        self.report.operations += 1
        if kind.collective:
            return exchanged(self, func, args, kwargs)
        tensors, key = taken_apart(func, args, kwargs)
        records = list(map(self.memory.record, tensors))
        shadows = list(map(self._met, tensors, records))
        if self.memory.samples > 1 and None in records:
            shadows = self._from_elsewhere(func, args, tensors, shadows)
        for filled in kind.replaced(kwargs):
            k = next(k for k, x in enumerate(tensors) if x is filled)
            shadows[k] = self.shadows.constant
        hot, flags = False, 0
        for shadow in shadows:
            hot |= shadow.sample is not None
            flags |= shadow.flags
        if kind.reads and (hot or flags & RANDOM):
            return self._read_number(kind, func(*args, **kwargs), tensors, shadows)
        if hot and kind.counts:
            self.read(kind.name, shadows)
        if self.trail is not None:
            self.trail.note(self, kind, args, kwargs, tensors, shadows)
        self.report.drew |= kind.draws
        generator = generator_of(tensors, kwargs) if kind.draws else None
        draw = generator, 0 if generator is None else state_of(generator)
        if not hot:
            return self._constant(func, kind, args, kwargs, tensors, shadows, draw, repr(key))
        self.lines.note()
        if self._unpacks:
            return self._followed(func, kind, args, kwargs, tensors, shadows, flags, key, draw)
        beside = is_of_losses(kind, tensors)
        for x, shadow in zip(tensors, shadows, strict=True):
            if shadow.flags & (RANDOM | CHANCE):
                law.meets_chance(self.report, kind, x, shadow, shadows)
            foreign = bool(shadow.flags & FOREIGN)
            if shadow is self.shadows.constant and self._from_nowhere(x):
                self.report.unknown = True
            unmet = x.requires_grad and shadow is self.shadows.constant
            unmet &= is_leaf(x) or current_task() == -1  # a checkpoint passes on its inputs
            if unmet and self.memory.record(x) is None:
                foreign = True
                self.memory.write(x, self.shadows.of_no_sample(TRAINED | FOREIGN * beside))
            if foreign and not beside:
                self._outside(x)
            elif foreign:
                flags |= FOREIGN
        out = self._followed(func, kind, args, kwargs, tensors, shadows, flags, key, draw)
        self.questions.met(kind, args, tensors, shadows, out)
        if beside and flags & FOREIGN:
            found = self.shadow_of(out)
            more = {"degree": found.degree, "factor": found.factor}
            self.memory.write(out, self.made(found.sample, found.flags | FOREIGN, **more))
        return out

    @property
    def _unpacks(self) -> bool:
        """Whether nodes of the graph run, whose tensors were saved before."""
        return current_task() != -1 and not torch.is_grad_enabled()

    def _read_number(
        self, kind: Kind, value: Any, tensors: list[Tensor], shadows: list[Shadow]
    ) -> Any:
        of = self.read(kind.name, shadows)
        several, asks = of == "several samples", isinstance(value, bool)
        if of != "chance" and not asks:
            self.known_number(value, several=several)
        if asks or (several and is_fraction(value)):
            return self.questions.answer(value, tensors, shadows, self.lines.current())
        self.trail = self.trail if of == "chance" else None  # other numbers can have any effect
        return value

    def known_number(self, value: float, *, several: bool = True) -> None:
        """Notes that Python knows this number of samples, or can read it without an operation."""
        if not self.lines.in_model():
            self.python.knows(value, self.lines.current(), several=several)

    def cause(self, what: str, operands: Iterable[Tensor] = (), *, factor: bool = False) -> Cause:
        """Returns the running operation as the cause of a finding.

        Args:
            factor: it makes a number of several samples a factor; of which gradient does not
                matter.
        """
        shapes = tuple(tuple(x.shape) for x in operands)
        backward = current_task() != -1 and not factor
        return Cause(what, self.lines.current(), shapes, backward, factor, self.lines.in_model())

    def _kind(self, func: Any) -> Kind | None:
        if hasattr(func, "_schema"):
            _KINDS[func] = Kind(func, pointwise, POINTWISE)
        return _KINDS.get(func)

    def _met(self, x: Tensor, record: Record | None) -> Shadow:
        """Returns the shadow of an operand. A trained leaf gets one when it is first used."""
        found = None if record is None else self.memory.within(record, x)
        if found is None:
            if not (x.requires_grad and is_leaf(x) and x in self.known):
                return self.shadows.constant
            found = self.shadows.of_no_sample(TRAINED)
            self.memory.write(x, found)
        elif not found.held and x.requires_grad and is_leaf(x) and not found.flags & TRAINED:
            if current_task() != -1:  # a view kept for this backward pass
                return found
            own = x in self.known or self.lines.in_model()  # the model's forward has just made it
            found = self.shadows.of_no_sample(TRAINED if own else TRAINED | FOREIGN)
            self.memory.write(x, found)
        return found

    def _followed(
        self, func: Any, kind: Kind, args: tuple, kwargs: dict, tensors: list[Tensor],
        shadows: list[Shadow], flags: int, key: list, draw: tuple,
    ) -> Any:  # fmt: skip
        """Follows an operation on samples.

        Args:
            draw: the generator from which it may draw, and its state.
        """
        self.powers, read = compared_with_before(self, kind, args, tensors, shadows)
        before = [x.clone() for x in tensors] if kind.writes and kind.rule is None else None
        beside = tensors
        if kind.writes and kind.pointwise and not shadows[0].held and tensors[0].numel() > 1:
            beside = [tensors[0].clone(), *tensors[1:]]  # the constant that is written into
        out = func(*args, **kwargs)
        outs = [out] if isinstance(out, Tensor) else tensors_in(out)
        for x in kind.written(args, kwargs) if kind.writes and not outs else ():
            joined = self.made(at.everywhere(at.SEVERAL, x.dim()), LEARNED)
            self.memory.write(x, joined, self._cause(kind, tensors, shadows, [joined]), whole=False)
        if kind.reshapes or not outs:
            return out
        if any(x.layout is not torch.strided for x in (*tensors, *outs)):  # no memory of its own
            call = Operation(self, kind, func, args, kwargs, tensors, shadows, outs)
            for x, own in of_other_layout(call, tensors, shadows, flags & STICKY):
                self.memory.write(x, own, self._cause(kind, tensors, shadows, [own]), whole=False)
            return out
        known = None if kind.by_values or flags & MOVED else self._key(key, shadows, tensors)
        try:
            found = None if known is None else self.shadows.remembered.get(known, (None,))[0]
        except TypeError:  # an argument without a hash
            known = found = None
        if found is None:
            call = Operation(self, kind, func, args, kwargs, tensors, shadows, outs)
            with self.aside():
                found = self._found(call, tensors, shadows, flags, before)
            if known is not None and not call.by_values:
                self.shadows.remembered[known] = found, shadows
        if kind.aligned:
            with self.aside():
                found = law.ordered(self, kind, found, beside, shadows, outs)
        if read:
            found = [law.flagged(self, f, READ) for f in found]
        if self.memory.drew_again(*draw):  # constants
            found = [
                law.flagged(self, f) if f.held else self.shadows.of_no_sample(f.flags & ~RANDOM)
                for f in found
            ]
        if any(s.partial for s in (*found, *shadows)):
            found = law.parts_described(self, kind, args, tensors, shadows, found, outs)
        cause = self._cause(kind, tensors, shadows, found)
        if kind.fresh:
            found = [self._nobody(outs[0])]
        self._put(kind, outs, found, cause, tensors)
        if kind.fresh:
            self.memory.begins(outs[0], found[0])
        plain = func.namespace == "aten" and not (kind.writes or kind.random or kwargs)
        if plain and out is outs[0] and out.numel() == 1 and not lies_in(out, tensors):
            with self.aside():
                self.memory.computed(out, repr(key), tensors)
        return out

    def _key(self, key: list, shadows: list[Shadow], tensors: list[Tensor]) -> tuple | None:
        """Returns the key of the remembered result."""
        for shadow, x in zip(shadows, tensors, strict=True):
            if shadow.factor is not None:
                return None
            key += (id(shadow), x.shape, x.dtype)
        key += (self.memory.samples, *self.powers.items())
        return tuple(key)

    def _found(
        self, call: Operation, tensors: list[Tensor], shadows: list[Shadow], flags: int,
        before: list[Tensor] | None,
    ) -> list[Shadow]:  # fmt: skip
        """Returns the shadows of the outputs by the rule, or else by the local probe."""
        learned = LEARNED if flags & TRAINED else 0
        kept = flags & STICKY | learned
        if any(s.factor is not None for s in shadows) or call.name in ("mul", "div"):
            found = factored(call, shadows)
            if found is not None:
                return found
        described = self._by_rule(call)
        if described is None:
            return probed(call, tensors, shadows, kept, before)
        found = [
            self._shadow(x, out, kept, learned) for x, out in zip(call.outs, described, strict=True)
        ]
        mixed = [s for s in found if s.mixed]
        if mixed and call.name in _SHARP and self.probes and not any(s.mixed for s in shadows):
            asked = (kept & BY_VALUE and call.name == "bmm") or any(s.degree is None for s in mixed)
            pairs = zip(tensors, shadows, strict=True)
            if asked or any(not s.held and has_zeros(x) for x, s in pairs):
                return probed(call, tensors, shadows, kept, before)
        return found

    @staticmethod
    def _by_rule(call: Operation) -> Any:
        """Returns the rule's result; None if there is no rule or it does not cover these arguments."""
        try:
            return None if call.kind.rule is None else call.kind.rule(call)
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def _shadow(self, x: Tensor, out: Out | at.Attribution, kept: int, learned: int = 0) -> Shadow:
        if not isinstance(out, Out):
            out = Out(out)
        flags = out.add | learned if out.exact else (kept | out.add | learned) & ~out.drop
        sample = at.fitted(out.sample, x.dim())
        if learned and (sample is None or (sample.numel() == 1 and int(sample) == at.NONE)):
            flags |= TRAINED
        sample = None if sample is None else sample.contiguous()
        return self.made(sample, flags, degree=out.degree, factor=out.factor)

    def _cause(
        self, kind: Kind, tensors: list[Tensor], shadows: list[Shadow], found: list[Shadow]
    ) -> object | None:
        """Returns where the outputs first depended on several samples."""
        backward, factor = current_task() != -1, any(s.factor is not None for s in found)
        views = kind.aliases and not kind.writes  # views join nothing
        coupled = [s for s in found if (s.joined and not views) or (backward and s.partial)]
        if not coupled and not factor:
            return None
        carried = any(s.factor is not None for s in shadows)
        before = [s for s in shadows if s.mixed or s.joined or (backward and s.partial)]
        of_factor = bool((factor and (before or not coupled)) or (carried and kind.name in ADDING))
        for x, shadow in zip(tensors, shadows, strict=True):
            earlier, shares = self.memory.cause(x), shadow.factor is not None
            by_factor = getattr(earlier, "factor", False)
            if earlier and ((shares or by_factor) if of_factor else not (shares and by_factor)):
                return earlier
        cause = self.cause(kind.base, tensors, factor=of_factor)
        if not of_factor and cause not in self.report.mixing:
            self.report.mixing.append(cause)
        return cause

    def _put(
        self, kind: Kind, outs: list[Tensor], found: list[Shadow], cause: object | None,
        tensors: list[Tensor],
    ) -> None:  # fmt: skip
        """Stores the shadows by the memory of the outputs."""
        for x, shadow in zip(outs, found, strict=True):
            if kind.writes:
                self.memory.write(x, shadow, cause, whole=False)
                self._compare_parts(x)
            elif lies_in(x, tensors):
                self.memory.view(x, shadow)
            else:
                self.memory.write(x, shadow, cause)

    def _compare_parts(self, x: Tensor) -> None:
        """Compares constants in one part of a memory with samples in another."""
        if (base := base_of(x)) is None:
            return
        with self.aside():
            record, sample = self.memory.record(base), self.memory.among_constants(base)
            if record is None or sample is None:
                return
            if law.is_uneven(base, sample):
                flag = BY_VALUE if law.is_branched(self) else ORDER
                record.flags |= flag
                record.shadows = {k: law.flagged(self, s, flag) for k, s in record.shadows.items()}

    def _constant(
        self, func: Any, kind: Kind, args: tuple, kwargs: dict, tensors: list[Tensor],
        shadows: list[Shadow], draw: tuple, key: str,
    ) -> Any:  # fmt: skip
        """Follows an operation that has no sample among its operands."""
        out = func(*args, **kwargs)
        outs = [out] if isinstance(out, Tensor) else tensors_in(out) or kind.written(args, kwargs)
        owned = zip(tensors, shadows, strict=True)
        if (shared := next((x for x, s in owned if s.factor is not None), None)) is not None:
            cause = self.memory.cause(shared)
            call = Operation(self, kind, func, args, kwargs, tensors, shadows, outs)
            with self.aside():
                found = factored(call, shadows)
            for x, shadow in zip(outs, found or [self.shadows.constant] * len(outs), strict=True):
                self.memory.write(x, shadow, cause, whole=not kind.writes)
            return out
        foreign = self._has_foreign(tensors, shadows)
        trained = foreign or any(s.flags & TRAINED for s in shadows)
        # A result of a tensor from elsewhere (a part of all labels) is from elsewhere too.
        literal = kind.name in _LITERALS
        self.python.made(literal, tensors, outs)
        strangers = [x for x in tensors if self._from_nowhere(x)]
        elsewhere = bool(strangers) and not literal and not trained
        self.python.met_others |= any(self._samples_axis(x) is not None for x in strangers)
        drawn = law.drawn(kind, tensors, shadows, again=self.memory.drew_again(*draw))
        shadow = self.shadows.of_no_sample(drawn | TRAINED * trained | FOREIGN * foreign)
        for k, x in enumerate(outs):
            if kind.fresh:
                self.memory.begins(x, self._nobody(x))
            elif kind.writes:
                if shadow is not self.shadows.constant or self.memory.record(x) is not None:
                    self.memory.write(x, shadow, whole=False)
                    self._compare_parts(x)
            elif literal or (not elsewhere and not lies_in(x, tensors)):
                self.memory.write(x, shadow)
                if trained and not kind.draws:
                    self.memory.computed(x, (key, k), tensors)
        return out

    def _from_nowhere(self, x: Tensor) -> bool:
        """Whether no operation of this step has made it, and it is not the model's."""
        return self.memory.record(x) is None and x not in self.known and not self.memory.knows(x)

    @staticmethod
    def _has_foreign(tensors: list[Tensor], shadows: list[Shadow]) -> bool:
        """Whether these include trained tensors outside the model."""
        return current_task() == -1 and any(
            s.flags & FOREIGN or (x.requires_grad and is_leaf(x) and not s.flags & TRAINED)
            for x, s in zip(tensors, shadows, strict=True)
        )

    def _nobody(self, x: Tensor) -> Shadow:
        """Returns the shadow of memory that holds no numbers yet."""
        return self.made(at.everywhere(at.UNSEEN, x.dim())) if x.numel() else self.shadows.constant

    def _higher_order(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Follows an operator that calls the user's functions: it may join all samples."""
        self.idle += 1  # but not those of other models
        try:
            out = func(*args, **kwargs)
        finally:
            self.idle -= 1
        if self.memory.samples:
            cause = self.cause(str(func))
            for x in tensors_in(out):
                joined = self.made(at.everywhere(at.SEVERAL, x.dim()), LEARNED)
                self.memory.write(x, joined, cause)
        return out

    # Tensors from elsewhere

    def _from_elsewhere(
        self, func: Any, args: tuple, tensors: list[Tensor], shadows: list[Shadow]
    ) -> list[Shadow]:
        """Gives shadows to tensors as long as the batch that no operation of this step made. They may
        also be as long as the rows of samples that they meet (labels of positions, concatenated).
        """
        channels = {
            id(args[k]) for k, a in enumerate(func._schema.arguments)
            if k < len(args) and a.name in _OF_CHANNELS and isinstance(args[k], Tensor)
        }  # fmt: skip
        found, kind = list(shadows), _KINDS[func]
        for k, x in enumerate(tensors):
            trained = x.requires_grad and is_leaf(x)
            if isinstance(x, nn.Parameter) and not trained:
                self.memory.know(x)  # a frozen one of another model
            if trained or id(x) in channels or x.layout is not torch.strided:
                continue
            if self.takes_others and self._from_nowhere(x) and current_task() == -1:
                axis = self._samples_axis(x)
                if (
                    axis is not None
                    and self.python.handed
                    and law.lies_across(self, kind, x, axis, shadows)
                ):
                    self.memory.know(x)  # it was there before its samples were drawn
                elif axis is not None and (self.same_samples or not self.memory.was_given(x)):
                    self._outside(x)
                    self.seed(x, axis)
                    literal = kind.name in _LITERALS and x.is_floating_point()
                    if literal and self.python.knows_several and not self.python.has_read(x):
                        several = self.made(at.everywhere(at.SEVERAL, x.dim()))
                        self.memory.write(x, several, self.cause(BY_PYTHON))
                    found[k] = self.shadow_of(x)
                elif (
                    axis is None
                    and (rows := law.samples_beside(x, self.memory.samples, shadows)) is not None
                ):
                    self.memory.give(x, self.made(rows))
                    found[k] = self.shadow_of(x)
        return found

    def _outside(self, x: Tensor) -> None:
        apart = not is_leaf(x) or base_of(x) is None
        if x.requires_grad and apart and id(x) not in self._outside_met:
            self._outside_met.add(id(x))
            if self.on_outside is not None:
                self.on_outside(x, self.lines.current())

    def _samples_axis(self, x: Tensor) -> int | None:
        """Returns the first axis that is as long as the batch."""
        return self.memory.axis_of(x)

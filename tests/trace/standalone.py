"""A step of a plain module under the tracer, without an engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastclip.core.torch_names import tree_leaves
from fastclip.samples.agreement import have_no_effect
from fastclip.samples.runs import Trail
from fastclip.trace.attribution import SEVERAL
from fastclip.trace.findings import HIDDEN, Report
from fastclip.trace.law import Law
from fastclip.trace.memory import TRAINED, Shadow, geometry_of
from fastclip.trace.tracer import Tracer

HIDDEN.append(__file__)

READS = frozenset(
    "tolist numpy __array__ data_ptr untyped_storage storage __dlpack__ __reduce_ex__".split()  # noqa: SIM905
)
"""Methods that hand numbers to what is not torch."""


class Tensors:
    """A set of tensors, by which object they are."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        self._held = {id(x): x for x in held}

    def __contains__(self, x: object) -> bool:
        return id(x) in self._held


def has_data(shadow: Shadow) -> bool:
    """It follows from a sample."""
    return shadow.sample is not None and (
        bool(shadow.samples) or bool((shadow.sample == SEVERAL).any())
    )


class Standalone(Tracer):
    """A tracer that asks the law by itself, wherever a trained tensor and data meet."""

    def __init__(self, known: Iterable[Tensor], **more: Any) -> None:
        super().__init__(Tensors(known), **more)
        self.takes_others = False
        self.law = Law(self)
        self.given: list[Tensor] = []
        self._made: dict[tuple, tuple] = {}
        self._written: dict[int, tuple] = {}

    def seed(self, x: Tensor, axis: int = 0) -> None:
        self.given.append(x)
        super().seed(x, axis)

    def _followed(
        self, func: Any, kind: Any, args: Any, kwargs: Any, tensors: list[Tensor], *more: Any
    ) -> Any:
        for x in tensors:
            self.consumed(x)
        out = super()._followed(func, kind, args, kwargs, tensors, *more)
        shadows, flags = more[0], more[1]
        if flags & TRAINED and any(map(has_data, shadows)):
            trained = [
                self.memory.serial(x)
                for x, s in zip(tensors, shadows, strict=True)
                if s.flags & TRAINED
            ]
            held = kind.name, self.lines.current(), tuple(trained)
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.layout is torch.strided:
                    memory = x.untyped_storage()._cdata
                    if kind.writes:
                        self._written[memory] = held
                    self._made[memory, geometry_of(x)] = held
        return out

    def consumed(self, x: Tensor) -> None:
        """Something is made of a tensor: if it is what a use has made, its gradient is looked at."""
        if not (self._made or self._written) or not x.requires_grad or x.grad_fn is None:
            return
        if x.layout is not torch.strided or not self.shadow_of(x).held:
            return
        memory = x.untyped_storage()._cdata
        found = self._made.pop((memory, geometry_of(x)), None) or self._written.get(memory)
        hooked = x.grad_fn.metadata.setdefault("traced", set())
        if found is None or x.output_nr in hooked:
            return
        hooked.add(x.output_nr)
        name, line, trained = found
        out, cause, key = self.shadow_of(x), self.memory.cause(x), (trained, tuple(x.shape[1:]))
        use = f"{name} at {line}"
        self.report.uses[use] = out

        def arrived(g: Tensor) -> None:
            self.law.gradient_arrived(use, key, out, cause, g)

        x.register_hook(arrived)


class Reads(TorchFunctionMode):
    """Hears what Python reads."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and isinstance(args[0], Tensor) and not self.tracer.idle:
            shadow = self.tracer.shadow_of(args[0])
            if shadow.held:
                self.tracer.read(name, [shadow])
                self.tracer.read_by_python = True
        return func(*args, **(kwargs or {}))


@dataclass
class _Ran:
    """A step with given answers: all that it did must stay the same."""

    trail: Trail
    answers: list[bool]

    def is_again(self, other: _Ran) -> bool:
        return self.trail == other.trail

    def gives_the_same(self, other: _Ran, question: int) -> bool:
        return self.is_again(other)


@dataclass
class Traced:
    """What a traced step has shown.

    Args:
        report: of the tracer. degree: of the loss: 0 if it is a sum over samples, -1 if it is a mean.
    """

    report: Report
    degree: int | None
    tracer: Tracer

    @property
    def verdict(self) -> str:
        return self.report.verdict

    @property
    def kinds(self) -> set[str]:
        return {found.kind for found in self.report.findings}


def traced(
    model: nn.Module, step: Callable[[], Tensor], samples: Iterable[Tensor], *,
    before: Callable[[Tracer], None] | None = None, explores: bool = False,
) -> Traced:  # fmt: skip
    """Run one step under the tracer.

    Args:
        model: whose parameters are trained. step: returns the loss. samples: tensors in which sample i
            lies at position i of the first axis. before: called with the tracer, as it is entered.
        explores: yes-or-no questions that Python asks of numbers are answered in both ways.
    """
    samples = list(samples)
    tracer = Standalone([*model.parameters(), *model.buffers()])
    degree, loss = _run(tracer, step, samples, before)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kept = [*tracer.given, loss, *gradients]
    if any(tracer.memory.alive(kept)):
        gc.collect()
    for record in tracer.memory.alive(kept):
        tracer.report.add("carried", record.cause, "memory that is still held")
    if explores and tracer.report.verdict == "path":

        def run(wanted: Mapping[int, bool]) -> _Ran:
            other = Standalone([*model.parameters(), *model.buffers()])
            other.trail, other.questions.wanted = Trail(), dict(wanted)
            torch.manual_seed(0)
            model.zero_grad()  # each run begins as the first one did
            _run(other, step, samples, before)
            if other.trail is None:
                raise ValueError("Python has read another number")
            return _Ran(other.trail, other.questions.answers)

        asks = {"item", "is_nonzero"}
        if {read.what for read in tracer.report.reads} <= asks:
            with suppress(Exception):  # the step does not run so, or asks for more than yes or no
                if have_no_effect(run({}), run):
                    tracer.report.reads.clear()
    return Traced(tracer.report, degree, tracer)


def _run(
    tracer: Standalone, step: Callable[[], Tensor], samples: Sequence[Tensor],
    before: Callable[[Tracer], None] | None,
) -> tuple[int | None, Tensor]:  # fmt: skip
    tracer.enter()
    try:
        for x in samples:
            tracer.seed(x)
        if before is not None:
            before(tracer)
        with Reads(tracer):
            loss = step()
        degree = tracer.shadow_of(loss).degree
        tracer.consumed(loss)
        loss.backward()
        tracer.law.end_step()
    finally:
        tracer.leave()
    return degree, loss

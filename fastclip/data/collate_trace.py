"""One call of a collate function, traced: which sample every entry of the batch comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastclip._torch import Undispatched, pad_sequences
from fastclip.data.batch_law import Node, leaves, opened
from fastclip.data.item_tensors import seeded
from fastclip.trace import attribution as at
from fastclip.trace.findings import Cause, Report
from fastclip.trace.memory import Memory, Shadow
from fastclip.trace.operation import Kind
from fastclip.trace.tracer import Tracer

_CALLS = 64
"""So many calls share what a tracer remembers."""


class CollateTrace:
    """Traces the calls of collate functions, in this process and thread.

    Attributes:
        root: the last batch, each leaf with its attribution. read: numbers have left torch, or memory
            was written into without being seen.
    """

    def __init__(self) -> None:
        self._tracer, self._calls = _Tracer(), 0
        self.root: Node | None = None
        self.read = False

    def call(self, collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        """What the function makes of the items."""
        if self._calls == _CALLS:
            self._tracer, self._calls = _Tracer(), 0
        self._calls += 1
        tracer = self._tracer
        tracer.memory, tracer.report, tracer.makers = Memory(tracer.shadows), Report(), {}
        followed, whole = seeded(tracer, items)
        tracer.enter()
        try:
            with _Composites(tracer):
                batch = collate(followed)
        finally:
            tracer.leave()
        self.root = opened(batch)
        self.read = bool(tracer.report.reads) or not whole
        for leaf in leaves(self.root):
            if isinstance(leaf.value, Tensor):
                shadow = tracer.shadow_of(leaf.value)
                sample = shadow.sample
                if shadow.factor is not None:  # a divisor that all samples share, as their norm
                    sample = at.everywhere(at.SEVERAL, leaf.value.dim())
                if sample is not None and bool((sample == at.UNSEEN).any()):
                    self.read = True
                    sample = sample.masked_fill(sample == at.UNSEEN, at.NONE)
                leaf.attribute(sample)
        return batch

    def cause(self, x: Any) -> Cause | None:
        """The operation that joined samples in a tensor, or that put several into it."""
        if not isinstance(x, Tensor):
            return None
        found = self._tracer.memory.cause(x)
        if isinstance(found, Cause):
            return found
        record = self._tracer.memory.record(x)
        return None if record is None else self._tracer.makers.get(record.reference.cdata)

    def is_guessed(self, cause: Cause | None) -> bool:
        """Whether no rule knows the operation, so that it was taken to join samples."""
        return cause is not None and cause.operation in self._tracer.report.probed


class _Tracer(Tracer):
    """As in a step, except that tensors from elsewhere are constants, whatever their length."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: dict[int, Cause] = {}
        """By memory: the last operation that put several samples into it."""

    def _samples_axis(self, *_: Any) -> None:
        return None

    def _put(
        self, kind: Kind, outs: list[Tensor], found: list[Shadow], cause: object | None,
        tensors: list[Tensor],
    ) -> None:  # fmt: skip
        super()._put(kind, outs, found, cause, tensors)
        if kind.aliases or not any(s.held and (s.mixed or s.sample.numel() > 1) for s in found):  # type: ignore[union-attr]
            return
        made = Cause(kind.base, self.lines.current())
        for x in outs:
            if (record := self.memory.record(x)) is not None:
                self.makers[record.reference.cdata] = made

    def padded(self, sequences: Any, made: Tensor, **options: Any) -> None:
        """Attribute padded sequences, which are one operation for each of them otherwise."""
        shadows = [self.shadow_of(x) for x in sequences]
        if not any(s.held for s in shadows):
            return
        with Undispatched():
            pairs = zip(sequences, shadows, strict=True)
            samples = [at.expanded(s.sample, x.shape) for x, s in pairs]
            found = pad_sequences(samples, padding_value=at.NONE, **options)
            self.memory.write(made, self.made(at.compressed(found)))
        record = self.memory.record(made)
        assert record is not None
        self.makers[record.reference.cdata] = Cause("pad_sequence", self.lines.current())


class _Composites(TorchFunctionMode):
    """Attributes what functions return that are many operations."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not pad_sequences or self.tracer.stopped:
            return function(*args, **kwargs)
        return self._pad(*args, **kwargs)

    def _pad(
        self, sequences: Any, batch_first: bool = False, padding_value: float = 0.0,
        padding_side: str = "right",
    ) -> Tensor:  # fmt: skip
        options = {"batch_first": batch_first, "padding_side": padding_side}
        with Undispatched():
            made: Tensor = pad_sequences(sequences, padding_value=padding_value, **options)
        self.tracer.padded(sequences, made, **options)
        return made

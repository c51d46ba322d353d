"""A tracer that holds every rule against the local probe, and torch's own samples to run it on."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import tree_leaves
from fastclip.trace import attribution as at
from fastclip.trace.memory import BY_VALUE, MOVED, POSITIONS, Shadow
from fastclip.trace.operation import Operation
from fastclip.trace.probe import probed
from fastclip.trace.tracer import Tracer

_OF_VALUES = BY_VALUE | MOVED | POSITIONS
"""Flags of results that hold for the values, so that the probe may see more."""


class Checked(Tracer):
    """Notes operations in which a rule names a sample, or none, and the probe sees others.

    Attributes:
        held: how often each operation was compared. wrong: what was found, one for each operation.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__((), **more)
        self.held: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}
        self._before: list[Tensor] | None = None

    def _recalled(self, key: tuple) -> None:
        return None

    def _followed(
        self, func: Any, kind: Any, args: Any, kwargs: Any, tensors: list[Tensor], *more: Any
    ) -> Any:
        self._before = [x.clone() for x in tensors] if kind.writes else None
        return super()._followed(func, kind, args, kwargs, tensors, *more)

    def _found(
        self, call: Operation, tensors: list[Tensor], shadows: list[Shadow], flags: int, before: Any
    ) -> list[Shadow]:
        found = super()._found(call, tensors, shadows, flags, before)
        drawn = call.kind.random and call.kind.pointwise
        if call.kind.rule is None or drawn or call.kind.fresh or call.name in PLACED:
            return found
        if any(s.mixed or s.factor is not None or s.flags & _OF_VALUES for s in shadows):
            return found
        if any(x.is_conj() for x in tensors):  # what runs is another operation
            return found
        told = dict(self.report.probed)
        shown = probed(call, tensors, shadows, 0, self._before, fills=False)
        self.report.probed = told
        self.held[call.name] += 1
        for x, rule, seen in zip(call.outs, found, shown, strict=False):
            refused = seen.held and not seen.flags & BY_VALUE
            if rule.flags & _OF_VALUES or seen.sample is None or not x.numel() or refused:
                continue
            says, sees = at.expanded(rule.sample, x.shape), at.expanded(seen.sample, x.shape)
            if bool(((says < at.SEVERAL) & (sees != says) & (sees != at.NONE)).any()):
                shapes = [tuple(y.shape) for y in tensors]
                self.wrong.setdefault(
                    call.name,
                    f"{call.func} of {shapes}, {shadows}, {call.args[1:] if len(tensors) < 2 else ''}: "
                    f"says {rule}, is {seen}",
                )
        return found


PLACED = frozenset(("as_strided", "set"))
"""They read memory, not their operand."""


def seeded(tracer: Tracer, values: Any, axis: int) -> bool:
    """Seed tensors among these along an axis, where they have it."""
    held = [
        x
        for x in tree_leaves(values)
        if isinstance(x, Tensor) and x.layout is torch.strided and x.dim() > axis and x.numel()
    ]
    for x in held:
        tracer.seed(x, axis)
    return bool(held)


def samples_of(op: Any, most: int, largest: int) -> Iterator[tuple[Any, tuple, dict[str, Any]]]:
    """Some of torch's own inputs of an operator: small ones, first those of more axes."""
    dtype = next(
        (d for d in (torch.float64, torch.float32, torch.int64, torch.bool) if d in op.dtypes), None
    )
    if dtype is None:
        return
    grad = op.supports_autograd and dtype.is_floating_point
    found: list = []
    for k, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
        held = [
            x
            for x in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(x, Tensor)
        ]
        if sum(x.numel() for x in held) <= largest and any(x.numel() > 1 for x in held):
            found.append((-max(x.dim() for x in held), k, sample))
        if k > 60:
            break
    found.sort(key=lambda held: held[:2])
    for _, _, sample in found[:: max(1, len(found) // most)][:most]:
        yield sample.input, sample.args, sample.kwargs


def run(op: Any, held: Sequence[Any], axis: int) -> Checked | None:
    """An operator, and its backward pass, on seeded operands; None if it does not take these."""
    first, args, kwargs = held
    tracer = Checked()
    tracer.enter()
    try:
        if not seeded(tracer, (first, args, kwargs), axis):
            return None
        try:
            out = op(first, *args, **kwargs)
        except Exception:
            if tracer.wrong:
                return tracer
            raise
        floats = [
            x
            for x in tree_leaves(out)
            if isinstance(x, Tensor) and x.requires_grad and not x.is_complex() and x.numel()
        ]
        if floats:
            total = torch.zeros((), dtype=torch.float64)
            for x in floats:
                g = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
                if x.dim() > axis and x.shape[axis] <= tracer.memory.samples:
                    tracer.seed(g, axis)
                total = total + (x * g).sum()
            leaves = [
                x
                for x in tree_leaves((first, args, kwargs))
                if isinstance(x, Tensor) and x.requires_grad
            ]
            torch.autograd.grad(total, leaves, allow_unused=True)
    finally:
        tracer.leave()
    return tracer


def operators() -> list[Any]:
    """Torch's list of operators with sample inputs; a package that it imports is not needed."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    # which has forbidden the whole process to set flags of cudnn, as Opacus does
    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

    return list(op_db)

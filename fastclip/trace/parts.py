"""Tensors that hold some of the samples alone: how they were made must be the same for all.

Where parts meet again (`cat`, `stack`, writes into slices) their numbers must agree, else what a sample
becomes depends on its number in the batch. So a loop over samples is proven, and
`cat([h[:2], 1.5 * h[2:]])` is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.memory import content_of
from fastclip.trace.operation import Kind
from fastclip.trace.shadow import BY_VALUE, MOVED, ORDER, RANDOM, TRAINED, Shadow

_LARGEST = 65536
"""Entries of a constant whose content identifies it."""
_OF_POSITION = frozenset(("select_backward", "slice_backward"))
"""Their numbers say which part it is, not how it was made."""


def parts_told(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    found: Sequence[Shadow], outs: Sequence[Tensor],
) -> list[Shadow]:  # fmt: skip
    """What an operation returns, each part with the number of how it was made."""
    with tracer.aside():
        made = [_identified(tracer, x, s) for x, s in zip(tensors, shadows, strict=True)]
        return [
            _told(tracer, kind, args, made, shadows, f, out)
            for f, out in zip(found, outs, strict=True)
        ]


def _told(
    tracer: Any, kind: Kind, args: tuple, made: list[Any], shadows: Sequence[Shadow], found: Shadow,
    out: Tensor,
) -> Shadow:  # fmt: skip
    def again(part: int | None = None, flags: int = 0) -> Shadow:
        return tracer.made(
            found.sample, found.flags | flags, degree=found.degree, part=part, factor=found.factor
        )

    if not found.held or found.flags & (MOVED | ORDER):
        return found
    partial = [s for s in shadows if s.held and not s.whole]
    met = {s.part for s in partial if not s.flags & MOVED}
    if found.whole:
        if kind.writes or not _meets(kind, found, partial, shadows, met):
            return found
        branched = any(r.of == "one sample" for r in tracer.report.reads)  # each on its own values
        return again(flags=BY_VALUE if branched else ORDER)
    merges = kind.pointwise and kind.name in ("add", "where") and len(met) == 1
    if merges and at.are_apart([s.sample for s in shadows]):
        return again(next(iter(met)))
    if kind.aliases and not kind.writes:
        return again(tracer.memory.part_of(out, found))
    if kind.name == "copy":
        return again(next((s.part for s in reversed(shadows) if s.held), None))
    numbers = (
        () if kind.name in _OF_POSITION else tuple(a for a in args if isinstance(a, (int, float)))
    )
    return again(hash((kind.name, numbers, *made)))


def _meets(
    kind: Kind, found: Shadow, partial: Sequence[Shadow], shadows: Sequence[Shadow], met: set
) -> bool:  # fmt: skip
    """In what holds all samples, some were treated in another way than the others."""
    if len(met) > 1:
        return True
    if kind.pointwise:
        return not at.are_apart([s.sample for s in shadows])
    if found.mixed or not met:
        return False
    return kind.name not in ("cat", "stack", "block_diag") or len(partial) < sum(
        s.held for s in shadows
    )


def _identified(tracer: Any, x: Tensor, shadow: Shadow) -> Any:
    """What tells an operand from another."""
    if shadow.held:
        if shadow.whole:
            return hash((tracer.memory.serial(x), True))
        return shadow.part if shadow.part is not None else hash((tracer.memory.serial(x), False))
    if shadow.flags & RANDOM:
        return "random"
    if shadow.flags & TRAINED or x.numel() > _LARGEST or x.is_meta or x.layout is not torch.strided:
        return tracer.memory.serial(x), tuple(x.shape)
    return content_of(x)

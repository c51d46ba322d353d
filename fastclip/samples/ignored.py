"""Labels that count for nothing, and the first that counts: where a loss is divided by how many do, the
labels of a first batch may hide it.

Which values say so, the model tells where it runs: what its losses ignore, and what it compares its
inputs with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastclip.samples.bounds import LOSSES, classes_of
from fastclip.samples.selected import Shorter, counts

IGNORED = -100
"""The label that losses of torch leave out."""
_UNKNOWN = -1
"""What often stands for one that is not known."""
_MISSING = math.nan
"""The same among labels that are no whole numbers."""
_MOST_TOLD = 4
_COMPARED = {"eq": 0, "ne": 0, "gt": 0, "le": 0, "ge": -1, "lt": -1}
"""Comparisons, and which number beside that of the model is on the other side."""

Told = dict[tuple[bool, int], bool]
"""Whether the labels are whole numbers, and a value that says something of them; and whether it is
another one in batches of another length, as a position beyond the last token is."""


def tell(told: Told, func: Any, args: tuple) -> None:
    """Note what this operator, which takes numbers of a batch, ignores or compares them with."""
    name = func._schema.name
    if name in LOSSES:
        told.setdefault((True, int(args[4])), int(args[4]) == classes_of(args))
        return
    beside = _COMPARED.get(name.removeprefix("aten::").rstrip("_"))
    if beside is None or len(args) < 2 or len(told) >= _MOST_TOLD:
        return
    x, value = args[:2]
    given = isinstance(x, Tensor) and not x.requires_grad and x.dtype != torch.bool
    if given and type(value) in (int, float) and math.isfinite(value) and value == int(value):
        whole = not (x.is_floating_point() or x.is_complex())
        told.setdefault((whole, int(value) + beside), False)


def labels(inputs: list[Any], told: Told) -> list[Shorter]:
    """Numbers may be labels that are left out; masks and labels of nothing but 0 may hold a 1.

    Args:
        inputs: of the model; None for those without rows. told: what the model has told.
    """
    found = []
    moving = {value for (_, value), moves in told.items() if moves}
    for number, x in enumerate(inputs):
        dense = isinstance(x, Tensor) and x.layout == torch.strided
        if dense and x.numel() and not x.is_complex():
            values = dict.fromkeys(_of(x, [*told]))
            found += [Shorter(value, number, value in moving) for value in values]
    return found


def _of(x: Tensor, told: list[tuple[bool, int]]) -> Iterator[float]:
    """What labels like these may become."""
    if x.is_floating_point():
        yield _MISSING
        yield from (value for whole, value in told if not whole)
    elif x.dtype != torch.bool:
        held = torch.iinfo(x.dtype)
        usual = (IGNORED, _UNKNOWN) if x.dtype in (torch.int64, torch.int32) else ()
        own = (*usual, *(value for whole, value in told if whole))
        yield from (value for value in own if held.min <= value <= held.max)
    if counts(x):
        if x.is_floating_point():
            yield _UNKNOWN
        if not bool((x != 0).any()):
            yield 1


def holds(x: Tensor, value: float) -> Tensor:
    """Whether labels hold this one, or any like it: [], where they lie; infinite: what no mask holds."""
    if math.isinf(value):
        return ~((x == 0) | (x == 1)).all()
    if value == 1:
        return x.any()
    if math.isnan(value):
        return x.isnan().any()
    return ((x <= value) if value < 0 else (x == value)).any()

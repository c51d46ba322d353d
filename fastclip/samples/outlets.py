"""What a call returns, held against what looks have seen: an output that comes later (a loss term of
labels that the first batch has none of) is looked at when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import BatchSizeError
from fastclip.samples.layout import BatchLayout, Guards
from fastclip.samples.mixed_outputs import refuse_gradients

_EACH_ROW = "each row"
Outlet = tuple[tuple[Hashable, ...], int]
"""Where a tensor is in an output, and of how many dimensions it is."""


def outlets(output: Any, rows: int | None = None) -> Iterator[tuple[Outlet, Tensor]]:
    """The tensors of an output.

    Args:
        rows: lists of as many hold one tensor a row, of which all are alike; None: no list does.
    """
    return _below((), output, rows)


def _below(
    path: tuple[Hashable, ...], value: Any, rows: int | None
) -> Iterator[tuple[Outlet, Tensor]]:
    if isinstance(value, Tensor):
        yield (path, value.dim()), value
    elif isinstance(value, Mapping):
        for name, held in value.items():
            yield from _below((*path, name), held, rows)
    elif isinstance(value, (list, tuple)):
        alike = len(value) == rows
        for number, held in enumerate(value):
            yield from _below((*path, _EACH_ROW if alike else number), held, rows)
    elif is_dataclass(value) and not isinstance(value, type):
        for name, held in vars(value).items():
            yield from _below((*path, name), held, rows)


def outlets_of(output: Any, rows: int) -> set[Outlet]:
    """Where the tensors of an output are, whether lists of as many hold rows or not."""
    return {outlet for size in (None, rows) for outlet, _ in outlets(output, size)}


def guarded(
    layout: BatchLayout, called: Any, output: Any, look: Callable[..., None] | None,
    *, replaced: bool = False,
) -> Any:  # fmt: skip
    """The output of a call, through which no gradient comes in that couples rows.

    Args:
        called: the call, of samples.calls. look: Calls' own, in the middle of it; None where it cannot.
        replaced: the model's own mean cross entropies are per sample.
    """
    rows = None if called.forward is None else called.forward.batch_size
    guards = layout.guards_of(called.args, called.kwargs)
    if guards.outlets and rows and torch.is_grad_enabled():
        new = _new(guards, rows, output)
        if look is not None and new - guards.rare:
            look(layout, called, called.forward, None, whole=True)
            guards = layout.guards_of(called.args, called.kwargs)
            new = _new(guards, rows, output)
        guards.rare |= new
        if new:
            _refuse_unseen(layout, new, rows, output)
    return refuse_gradients(guards, output, replaced=replaced)


def _new(guards: Guards, rows: int, output: Any) -> set[Outlet]:
    """The outlets that no look has seen, whichever lists hold rows."""
    found = {outlet for outlet, _ in outlets(output)} - guards.outlets
    if found:
        found = {outlet for outlet, _ in outlets(output, rows)} - guards.outlets
    return found


def _refuse_unseen(layout: BatchLayout, new: set[Outlet], rows: int, output: Any) -> None:
    for outlet, x in outlets(output, rows):
        holds = any(x.dim() > axis and x.shape[axis] == rows for axis in {0, layout.axis})
        if outlet in new and x.requires_grad and not holds:
            x.register_hook(partial(_refuse, outlet[0], tuple(x.shape)))


def _refuse(path: tuple[Hashable, ...], shape: tuple[int, ...], gradient: Tensor) -> None:
    raise BatchSizeError(
        f"output {'.'.join(map(str, path))} of the model, of shape {list(shape)}, is part of the loss, "
        "but a few rows of the batch do not give it, so whether it couples them is not known; return it "
        "in every call (zero where nothing counts), or one loss a row, of shape [b]"
    )

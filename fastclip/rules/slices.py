"""Where the entries of a derived value lie in a parameter: a part of it, or rows looked up in it.

Functions that only move entries (transpose, chunk, select) are applied to such a value and to a phantom.
A phantom is a view of the parameter's memory, or ids and columns, expanded over the rows that are looked
up. A record on the value then becomes one on the parameter, and nothing of the parameter's size is made
per sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.core.torch_names import Native, memory_of, tree_leaves, tree_map
from fastclip.ops.planner import Planner
from fastclip.rules.embedding import OPTIONS, looked_up, table_ids
from fastclip.rules.records import LinearRecord, Record, ViewedRecord
from fastclip.rules.reuse import RegionsRecord, geometry_of
from fastclip.rules.use import plain_name

_COPIES = frozenset(
    ["contiguous", "clone", "to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"]
)
_MOVES = frozenset(
    [
        "getitem", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
        "transpose", "t", "T", "mT", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "view",
        "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "expand", "expand_as",
        "broadcast_to",
    ]
)  # fmt: skip
_LOOKUPS = frozenset(["embedding", "getitem", "index_select"])
FOLLOWED = _COPIES | _MOVES | _LOOKUPS
"""Functions that are supported."""


@dataclass(frozen=True, eq=False)
class Origin(ABC):
    """Where the entries of one derived value come from."""

    parameter: nn.Parameter
    phantoms: tuple[Tensor, ...]
    """Views of the value's shape, to be moved as it is."""

    @abstractmethod
    def moved(self, phantoms: tuple[Tensor, ...]) -> Origin | None:
        """Returns the origin of a value moved this way; None if it has no simple form."""

    @abstractmethod
    def record(self, record: Record, planner: Planner) -> Record:
        """Converts a record of the value to one of the parameter."""


class Region(Origin):
    """Some entries of the parameter, each once; the phantom is a view of its memory."""

    @property
    def part(self) -> Tensor:
        """These entries."""
        return self.phantoms[0]

    def moved(self, phantoms: tuple[Tensor, ...]) -> Region | None:
        pairs = zip(phantoms[0].shape, phantoms[0].stride(), strict=True)
        return None if any(n > 1 and not s for n, s in pairs) else Region(self.parameter, phantoms)

    def record(self, record: Record, planner: Planner) -> Record:
        shape = self.parameter.shape
        own = geometry_of(self.part, self.parameter)
        with Native():
            whole = self.parameter.detach()
            if own == geometry_of(whole, whole):
                return record
            turned = whole.dim() == 2 and own == geometry_of(whole.t(), whole)
        if isinstance(record, LinearRecord) and turned:
            return record.turned()
        if self.part.is_contiguous() and self.part.numel() == shape.numel():
            return ViewedRecord(record, shape)
        return RegionsRecord(shape, [(own, record)], planner)


@dataclass(frozen=True, eq=False)
class Rows(Origin):
    """Rows of a table by constant ids; the phantoms hold an entry's id and its position in the row."""

    table: Region
    padding: int | None

    def moved(self, phantoms: tuple[Tensor, ...]) -> Rows | None:
        whole = self._rank(phantoms[1]) is not None
        return Rows(self.parameter, phantoms, self.table, self.padding) if whole else None

    def _rank(self, columns: Tensor) -> int | None:
        """Returns how many of the last dimensions are a row's, in their order; None if they are not."""
        entries = torch.Size(self.table.part.shape[1:]).numel()
        pairs = list(zip(columns.shape, columns.stride(), strict=True))
        step, rank = 1, 0
        while step < entries:
            if rank == len(pairs):
                return None
            size, stride = pairs[-1 - rank]
            if size > 1 and stride != step:
                return None
            step, rank = step * size, rank + 1
        apart = all(size == 1 or not stride for size, stride in pairs[: len(pairs) - rank])
        return rank if step == entries and apart else None

    def record(self, record: Record, planner: Planner) -> Record:
        own = record.per_sample()  # [b, *value]
        table = self.table.part.shape
        ids = self.phantoms[0]
        for _ in range(self._rank(self.phantoms[1]) or 0):
            ids = ids.select(-1, 0)
        ids = ids.reshape(1, -1).expand(len(own), -1)
        g = own.reshape(*ids.shape, table[1:].numel())
        return self.table.record(looked_up(ids, g, table, self.padding), planner)


def whole(parameter: nn.Parameter) -> Origin | None:
    """The origin of the parameter itself."""
    with Native():
        if parameter.is_floating_point() and parameter.is_contiguous():
            return Region(parameter, (parameter.detach(),))
    return None


def follow(
    origin: Origin, func: Callable, value: Any, args: tuple, kwargs: Mapping[str, Any], out: Any
) -> list[Origin | None]:
    """Returns the origins of the tensors in `out`, which `func` made of `value` and constants."""
    name = plain_name(func)
    made = tree_leaves(out)
    if name in _COPIES:
        same = len(made) == 1 and made[0].shape == origin.phantoms[0].shape
        return [origin if same else None] * len(made)
    if name in _LOOKUPS and isinstance(origin, Region):
        found = _rows(origin, name, args, kwargs, out)
        if found is not None:
            return [found]
    if name not in _MOVES:
        return [None] * len(made)

    columns = [_moved(x, func, value, args, kwargs) for x in origin.phantoms]
    return [
        origin.moved(tuple(found)) if all(x is not None and x.shape == m.shape for x in found) else None
        for m, *found in zip(made, *columns, strict=True)
    ] if all(len(column) == len(made) for column in columns) else [None] * len(made)  # fmt: skip


def _moved(
    phantom: Tensor, func: Callable, value: Any, args: tuple, kwargs: Mapping[str, Any]
) -> list[Tensor | None]:
    """Applies `func` to the phantom instead of the value; None for outputs that are not views of it."""

    def put(argument: Any) -> Any:
        return phantom if argument is value else argument

    try:
        with torch.no_grad(), Native():
            found = tree_leaves(func(*tree_map(put, args), **tree_map(put, kwargs)))
    except RuntimeError:  # a view of the value, which is a copy, but not of the phantom
        return []
    memory = memory_of(phantom)
    return [x if memory_of(x) == memory else None for x in found]


def _rows(
    region: Region, name: str, args: tuple, kwargs: Mapping[str, Any], out: Any
) -> Rows | None:
    operands = table_ids(name, args, kwargs)
    table = region.part
    if operands is None or not table.dim() or not isinstance(operands["ids"], Tensor):
        return None
    if any(map(operands.get, OPTIONS)):
        return None
    ids, row = operands["ids"].to(torch.int64), table.shape[1:]
    if not ids.dim():
        return None
    ids = ids.where(ids >= 0, ids + len(table))
    spread = ids.reshape(*ids.shape, *[1] * len(row)).expand(*ids.shape, *row)
    columns = torch.arange(row.numel(), dtype=torch.int64, device=ids.device)
    columns = columns.view(row).expand(spread.shape)
    if spread.shape != out.shape:
        return None
    return Rows(region.parameter, (spread, columns), region, operands.get("padding"))

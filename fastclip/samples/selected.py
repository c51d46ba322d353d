"""Rows that values select: a layer that holds as many as a mask is true in has none in a fixed place.

Where every row of a look selects as many, shapes and values show nothing of it. So each mask is run
with one entry left out, and a row says that it is shorter: what then has another shape holds rows that
were selected.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastclip._torch import TorchDispatchMode, tree_leaves, tree_map
from fastclip.samples import row_lists
from fastclip.samples.row_lists import is_rows

_ASK_WHERE = ("aten::nonzero", "aten::masked_select")
_REPEAT = "aten::repeat_interleave"
_TAKE_MASKS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

_FILLER = re.compile(r"_?pad.*(id|idx|index)$")
"""Names of attributes that say which id stands for nothing."""
_MOST_FILLERS = 3

Shapes = dict[Hashable, list[tuple[int, ...]]]


def selects(func: Any, args: tuple) -> bool:
    """Whether the function's result has as many rows as values say."""
    name = func._schema.name
    masks = name in _TAKE_MASKS and any(map(_is_mask, tree_leaves(args[1])))
    return name in (*_ASK_WHERE, _REPEAT) or masks


class Fewer(TorchDispatchMode):
    """Inside, the last entry that a mask selects is left out."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if selects(func, args):
            if func._schema.name == _REPEAT:
                args = (_fewer(args[0], by=1), *args[1:])
            elif func._schema.name == "aten::nonzero":
                args = (_fewer(args[0]), *args[1:])
            else:
                masks = tree_map(lambda x: _fewer(x) if _is_mask(x) else x, args[1])
                args = (args[0], masks, *args[2:])
        return func(*args, **(kwargs or {}))


class Shorter(NamedTuple):
    """How a row says that it is shorter."""

    value: float | None = None
    """What its last ids become; None: a mask's last entry is 0, a length less by 1."""
    alone: int | None = None
    """Number of the only input that says so, be it ids or not; None: all that can."""
    moves: bool = False
    """Other batches say so with another value."""


MASKS = Shorter()


def shortened(rows: Any, number: int, axis: int, which: Iterable[int], how: Shorter) -> Any:
    """These rows of an input say of themselves that they are shorter.

    Args:
        rows: of input `number`, along `axis`; others than masks and whole numbers stay.
    """
    if is_rows(rows):
        return row_lists.shorter(rows, {*which}) if how == MASKS else rows
    if how.alone not in (None, number) or (how.alone is None and not counts(rows)):
        return rows
    filled = how.value is not None and (how.alone == number or holds_ids(rows))
    rows = rows.clone()
    for each in which:
        row = rows.select(axis, each)
        if filled:
            (row[-1] if row.dim() else row).fill_(how.value)
        else:
            row.copy_(_fewer(row, by=1) if row.dim() else (row - 1).clamp_min(0))
    return rows


def holds_ids(x: Any) -> bool:
    """Whether it holds several whole numbers a row, which are no mask."""
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel() or _is_mask(x):
        return False
    whole = not (x.is_floating_point() or x.is_complex())
    return whole and bool((x > 1).any())


def fillers(tables: Iterable[Mapping[str, Any]]) -> list[Shorter]:
    """Ids that may stand for nothing: those that attributes tell, and 0."""
    told = [
        value for table in tables for name, value in table.items()
        if type(value) is int and value >= 0 and _FILLER.match(name)
    ]  # fmt: skip
    return [Shorter(value) for value in dict.fromkeys([*told, 0])][:_MOST_FILLERS]


def counts(x: Any) -> bool:
    """Whether it holds masks or whole numbers."""
    if not isinstance(x, Tensor) or x.is_complex() or x.layout != torch.strided:
        return False
    return not x.is_floating_point() or bool(((x == 0) | (x == 1)).all())


def resized(before: Shapes, after: Shapes) -> list[Hashable]:
    """What has other shapes, as far as both runs came."""
    return [
        name for name, shapes in before.items()
        if any(one != other for one, other in zip(shapes, after.get(name, []), strict=False))
    ]  # fmt: skip


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _fewer(mask: Tensor, by: int | None = None) -> Tensor:
    """The last positive entry is 0, or is less by that."""
    if not mask.dim():
        return mask
    flat = mask.flatten().clone()
    last = (flat > 0).nonzero()[-1:, 0]
    flat[last] = 0 if by is None or mask.dtype == torch.bool else flat[last] - by
    return flat.view(mask.shape)

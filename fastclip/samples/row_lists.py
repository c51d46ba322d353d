"""Rows that come as a list, a tuple or an array of NumPy's: boxes of images, texts, lengths.

Such an input has one entry a row, of whatever kind, so it is cut by number, and its entries are not
taken apart. Which list has as many entries as there are rows by accident, runs on a few rows tell.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import tree_flatten, tree_map, tree_unflatten

_PLAIN = (bool, int, float, str, bytes, type(None))
_HELD = (Tensor, list, tuple, dict)
_SHORT = 4
"""Plain values in a list that are settings (height and width); more of them are data."""


def is_array(value: Any) -> bool:
    """One of NumPy's that has an axis."""
    return type(value).__module__ == "numpy" and len(getattr(value, "shape", ())) > 0


def is_list(value: Any) -> bool:
    """A list or a tuple, but none with names of its own."""
    return type(value) in (list, tuple)


def is_rows(value: Any) -> bool:
    """Whether it can be cut by number; of lists those alone are leaves that hold rows, or data."""
    return is_list(value) or is_array(value)


def is_data(value: Any) -> bool:
    """A list of nothing but plain values, and more than a setting has."""
    long = is_list(value) and len(value) > _SHORT
    return long and all(type(x) in _PLAIN for x in value)


def take(value: Any, rows: list[int]) -> Any:
    """These entries, each by itself: what the model changes in place is no other's."""
    if is_array(value):
        return value[rows]
    return type(value)(own(value[i]) for i in rows)


def join(first: Any, second: Any) -> Any:
    """The entries of one, then those of the other."""
    if is_array(first):
        return first[[*range(len(first)), *[0] * len(second)]]  # which are copies of the first
    return first + second


def differ(value: Any, i: int, j: int) -> bool:
    """Whether two entries are not the same."""
    return not same(value[i], value[j])


def same(one: Any, other: Any) -> bool:
    """Whether two inputs, or two rows of one, hold the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return one is other or (alike and bool(torch.equal(one, other)))
    if is_array(one):
        return one.shape == other.shape and bool((one == other).all())
    mine, structure = tree_flatten(one)
    others, theirs = tree_flatten(other)
    if structure != theirs:
        return False
    if len(mine) == 1 and mine[0] is one:
        return one is other or _equal(one, other)
    return all(map(same, mine, others))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # objects of tensors, which have no one answer
        return False


def shorter(value: Any, which: set[int]) -> Any:
    """These entries say that they are shorter: numbers by 1; what has a length by its last part."""
    if is_array(value):
        if value.dtype.kind not in "biu":
            return value
        value = value.copy()
        for i in which:
            value[i] = value[i] & 0 if value.dtype.kind == "b" else _less(value[i])
        return value
    return type(value)(_shorter(x) if i in which else x for i, x in enumerate(value))


def _less(value: Any) -> Any:
    return value - (value > 0)


def _shorter(row: Any) -> Any:
    if isinstance(row, bool):
        return False
    if isinstance(row, int) or (isinstance(row, float) and row == 1.0):
        return max(row - 1, 0)
    if isinstance(row, (str, bytes)) or is_data(row):
        return row[:-1]
    leaves, structure = tree_flatten(row)
    sizes = [len(x) for x in leaves if _is_long(x)]
    if not sizes:
        told = [_shorter(x) if isinstance(x, (int, str)) else x for x in leaves]
        return tree_unflatten(told, structure)
    return tree_unflatten(
        [x[:-1] if _is_long(x) and len(x) == sizes[0] else x for x in leaves], structure
    )


def _is_long(x: Any) -> bool:
    return is_array(x) or (isinstance(x, Tensor) and x.dim() > 0)


def own(row: Any) -> Any:
    """A copy, of whose tensors and lists none is another's."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if is_array(leaf):
            return leaf.copy()
        if not hasattr(leaf, "__dict__"):
            return leaf
        twin = copy.copy(leaf)
        held = {n: x for n, x in vars(leaf).items() if isinstance(x, _HELD) or is_array(x)}
        vars(twin).update({n: own(x) for n, x in held.items()})
        return twin

    return tree_map(of_leaf, row)

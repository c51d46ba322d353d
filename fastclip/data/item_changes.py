"""Items with other content, of the same shapes where that can be: of another item's values."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastclip.data.item_tensors import copied, rebuilt

_NUMBERS = (bool, int, float, complex, np.generic)
_DEEPEST = 16
_SMALLER = 0.75
"""Content of another size as well: all items may have one norm. It stays within the items' range."""


def changed_items(items: Sequence[Any], spare: Sequence[Any], trial: int) -> list[Any]:
    """Every item with other content.

    Args:
        spare: other items, whose content serves as well. trial: another number, other content.

    Returns:
        One for each item; None where none could be made that is different.
    """
    pool = [*items, *spare]
    made: list[Any] = []
    for i, item in enumerate(items):
        found = None
        for step in range(1, min(len(pool), 9)):
            other = _changed(item, pool[(i + step + 3 * trial) % len(pool)], trial)
            if not same(other, item):
                found = other
                break
        if found is None:
            found = rebuilt(item, _shifted)
        made.append(None if same(found, item) else found)
    return made


def _changed(item: Any, other: Any, trial: int, depth: int = 0) -> Any:
    """An item with another one's values, in its own shapes."""
    if isinstance(item, Tensor) and isinstance(other, Tensor):
        return _like_tensor(item, other)
    if isinstance(item, np.ndarray) and isinstance(other, np.ndarray):
        if item.dtype != other.dtype or not other.size:
            return item
        resized = np.resize(other, item.shape)
        if trial and item.dtype.kind == "f" and not same(resized, item):
            return (resized * _SMALLER).astype(item.dtype)
        return resized
    if isinstance(item, str) and isinstance(other, str):
        return _other_text(item, other, trial)
    if isinstance(item, (list, tuple)) and isinstance(other, (list, tuple)):
        return _like_list(item, other, trial, depth)
    if depth < _DEEPEST and type(item) is type(other):
        if isinstance(item, Mapping):
            return _like_mapping(item, other, trial, depth)
        if is_dataclass(item):
            made: Any = copy.copy(item)
            for name in (field.name for field in fields(item)):
                part = _changed(getattr(item, name), getattr(other, name), trial, depth + 1)
                object.__setattr__(made, name, part)
            return made
        return other
    numbers = isinstance(item, _NUMBERS) and isinstance(other, _NUMBERS)
    return other if numbers else item


def _like_tensor(item: Tensor, other: Tensor) -> Tensor:
    if item.dtype != other.dtype or not other.numel() or not item.numel():
        return item
    if item.layout is not torch.strided or other.layout is not torch.strided or item.is_nested:
        return other
    if item.shape == other.shape:
        return copied(other)
    times = -(-item.numel() // other.numel())
    flat = other.detach().reshape(-1).repeat(times)[: item.numel()]
    made = copied(item)
    with torch.no_grad():
        made.copy_(flat.reshape(item.shape))
    return made


def _like_list(item: Any, other: Any, trial: int, depth: int) -> Any:
    if not item or not other:
        return item
    if all(isinstance(x, _NUMBERS) for x in (*item, *other)):
        parts = [other[i % len(other)] for i in range(len(item))]
    else:
        parts = [_changed(x, other[i % len(other)], trial, depth + 1) for i, x in enumerate(item)]
    if hasattr(item, "_fields"):
        return type(item)(*parts)
    made = rebuilt(item, lambda leaf: leaf, fresh=True)
    if isinstance(made, list):
        made[:] = parts
        return made
    return type(item)(parts)


def _like_mapping(item: Mapping, other: Mapping, trial: int, depth: int) -> Any:
    if not isinstance(item, (dict, UserDict)):
        return other
    made: Any = copy.copy(item)
    for key, part in item.items():
        if key in other:
            made[key] = _changed(part, other[key], trial, depth + 1)
    return made


def _other_text(item: str, other: str, trial: int) -> str:
    """Its own words in another order, which has as many tokens; of one word, another item's text."""
    words = item.split()
    made = " ".join(words[1:] + words[:1] if trial else words[::-1])
    return other if made == " ".join(words) else made


def _shifted(leaf: Any) -> Any:
    """Other numbers, where all items are equal."""
    if isinstance(leaf, Tensor):
        if leaf.dtype is torch.bool:
            return ~leaf
        return (leaf.detach() + 1).to(leaf.dtype) if leaf.layout is torch.strided else leaf
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufc":
        return (leaf + 1).astype(leaf.dtype)
    return leaf + 1.0 if isinstance(leaf, float) else leaf


def alike_items(items: Sequence[Any]) -> int:
    """How many items are equal to another one."""
    found: list[Any] = []
    for item in items:
        if not any(same(item, other) for other in found):
            found.append(item)
    return len(items) - len(found)


def same(a: Any, b: Any) -> bool:
    """Whether two items hold the same."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        try:
            return a.shape == b.shape and a.dtype == b.dtype and bool(_equal(a, b))
        except (RuntimeError, NotImplementedError):  # sparse, nested
            return False
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return all(map(same, a.flat, b.flat)) if a.dtype == object else bool(_equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:  # classes of the user's own
        return False


def _equal(a: Any, b: Any) -> Any:
    return ((a == b) | ((a != a) & (b != b))).all()

"""Items of a data set with changed content, and calls repeated with the same random numbers."""

from __future__ import annotations

import copy
import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastclip.data.collate_law import copied, rebuilt

_NUMBERS = (bool, int, float, complex, np.generic)
_DEEPEST = 16
_SMALLER = 0.75
"""Factor of changed content, as all items may have one norm. It stays within the items' range."""


def changed_items(items: Sequence[Any], spare: Sequence[Any], trial: int) -> list[Any]:
    """Changes the content of every item.

    Args:
        spare: other items whose content may be used. trial: another number gives other content.

    Returns:
        One changed item for each. None if no different one could be made.
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
    """Returns an item with the values of another one, in its own shapes."""
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
    """Puts the words in another order, with as many tokens. One word becomes another item's text."""
    words = item.split()
    made = " ".join(words[1:] + words[:1] if trial else words[::-1])
    return other if made == " ".join(words) else made


def _shifted(leaf: Any) -> Any:
    """Returns other numbers, for items that are all equal."""
    if isinstance(leaf, Tensor):
        if leaf.dtype is torch.bool:
            return ~leaf
        return (leaf.detach() + 1).to(leaf.dtype) if leaf.layout is torch.strided else leaf
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iufc":
        return (leaf + 1).astype(leaf.dtype)
    return leaf + 1.0 if isinstance(leaf, float) else leaf


def alike_items(items: Sequence[Any]) -> int:
    """Number of items that are equal to another one."""
    found: list[Any] = []
    for item in items:
        if not any(same(item, other) for other in found):
            found.append(item)
    return len(items) - len(found)


def same(a: Any, b: Any) -> bool:
    """Whether two items hold the same content."""
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


# -------------------------------------------------------------------------------------------------
# Repeated calls of a function that draws random numbers.


_DEEPEST_STATE, _LONGEST = 4, 1000
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_CONTAINERS = (list, dict, set)


class Repeatable:
    """The random state that a user's function draws from, and the other state that it keeps.

    It consists of torch's, NumPy's and Python's global generators, generators in its closure, attributes
    and globals, and values that it may count or note in its attributes and its closure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def state(self) -> Callable[[], None]:
        """Returns a function that restores the present state."""
        undo: list[Callable[[], Any]] = [
            functools.partial(torch.set_rng_state, torch.get_rng_state()),
            functools.partial(np.random.set_state, np.random.get_state()),
            functools.partial(random.setstate, random.getstate()),
        ]
        for held in _held(self.function, set(), 0, True):
            if isinstance(held, torch.Generator):
                undo.append(functools.partial(held.set_state, held.get_state()))
            elif isinstance(held, random.Random):
                undo.append(functools.partial(held.setstate, held.getstate()))
            elif isinstance(held, np.random.RandomState):
                undo.append(functools.partial(held.set_state, held.get_state()))
            elif isinstance(held, np.random.Generator):
                undo.append(functools.partial(_set_bits, held, held.bit_generator.state))
            elif isinstance(held, CellType):
                undo.append(functools.partial(_set_cell, held, held.cell_contents))
            elif isinstance(held, _CONTAINERS):
                undo.append(functools.partial(_set_content, held, copy.copy(held)))
            else:
                undo.append(functools.partial(_set_attributes, held, dict(vars(held))))

        def back() -> None:
            for step in reversed(undo):
                step()

        return back

    @staticmethod
    def seed(number: int) -> None:
        """Seeds the global generators."""
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)


def _held(value: Any, seen: set[int], depth: int, called: bool = False) -> Iterator[Any]:
    """Yields reachable generators, and attributes, cells and containers of what the function calls.

    Args:
        called: the value is the function, or one that it may call. Other objects may be shared.
    """
    if depth > _DEEPEST_STATE or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _GENERATORS):
        yield value
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _held(part, seen, depth, called and callable(part))
    elif isinstance(value, MethodType):
        yield from _held(value.__self__, seen, depth, called)
        yield from _held(value.__func__, seen, depth)
    elif isinstance(value, FunctionType):
        yield from _held_by_code(value, seen, depth)
    elif isinstance(value, _CONTAINERS):
        if called and len(value) <= _LONGEST:
            yield value
    elif _is_own(value):
        if called:
            yield value
        for part in list(vars(value).values()):
            inner = called and (callable(part) or isinstance(part, _CONTAINERS))
            yield from _held(part, seen, depth + 1, inner)


def _held_by_code(function: FunctionType, seen: set[int], depth: int) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            continue
        if isinstance(content, (bool, int, float, str, type(None))):
            yield cell
        inner = isinstance(content, (FunctionType, MethodType, *_CONTAINERS))
        yield from _held(content, seen, depth + 1, inner)
    for name in function.__code__.co_names:
        yield from _held(function.__globals__.get(name), seen, depth + 1)
    for default in function.__defaults__ or ():
        yield from _held(default, seen, depth + 1)


def _is_own(value: Any) -> bool:
    """Whether it is an object of a Python class, which calls may change."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and type(value).__module__ not in (
        "builtins",
        "types",
    )


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _set_cell(cell: CellType, content: Any) -> None:
    cell.cell_contents = content


def _set_content(container: Any, content: Any) -> None:
    if len(container) != len(content) or any(
        x is not y for x, y in zip(container, content, strict=True)
    ):
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _set_attributes(value: Any, before: dict[str, Any]) -> None:
    now = vars(value)
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, attribute in before.items():
        if name not in now or now[name] is not attribute:
            now[name] = attribute

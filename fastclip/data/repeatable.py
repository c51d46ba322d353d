"""A function that draws random numbers, called again with the same ones."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_DEEPEST, _LONGEST = 4, 1000
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_CONTAINERS = (list, dict, set)


class Repeatable:
    """The random state that a function of the user's draws from, and what else it keeps.

    That is torch's, NumPy's and Python's global generators, generators in its closure, attributes and
    globals, and what it may count or note in its attributes and its closure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def state(self) -> Callable[[], None]:
        """What takes everything back to now."""
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
        """Other random numbers of the global generators."""
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)


def _held(value: Any, seen: set[int], depth: int, called: bool = False) -> Iterator[Any]:
    """Generators that a function may reach; of what it calls, attributes, cells and small containers.

    Args:
        called: the value is the function, or one that it may call; other objects may be anybody's.
    """
    if depth > _DEEPEST or id(value) in seen:
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
        except ValueError:  # nothing in it yet
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
    """An object of a class in Python, which calls may change."""
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

"""A function that draws random numbers, called again with the same ones."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_DEEPEST = 4


class Repeatable:
    """The random state that a function of the user's draws from, and what else it keeps.

    That is torch's, NumPy's and Python's global generators, generators in its closure, attributes and
    globals, and the values of its attributes and of its closure themselves.
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
        seen: set[int] = set()
        for held in _held(self.function, seen, 0):
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


def _held(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Generators, cells and objects with attributes that a function may reach."""
    if depth > _DEEPEST or id(value) in seen:
        return
    seen.add(id(value))
    generators = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
    if isinstance(value, generators):
        yield value
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _held(part, seen, depth)
    elif isinstance(value, MethodType):
        yield from _held(value.__self__, seen, depth)
        yield from _held(value.__func__, seen, depth)
    elif isinstance(value, FunctionType):
        yield from _held_by_code(value, seen, depth)
    elif _is_own(value):
        yield value
        for part in list(vars(value).values()):
            yield from _held(part, seen, depth + 1)


def _held_by_code(function: FunctionType, seen: set[int], depth: int) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # nothing in it yet
            continue
        if isinstance(content, (bool, int, float, str, type(None))):
            yield cell
        yield from _held(content, seen, depth + 1)
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


def _set_attributes(value: Any, before: dict[str, Any]) -> None:
    now = vars(value)
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, attribute in before.items():
        if name not in now or now[name] is not attribute:
            now[name] = attribute

"""Random numbers that Python's and NumPy's generators draw: the functions, and generators of a model."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from fastclip._torch import tree_leaves, tree_map
from fastclip.samples.randomness import is_outside_torch, put_back, start, state_of

Draw = Callable[..., Any]
"""Called in the place of a function that draws, with it and what it was given."""
_OTHERS = {"getstate", "setstate", "get_state", "set_state", "seed"}
"""Functions of generators that draw nothing."""


def evenly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it gives; where its generator goes on from follows from where it stood, not from how much
    was drawn: what one row draws says nothing about what the next one does.
    """
    one = function.__self__  # type: ignore[attr-defined]  # a bound method
    before = state_of(one)
    following = int.from_bytes(
        one.randbytes(4) if hasattr(one, "randbytes") else one.bytes(4), "big"
    )
    put_back(one, before)
    try:
        return function(*args, **kwargs)
    finally:
        start(one, following)


@contextmanager
def drawn_by(draw: Draw, tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Inside, `draw` is called for the functions of `random` and `numpy.random`, in this thread.

    Args:
        tables: attributes; generators among them do the same, until whoever looks puts these back.
    """
    numpy = sys.modules.get("numpy")
    modules: list[Any] = [random] if numpy is None else [random, numpy.random]
    saved = [
        (module, name, function)
        for module in modules for name, function in list(vars(module).items())
        if name not in _OTHERS
        and getattr(function, "__self__", None) is getattr(module.random, "__self__", module)
    ]  # fmt: skip
    here = threading.get_ident()

    def through(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return function(*args, **kwargs)
        return draw(function, *args, **kwargs)

    def stand_in(x: Any) -> Any:
        return _StandIn(x, through) if is_outside_torch(x) else x

    for table in tables:
        held = {n: x for n, x in table.items() if any(map(is_outside_torch, tree_leaves(x)))}
        table |= {n: tree_map(stand_in, x) for n, x in held.items()}
    try:
        for module, name, function in saved:
            setattr(module, name, wraps(function)(partial(through, function)))
        yield
    finally:
        for module, name, function in saved:
            setattr(module, name, function)


class _StandIn:
    """For a generator: calls of its methods go through `draw`."""

    def __init__(self, one: Any, draw: Draw) -> None:
        self._one, self._draw = one, draw

    @property  # type: ignore[misc]  # mypy knows __class__ as an attribute
    def __class__(self) -> Any:  # so that it is one for isinstance
        return type(self._one)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        draws = name not in _OTHERS and getattr(found, "__self__", None) is self._one
        return partial(self._draw, found) if draws else found

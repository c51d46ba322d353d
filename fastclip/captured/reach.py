"""What functions of the user's are made of: defaults, closures, globals, and what these hold.

A graph does not run them again, so what they would find must be as it was.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fastclip.snapshot import Facts, which

_DEEPEST, _LONGEST, _MOST = 4, 256, 4096
"""So deep, so many of one container and so many in all are watched; the rest is left to proofs."""
_LARGE = 1 << 16
"""Bytes of an array that is not looked into."""
_LIBRARIES = {"torch", "transformers", "numpy", "fastclip", "opacus", *sys.stdlib_module_names}


class Reach:
    """All that some functions and attributes reach, when it was made.

    Args:
        functions: of the user's. places: attributes of objects, (vars of it, name), with all that they
            hold. known: objects that somebody else watches.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        places: Iterable[tuple[dict[str, Any], str]],
        known: Iterable[Any],
    ) -> None:
        self._functions = [*functions]
        self._places: list[Any] = [*zip(*places, strict=True)] or [(), ()]
        self._known = {*map(id, known)}
        objects = [*self._there()]
        self._walked = [k for k, value in enumerate(objects) if [*_parts(value)]]
        """Numbers of the places whose objects are made of others."""
        self._held = [*self._read()]

    def facts(self) -> Iterator[Facts]:
        """Which objects these are; of numbers and text, their values."""
        yield Facts(range(len(self._places[0])), self._there, which)
        yield Facts(range(_MOST), self._read, which)

    def _there(self) -> Iterator[Any]:
        return map(dict.get, *self._places)

    def generators(self) -> list[Any]:
        """The states of Python's and NumPy's own generators among it."""
        states = [x.getstate() for x in self._held if isinstance(x, random.Random)]
        numpys = (x for x in self._held if type(x).__module__.startswith("numpy.random"))
        held = (getattr(x, "_bit_generator", getattr(x, "bit_generator", x)) for x in numpys)
        return [*states, *(repr(getattr(x, "state", None)) for x in held)]

    def _read(self) -> Iterator[Any]:
        return islice(self._all([*self._there()]), _MOST)

    def _all(self, objects: list[Any]) -> Iterator[Any]:
        seen: set[int] = set()
        for value in (*self._functions, *[objects[k] for k in self._walked]):
            if id(value) not in seen:
                yield from self._of(value, seen, 0)

    def _of(self, value: Any, seen: set[int], depth: int) -> Iterator[Any]:
        yield value
        if id(value) in seen or id(value) in self._known or depth > _DEEPEST:
            return
        seen.add(id(value))
        for part in _parts(value):
            yield from self._of(part, seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """What a value is made of; nothing of a library's functions and classes."""
    if isinstance(value, FunctionType):
        return () if _is_of_a_library(value) else _of_function(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, dict):
        return islice(chain.from_iterable(value.items()), _LONGEST)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return islice(value, _LONGEST)
    if type(value).__module__ == "numpy":
        return (value.tobytes(),) if getattr(value, "nbytes", _LARGE) < _LARGE else ()
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, type):
        own = () if _is_of_a_library(value) else (*vars(value).values(), *value.__bases__)
        return islice(own, _LONGEST)
    if isinstance(value, Tensor) or _is_of_a_library(type(value)):
        return ()
    slots = (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    return islice(chain((type(value),), getattr(value, "__dict__", {}).values(), slots), _LONGEST)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None
    known = function.__globals__
    names, attributes = _names_of(function.__code__)
    found = [known[name] for name in names if name in known]
    yield from found
    for module in found:
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] not in _LIBRARIES:
            yield from (vars(module)[name] for name in attributes if name in vars(module))


@lru_cache(maxsize=1024)
def _names_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of globals, and all names, in a function's code and in that inside it."""
    globals_, names = [], [*code.co_names]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_.append(str(instruction.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names_of(inner)
            globals_ += more
            names += others
    return tuple(dict.fromkeys(globals_)), tuple(dict.fromkeys(names))


def _is_of_a_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES

"""Inputs in objects of a script's own: what they hold is opened, and put into a bare one again.

An object that was left whole would stand in every look as it came, with the numbers of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.samples.row_lists import is_array, is_list

_DEEPEST, _LONGEST = 5, 64
"""Objects and containers inside an object are looked into so far."""
_OTHERS = frozenset({"builtins", "functools", "torch", "numpy", "fastclip"})
"""Whose objects hold no rows, or are no one's to take apart."""


def fields_of(value: Any) -> dict[str, Any] | None:
    """What an object holds by name, if there are tensors, arrays or lists among it; else None."""
    kind: Any = type(value)
    if kind.__module__.split(".")[0] in _OTHERS or isinstance(
        value, (Tensor, nn.Module, Enum, type)
    ):
        return None
    if callable(value) or not _can_be_made(kind) or not _holds(fields := _fields(value), 0):
        return None
    return fields


def bare(kind: Any) -> Any:
    """An object of this class that holds nothing."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class of Python's own (SimpleNamespace)
        return kind.__new__(kind)


@cache
def _can_be_made(kind: type) -> bool:
    try:
        bare(kind)
    except Exception:
        return False
    return True


@cache
def _slots(kind: type) -> tuple[str, ...]:
    found = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _fields(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def _holds(value: Any, depth: int) -> bool:
    """Whether there may be rows in it."""
    if isinstance(value, (Tensor, PackedSequence)) or is_array(value):
        return True
    if depth > _DEEPEST or isinstance(value, nn.Module):
        return False
    if isinstance(value, Mapping):
        return any(_holds(x, depth + 1) for x in [*value.values()][:_LONGEST])
    if is_list(value):
        several = len(value) > 1 and isinstance(value[0], (bool, int, float, str))
        return several or any(_holds(x, depth + 1) for x in value[:_LONGEST])
    if type(value).__module__.split(".")[0] in _OTHERS or callable(value):
        return False
    return _holds(_fields(value), depth + 1)

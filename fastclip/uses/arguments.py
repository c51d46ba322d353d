"""The arguments of a function, which are tensors, numbers, and lists of them: faster than pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastclip._torch import tree_leaves, tree_map

_LEAVES = (Tensor, int, float, str, type(None), slice)


def leaves_of(value: Any) -> list[Any]:
    """What is in nested tuples, lists and dictionaries."""
    kind = type(value)
    if kind is tuple or kind is list:
        found: list[Any] = []
        for x in value:
            if isinstance(x, _LEAVES):
                found.append(x)
            else:
                found += leaves_of(x)
        return found
    if kind is dict:
        return leaves_of(list(value.values()))
    return [value] if isinstance(value, _LEAVES) else tree_leaves(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest, of what the function makes of its leaves."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(function, x) for x in value])
    if kind is list:
        return [mapped(function, x) for x in value]
    if kind is dict:
        return {name: mapped(function, x) for name, x in value.items()}
    return function(value) if isinstance(value, _LEAVES) else tree_map(function, value)


def outputs(out: Any) -> list[Tensor]:
    """The tensors that a gradient may come to."""
    tensors = [x for x in leaves_of(out) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]

"""Random numbers that a function draws, which a second call in the backward pass repeats."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import tree_leaves, tree_map
from fastclip.errors import GraphError
from fastclip.samples.randomness import has_moved, put_back, state_of
from fastclip.trace.tracer import all_aside

# -------------------------------------------------------------------------------------------------
# The arguments of a function, which are tensors, numbers, and lists of them: faster than pytrees.


_LEAVES = (Tensor, int, float, str, type(None), slice)


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of nested tuples, lists and dictionaries."""
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
    """Applies the function to the leaves, in the same structure."""
    kind = type(value)
    if kind is tuple:
        return tuple([mapped(function, x) for x in value])
    if kind is list:
        return [mapped(function, x) for x in value]
    if kind is dict:
        return {name: mapped(function, x) for name, x in value.items()}
    return function(value) if isinstance(value, _LEAVES) else tree_map(function, value)


def outputs(out: Any) -> list[Tensor]:
    """Returns the tensors that a gradient may reach."""
    tensors = [x for x in leaves_of(out) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


# -------------------------------------------------------------------------------------------------


_ALIKE, _ALIKE_IN_FLOAT64 = 2e-2, 1e-9
"""Relative distance of values that differ only by rounding; float32 may come from half precision."""


class Chance:
    """The states of the generators that a function may draw from, before and after a call.

    Args:
        func: the function. leaves: its arguments.
    """

    def __init__(self, func: Callable, leaves: Sequence[Any]) -> None:
        self._generators = _generators(func, leaves)
        self._before = self._states()
        self._after: list[Any] = []

    def drew(self) -> bool:
        """Notes that the call has returned, and whether it has drawn."""
        self._after = self._states()
        return self._moved(self._before)

    def put_back(self) -> None:
        """Restores the generators to their states before the call."""
        for one, state in zip(self._generators, self._before, strict=True):
            put_back(one, state)

    @contextmanager
    def again(self, label: str) -> Iterator[None]:
        """Context in which the call is repeated with the same random numbers. Later draws are unchanged.

        Raises:
            GraphError: it has drawn more, or less.
        """
        now = self._states()
        self.put_back()
        try:
            yield
            moved = self._moved(self._after)
        finally:
            for one, state in zip(self._generators, now, strict=True):
                put_back(one, state)
        if moved:
            raise other_numbers(label, "random numbers")

    def _states(self) -> list[Any]:
        return [state_of(one) for one in self._generators]

    def _moved(self, since: list[Any]) -> bool:
        return any(has_moved(*pair) for pair in zip(self._generators, since, strict=True))


def is_of_torch(func: Callable) -> bool:
    """Whether torch wrote the function: it draws from torch's generators, or from one it is given."""
    namespace = getattr(func, "namespace", None) or getattr(func, "__module__", None) or "torch"
    return namespace.partition(".")[0] in ("aten", "prims", "torch")


def other_numbers(label: str, what: str) -> GraphError:
    """Returns the error for a function whose second call differs from the first."""
    return GraphError(
        f"{label}: a second call for the per-sample gradients gives other {what}, so these would "
        "be wrong. Draw random numbers outside of it, and pass them as an argument.",
        doc="random-numbers",
    )


def given(out: Any, changed: Tensor | None) -> list[Tensor]:
    """Returns all tensors that a function gave, also those that only its own backward reads.

    Args:
        out: what it returned. changed: the argument that it changed in place.
    """
    found = [x for x in leaves_of(out) if isinstance(x, Tensor) and x is not changed]
    # the output hook passes on a clone of a number; anything else is passed unchanged, and may change
    shown = [x.detach() if is_number(x) else x.detach().clone() for x in found]
    return shown if changed is None else [changed.detach().clone(), *shown]


def is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def repeated(label: str, again: list[Tensor], first: list[Tensor]) -> list[Tensor]:
    """Compares a repeated call with the first: one boolean per tensor.

    Raises:
        GraphError: types or shapes differ.
    """
    if _kinds(again) != _kinds(first):
        raise other_numbers(label, "values")
    return [_same(*pair) for pair in zip(again, first, strict=True)]


def alike(x: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """Whether these are equal up to the rounding of values of this size, where all are finite."""
    finite = x.isfinite() & y.isfinite() & size.isfinite()
    far, most = (torch.where(finite, z, 0).norm() for z in (x - y, size))
    return far <= most * _rounding(x)


def _kinds(tensors: list[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(x.dtype, x.shape) for x in tensors]


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Whether a repeated call gave the same, entry by entry: a rare difference counts too."""
    if not is_number(x) or not x.numel():
        return (x == y).all()
    if x.itemsize == 1:  # eight bits, with which nothing is computed
        x, y = x.float(), y.float()
    finite = x.isfinite() & y.isfinite()
    equal = finite | (x == y) | (x.isnan() & y.isnan())
    far, most = (torch.where(finite, z, 0).abs().amax() for z in (x - y, y))
    return equal.all() & (far <= most * _rounding(x)) & alike(x, y, y.abs())


def _rounding(x: Tensor) -> float:
    return _ALIKE if x.dtype not in (torch.float64, torch.complex128) else _ALIKE_IN_FLOAT64


def check_repeats(label: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a function that is not torch's twice, and returns its output if both calls agree.

    Otherwise a difference between two runs of the model would look like another sample's influence.

    Raises:
        GraphError: the calls differ, so the function draws from unknown generators.
    """
    leaves = leaves_of((args, kwargs))
    chance, tensors = Chance(func, leaves), [x for x in leaves if isinstance(x, Tensor)]
    versions = [x._version for x in tensors]
    out = func(*args, **kwargs)
    chance.drew()
    if versions != [x._version for x in tensors]:  # its inputs are no longer there
        return out
    with all_aside():  # the trace does not see these comparisons
        first = given(out, None)
        with chance.again(label):
            again = given(func(*args, **kwargs), None)
        if not all(map(bool, repeated(label, again, first))):
            raise other_numbers(label, "values")
    return out


def _generators(func: Callable, leaves: Sequence[Any]) -> list[Any]:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []  # a captured function has run before, and drew nothing
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    found = {id(x): x for x in leaves if isinstance(x, torch.Generator)}
    devices = {x.device for x in tensors}
    modules: list[Any] = []
    if not is_of_torch(func):
        devices.add(torch.device("cpu"))
        modules = [random, *([sys.modules["numpy"].random] if "numpy" in sys.modules else [])]
    own = [_default(device) for device in devices]
    # the dry run wraps the functions that draw (samples/randomness.py)
    own += [getattr(inspect.unwrap(module.random), "__self__", None) for module in modules]
    found |= {id(one): one for one in own if one is not None}
    return list(found.values())


def _default(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index or 0] if generators else None

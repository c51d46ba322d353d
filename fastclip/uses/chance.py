"""Random numbers that a function draws: called again in the backward pass, it draws the same ones."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import GraphError
from fastclip.samples.randomness import has_moved, put_back, state_of


class Chance:
    """Where the generators that a function may draw from stand, before and after a call of it.

    Args:
        func: the function. leaves: its arguments.
    """

    def __init__(self, func: Callable, leaves: Sequence[Any]) -> None:
        self._generators = _generators(func, leaves)
        self._before = self._states()
        self._after: list[Any] = []

    def drew(self) -> bool:
        """The call has returned: whether it has drawn."""
        self._after = self._states()
        return self._moved(self._before)

    def put_back(self) -> None:
        """The generators stand where they stood before the call."""
        for one, state in zip(self._generators, self._before, strict=True):
            put_back(one, state)

    @contextmanager
    def again(self, label: str) -> Iterator[None]:
        """The call is repeated inside, and draws what it drew; nothing that comes later is changed.

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
    """A function that was called again did not do what it did."""
    return GraphError(
        f"{label}: called again for the samples' gradients, it gives other {what}, which would make "
        "them wrong. Draw random numbers outside of it, and pass them as an argument."
    )


def _generators(func: Callable, leaves: Sequence[Any]) -> list[Any]:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []  # what runs in a graph has run before, and drew nothing
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    found = {id(x): x for x in leaves if isinstance(x, torch.Generator)}
    devices = {x.device for x in tensors}
    modules: list[Any] = []
    if not is_of_torch(func):
        devices.add(torch.device("cpu"))
        modules = [random, *([sys.modules["numpy"].random] if "numpy" in sys.modules else [])]
    own = [_default(device) for device in devices]
    own += [getattr(module.random, "__self__", None) for module in modules]
    found |= {id(one): one for one in own if one is not None}
    return list(found.values())


def _default(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index or 0] if generators else None

"""What holds settings, read by name: mappings, lists, objects with slots, classes."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from types import MappingProxyType
from typing import Any

from torch import Tensor


class Items:
    """A list, read by number."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def get(self, number: int) -> Any:
        """The item of this number."""
        return self.held[number] if number < len(self.held) else None


class Slots:
    """An object that has slots, read by their names, but those that are its own affair."""

    def __init__(self, held: Any) -> None:
        self.held = held
        slots = [vars(base).get("__slots__", ()) for base in type(held).__mro__]
        names = [n for own in slots for n in ((own,) if isinstance(own, str) else own)]
        self.names = [] if isinstance(held, Tensor) else [n for n in names if n[:1] != "_"]

    def __len__(self) -> int:
        return len(self.names)

    def get(self, name: str) -> Any:
        """What the slot holds."""
        return getattr(self.held, name, None)


class Scripted(Slots):
    """A module of TorchScript: whether it trains, and its own tensors."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.names = [
            n for n, _ in (*held.named_parameters("", False), *held.named_buffers("", False))
        ]


class Attributes:
    """A class, read by name."""

    def __init__(self, held: type) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(vars(self.held))

    def get(self, name: str) -> Any:
        """What the class itself holds under this name."""
        return vars(self.held).get(name)

    def names(self) -> list[str]:
        """Of its settings, and of its forward."""
        own = vars(self.held).items()
        return [n for n, v in own if n == "forward" or not (callable(v) or n.startswith("__"))]


def native(table: Any) -> Any:
    """A table as Python's own: a mapping, or a list."""
    if isinstance(table, Attributes):
        return vars(table.held)
    return table.held if isinstance(table, Items) else table


def reader(table: Any) -> Callable[[Any, Any], Any]:
    """What reads a name of such a table; of a list, that is as long as it was."""
    if isinstance(table, (list, tuple)):
        return getitem
    return next((get for get in _READERS if getattr(type(table), "get", None) is get), _get)


def _get(table: Any, name: Any) -> Any:
    return table.get(name)


_READERS = (dict.get, MappingProxyType.get)

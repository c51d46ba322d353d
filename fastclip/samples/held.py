"""Where settings are held, each in one place: mappings, lists, objects with slots, classes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import getitem
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

Key = tuple[Hashable, ...]


class Place(NamedTuple):
    """A name in a table.

    Args:
        key: by which it is known again. read: reads a name of the table.
    """

    key: Key
    read: Callable[[Any, Any], Any]
    table: Any
    name: Any

    @property
    def held(self) -> Any:
        """What stands there now; None in a list that is shorter than it was."""
        try:
            return self.read(self.table, self.name)
        except LookupError:
            return None


def places_of(table: Any, names: Iterable[Any], owner: Any = None) -> Iterator[Place]:
    """Of these names in a list, a mapping, or an object.

    Args:
        owner: whose the table is, where it is made anew (a class's).
    """
    read, number = _reader(table), id(table if owner is None else owner)
    return (Place((number, name), read, table, name) for name in [*names])


def _reader(table: Any) -> Callable[[Any, Any], Any]:
    if isinstance(table, (list, tuple)):
        return getitem
    if not isinstance(table, Mapping):
        return _attribute
    return next((get for get in _GETS if getattr(type(table), "get", None) is get), _get)


def _attribute(held: Any, name: str) -> Any:
    return getattr(held, name, None)


def _get(table: Any, name: Any) -> Any:
    return table.get(name)


_GETS = (dict.get, MappingProxyType.get)


def slots_of(held: Any) -> list[str]:
    """Names of an object's slots, but those that are its own affair."""
    slots = [vars(base).get("__slots__", ()) for base in type(held).__mro__]
    names = [n for own in slots for n in ((own,) if isinstance(own, str) else own)]
    return [] if isinstance(held, Tensor) else [n for n in names if n[:1] != "_"]


def settings_of(kind: type) -> list[str]:
    """Names of a class's settings, and of its forward."""
    own = vars(kind).items()
    return [n for n, v in own if n == "forward" or not (callable(v) or n.startswith("__"))]

"""Whether something has changed since it was read: one mechanism for all uses.

A fact is a name and a value. A step checks thousands, which hardly ever change. So they are read in
columns without a Python loop, and names are searched only if a value differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from fastclip.errors import FastclipError


def which(x: Any) -> Hashable:
    """Returns the identity of a value: numbers and text themselves, else the object."""
    return (type(x), x) if isinstance(x, (int, float, str, bytes)) else id(x)


class Facts(NamedTuple):
    """A column of facts.

    Args:
        names: of the facts, in their order. None: `read` gives the names of those that hold.
        read: reads all of them. If one is missing (LookupError), all have changed.
        of: gives the relevant part of an object that is not the same one. None: values are compared.
    """

    names: Sequence[Hashable] | None
    read: Callable[[], Iterable[Any]]
    of: Callable[[Any], Any] | None = None

    def look(self) -> list[Any]:
        """Returns the current values."""
        try:
            return [*self.read()]
        except LookupError:
            return []

    def changed(self, before: list[Any], now: list[Any]) -> Iterable[Hashable]:
        """Returns names of the changed facts."""
        if self.names is None:
            return {*before} ^ {*now}
        if len(before) != len(now):
            return self.names
        of = self.of or _itself
        samples = zip(self.names, before, now, strict=False)
        return (name for name, x, y in samples if x is not y and of(x) != of(y))


def _itself(x: Any) -> Any:
    return x


def fact(name: Hashable, read: Callable[[], Any]) -> Facts:
    """Makes a column of one fact."""
    return Facts((name,), lambda: (read(),))


class Snapshot:
    """The values of some facts at one time.

    It keeps the values, so no other object can get the id of one that was seen.

    Args:
        facts: columns of them.
    """

    def __init__(self, facts: Iterable[Facts]) -> None:
        given = [column for column in facts if column.names is None or column.names]
        self._columns = [(one, one.look()) for one in given]

    def _others(self) -> Iterator[tuple[Facts, list[Any], list[Any]]]:
        """Yields columns with other objects, or values, than before."""
        for column, before in self._columns:
            now = column.look()
            if column.of is None:
                same = before == now
            else:
                same = len(before) == len(now) and all(map(is_, before, now))
            if not same:
                yield column, before, now

    def stands(self) -> bool:
        """Whether the same objects are there: faster than `changed`, which also accepts equal ones."""
        return next(self._others(), None) is None

    def changed(self) -> list[Hashable]:
        """Returns names of the changed facts, of all columns."""
        return [name for column, *read in self._others() for name in column.changed(*read)]

    def values(self) -> dict[Hashable, list[Any]]:
        """Returns the relevant parts of the values, by name."""
        found: dict[Hashable, list[Any]] = {}
        for column, seen in self._columns:
            of = column.of or _itself
            for name, x in zip(column.names or seen, seen, strict=False):
                found.setdefault(name, []).append(of(x))
        return found

    def require(self, error: Callable[[str], FastclipError], said: str) -> None:
        """Raises an error if anything has changed.

        Args:
            error: its class. said: its message, with {names} for the changed names.
        """
        names = self.changed()
        if names:
            raise error(said.format(names=", ".join(map(str, names))))

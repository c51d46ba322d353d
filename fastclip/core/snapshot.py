"""Whether something has changed since it was read: one mechanism for all who ask.

A fact is a name, and what is read of it. Thousands are asked for in a step, and hardly ever change: so
they are read in columns, without a line of Python for each, and names are looked for where one differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from fastclip.errors import FastclipError


def which(x: Any) -> Hashable:
    """What tells a value from others: of numbers and text these, of all else which object it is."""
    return (type(x), x) if isinstance(x, (int, float, str, bytes)) else id(x)


class Facts(NamedTuple):
    """A column of facts.

    Args:
        names: of the facts, in their order. None: what is read are the names of those that hold.
        read: reads all of them. Where that fails for want of one (LookupError), all have changed.
        of: what counts of an object where it is not the same one. None: values are compared.
    """

    names: Sequence[Hashable] | None
    read: Callable[[], Iterable[Any]]
    of: Callable[[Any], Any] | None = None

    def look(self) -> list[Any]:
        """What they are now."""
        try:
            return [*self.read()]
        except LookupError:
            return []

    def changed(self, before: list[Any], now: list[Any]) -> Iterable[Hashable]:
        """Names of those that have."""
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
    """One alone."""
    return Facts((name,), lambda: (read(),))


class Snapshot:
    """What some facts were.

    What was read is held as long, so that no other object takes the number of one that was seen.

    Args:
        facts: columns of them.
    """

    def __init__(self, facts: Iterable[Facts]) -> None:
        given = [column for column in facts if column.names is None or column.names]
        self._columns = [(one, one.look()) for one in given]

    def _others(self) -> Iterator[tuple[Facts, list[Any], list[Any]]]:
        """Columns in which other objects, or values, are read than before."""
        for column, before in self._columns:
            now = column.look()
            if column.of is None:
                same = before == now
            else:
                same = len(before) == len(now) and all(map(is_, before, now))
            if not same:
                yield column, before, now

    def stands(self) -> bool:
        """The same objects are there: quicker than `changed`, which lets others be worth as much."""
        return next(self._others(), None) is None

    def changed(self) -> list[Hashable]:
        """Names of those that are not what they were."""
        return [name for column, *read in self._others() for name in column.changed(*read)]

    def values(self) -> dict[Hashable, list[Any]]:
        """By name, what counts of what was read."""
        found: dict[Hashable, list[Any]] = {}
        for column, seen in self._columns:
            of = column.of or _itself
            for name, x in zip(column.names or seen, seen, strict=False):
                found.setdefault(name, []).append(of(x))
        return found

    def require(self, error: Callable[[str], FastclipError], said: str) -> None:
        """Nothing may have changed.

        Args:
            error: its class. said: its message, with {names} in the place of what has changed.
        """
        names = self.changed()
        if names:
            raise error(said.format(names=", ".join(map(str, names))))

"""A history that others read while steps are recorded: threads, and handlers of signals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar, cast

from opacus.accountants import IAccountant

from fastclip.accounting.history import holding
from fastclip.forks import this_process


class OwnLock:
    """Of one process: a fork has one of its own, whichever thread of its parent held the other."""

    def __init__(self) -> None:
        self._of = this_process(), RLock()

    def now(self) -> Any:
        """The lock of this process, to be held in a `with`."""
        if self._of[0] != this_process():
            self._of = this_process(), RLock()
        return self._of[1]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def undisturbed(method: _Method) -> _Method:
    """Other threads wait; a signal's handler in this one finds what was recorded so far."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock.now():
            return method(self, *args, **kwargs)

    return cast("_Method", alone)


def step_beside(book: IAccountant, above: type, *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Take a step of the class after `above` beside the history; nothing of `book` changes.

    Opacus' accountants take the last entry away and put it back; a reader in between would miss it.

    Returns:
        What writes the step down, in one assignment.
    """
    kind: Any = type(book)
    opacus = _is_opacus(kind, above)
    last = max(len(book.history) - 1, 0) if opacus else 0  # theirs see the last entry only
    twin = holding(book, book.history[last:])
    recorded: Any = super(above, twin)  # type: ignore[arg-type]
    recorded.step(*args, **kwargs)

    def write_down() -> None:
        if not opacus:  # whatever else it keeps
            vars(book).update({**vars(twin), "history": book.history})
        book.history[last:] = twin.history

    return write_down


@cache
def _is_opacus(kind: type, above: type) -> bool:
    own = (base for base in kind.__mro__ if not issubclass(base, above) and "step" in vars(base))
    return next(own).__module__.startswith(("opacus.", "fastclip."))

"""Functions of other libraries whose running calls are recorded."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Noted:
    """A function whose calls are recorded. A wrapper replaces it while any watcher is alive.

    Args:
        where, name: the module or class that has it.
    """

    def __init__(self, where: Any, name: str) -> None:
        self._where, self._name = where, name
        self._askers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: dict[int, list[Any]] = {}
        """Running calls by thread, the innermost last."""
        self._plain: Any = None
        self._lock = threading.RLock()

    def innermost(self) -> Any:
        """Returns the arguments of this thread's innermost call; None if there is none."""
        own = self._running.get(threading.get_ident())
        return own[-1] if own else None

    def watch(self, asker: Any) -> None:
        """Records calls as long as `asker` is alive."""
        with self._lock:
            if asker not in self._askers:
                self._askers.add(asker)
                weakref.finalize(asker, self._rest).atexit = False
            if self._plain is None:
                self._plain = plain = getattr(self._where, self._name)
                setattr(self._where, self._name, self._heard(plain))

    def forget(self, asker: Any) -> None:
        """Removes a watcher."""
        self._askers.discard(asker)
        self._rest()

    def _rest(self) -> None:
        """Restores the function after the last watcher, unless others have wrapped it meanwhile."""
        with self._lock:
            now = getattr(self._where, self._name)
            ours = getattr(now, "__wrapped__", None) is self._plain
            if self._plain is not None and ours and not [*self._askers]:
                setattr(self._where, self._name, self._plain)
                self._plain = None

    def _heard(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def heard(*args: Any, **kwargs: Any) -> Any:
            return self._called(plain, *args, **kwargs)

        heard._torchdynamo_disable = True  # type: ignore[attr-defined]
        return heard

    def _called(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noting(args):
            return plain(*args, **kwargs)

    @contextmanager
    def _noting(self, call: Any) -> Iterator[None]:
        thread = threading.get_ident()
        self._running.setdefault(thread, []).append(call)
        try:
            yield
        finally:
            self._running[thread].pop()
            if not self._running[thread]:
                del self._running[thread]

"""Memory that a look has taken and freed goes back to the system, so that a step does not add to it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # a system without such a library
        return None


def give_back() -> None:
    """Ask glibc to return the pages of its heap that hold nothing; elsewhere nothing happens."""
    trim = _trim()
    if trim is not None:
        trim(0)

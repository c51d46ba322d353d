"""Torch's global generator is everybody's: whoever sets it for a while, and puts it back, does so alone.

A look at a model starts it at a seed that anybody can read in this package. What another thread took
from it meanwhile would be known to all, and drawn again once it is put back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Keeper:
    """Of the global generator: one thread at a time, which may come in again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = 0


_keeper = _Keeper()
_unknown = False
"""This process was forked while another thread, or the one that forked, had it set aside."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, no other thread takes a seed from torch's global generator, or sets it aside.

    Nothing inside may wait for another thread that would do so.
    """
    keeper = _keeper  # a fork inside has another one, and still leaves this one as it came
    with keeper.lock:
        keeper.inside += 1
        try:
            yield
        finally:
            keeper.inside -= 1


def stands_elsewhere() -> bool:
    """Whether this process' global generator is a copy of one that was set aside."""
    return _unknown


def _renew() -> None:
    """The thread that holds the lock may not be there in a fork."""
    global _keeper, _unknown
    _unknown = _keeper.inside > 0
    _keeper = _Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

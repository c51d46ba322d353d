"""Which process this is: a fork has all that its parent had in memory, and is another one."""

from __future__ import annotations

import os

_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


def this_process() -> tuple[int, int]:
    """Equal in one process, and in no two of which one is a fork of the other.

    Returns:
        The process' number, which systems give away again, and the forks on the way to it.
    """
    return os.getpid(), _forks

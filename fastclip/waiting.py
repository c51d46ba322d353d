"""What a first step is busy with, as a line of the terminal: nothing else tells that it has not hung."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE = 2.0
"""Seconds of work of one kind that are not worth a line."""


class Work:
    """Work of one kind that is done bit by bit, nobody knows of how many.

    After some patience each bit is shown while it lasts: on standard error where that is a terminal
    and tqdm is installed, by one process of a machine. No line stays, and no thread is started.

    Args:
        what: it is, for its reader.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bits, self._seconds = 0, 0.0

    @contextmanager
    def bit(self, name: str = "") -> Iterator[None]:
        """One bit of it goes on. name: of what it is done for."""
        self._bits += 1
        begun = time.perf_counter()
        named = f" ({name})" if name else ""
        patient = self._seconds < _PATIENCE
        line = (
            None if patient else _line(f"{self._what}: {self._bits}{named}, {self._seconds:.0f} s")
        )
        try:
            yield
        finally:
            if line is not None:
                line.close()
            self._seconds += time.perf_counter() - begun


def _line(text: str) -> Any:
    """It is shown until it is closed; None where nobody could see it."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Line(tqdm):
        """Without the thread that looks after bars which nobody moves."""

        monitor_interval = 0

    return Line(desc=f"fastclip {text}", bar_format="{desc}", leave=False)

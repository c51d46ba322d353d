"""What a first step is busy with, as a line of the terminal: nothing else tells that it has not hung."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_PATIENCE = 2.0
"""Seconds of work of one kind that are not worth a line."""


class Work:
    """Work of one kind that is done bit by bit, nobody knows of how many.

    After some patience each bit is shown while it lasts: on standard error where that is a terminal, by
    one process of a machine. No line stays. (No progress bar of a library: these want to know how much
    there is, and start threads and locks of several processes.)

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
        terminal = None if self._seconds < _PATIENCE else _terminal()
        if terminal is not None:
            named = f" ({name})" if name else ""
            _write(terminal, f"fastclip {self._what}: {self._bits}{named}, {self._seconds:.0f} s")
        try:
            yield
        finally:
            if terminal is not None:
                _write(terminal, "", end="\r")
            self._seconds += time.perf_counter() - begun


def _terminal() -> TextIO | None:
    """Where somebody reads."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    with suppress(Exception):  # of whatever stands in its place
        return sys.stderr if rank == "0" and sys.stderr.isatty() else None
    return None


def _write(terminal: TextIO, text: str, end: str = "") -> None:
    """Put this in the place of the terminal's last line. A terminal that has gone stops nothing."""
    with suppress(Exception):
        width = shutil.get_terminal_size().columns - 1
        terminal.write(f"\r{text[:width]:<{width}}{end}")
        terminal.flush()

"""A file that one process holds: nobody else writes it, and what was added is on the disk."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path
from typing import Any

from fastclip.errors import ArgumentError
from fastclip.files import keep_names
from fastclip.forks import this_process

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out
    fcntl = None  # type: ignore[assignment]

_HELD: dict[tuple[int, int], tuple[int, int]] = {}
"""Device and number of each file that is held -> by whom: its own locks do not keep a process out."""


class LostFile(OSError):
    """What is under the path is not, or not alone, what this process has written."""


class HeldFile:
    """A file that only grows, in whole pieces; whatever is found under its path is compared first.

    Formal guarantee: `add` returns when all of it is on the disk (fsync), in the file that the path
    leads to, behind all that was added before and nothing else. A piece that failed is cut off by the
    next.

    Args:
        path: of a regular file, which is made if it is not there; its folder must exist. Symbolic links
            are followed, each time.

    Raises:
        ArgumentError: it is no regular file, or is being written by somebody else.
        OSError: it cannot be opened or made.
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(os.path.abspath(path))
        self._file: int | None = None
        self._process = this_process()
        self._unsure = 0
        """Bytes that may lie behind the end."""
        self._open()
        self._begun = len(self.content())
        self._end: tuple[int, Any] = self._begun, None

    @property
    def size(self) -> int:
        """Bytes that were added, or found."""
        return self._end[0]

    @property
    def mark(self) -> Any:
        """Of the piece that was added last."""
        return self._end[1]

    def content(self) -> bytes:
        """All of it."""
        assert self._file is not None
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def cut(self, size: int, mark: Any = None) -> None:
        """What lies behind `size` goes when something is added; `mark` is of what ends there."""
        self._unsure += self.size - size  # first: too many do no harm
        self._end = size, mark

    def add(self, piece: bytes, mark: Any) -> None:
        """Write it to the disk, whole; `mark` goes with it.

        Raises:
            LostFile, OSError: it could not be written.
        """
        self.check()
        assert self._file is not None
        if self._unsure:
            os.ftruncate(self._file, self.size)
        self._unsure = len(piece)
        if os.write(self._file, piece) < len(piece):
            raise OSError("no room for a whole line")
        os.fsync(self._file)
        self._check_place()  # of what has just been written
        self._end = self.size + len(piece), mark
        self._unsure = 0

    def check(self) -> None:
        """The path leads to what this process has written, and nobody else writes it.

        Raises:
            LostFile: it does not, and why.
        """
        if self._process != this_process():
            raise LostFile("this is a fork of the process that opened it")
        if self._file is None:
            raise LostFile("it was closed")
        self._check_place()
        if not _lock(self._file):
            raise LostFile("another process has taken it")
        if not self.size <= os.fstat(self._file).st_size <= self.size + self._unsure:
            raise LostFile("somebody else has written to it")

    def holds(self) -> bool:
        """Whether `check` finds nothing."""
        try:
            self.check()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let somebody else write."""
        file, self._file = self._file, None
        if file is not None:
            key = _key(os.fstat(file))
            os.close(file)
            if _HELD.get(key) == this_process() == self._process:
                del _HELD[key]

    def give_up(self) -> None:
        """Close it; one that was made, or was empty, is so again."""
        if self.holds() and not self._begun:
            assert self._file is not None
            os.ftruncate(self._file, 0)
            if self._made:
                self.path.resolve().unlink()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _open(self) -> None:
        self._made = not self.path.exists()
        if not self._made:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                raise ArgumentError(
                    f"the ledger {self.path} is no regular file, so it would keep nothing; name another"
                )
            if self._is_held(found):  # perhaps by an engine that nobody has any more
                gc.collect()
            if self._is_held(found):
                raise self._taken()
        binary = getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o600)
        if self._is_held(os.fstat(self._file)) or not _lock(self._file):
            os.close(self._file)
            self._file = None
            raise self._taken()
        _HELD[_key(os.fstat(self._file))] = self._process
        if self._made:
            keep_names(self.path.resolve().parent)

    @staticmethod
    def _is_held(found: os.stat_result) -> bool:
        return _HELD.get(_key(found)) == this_process()

    def _taken(self) -> ArgumentError:
        return ArgumentError(
            f"the ledger {self.path} is being written by another engine or process; give each run a "
            "file of its own, or end the other one first (its engine.write_ahead(None))"
        )

    def _check_place(self) -> None:
        assert self._file is not None
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise LostFile("somebody has moved or deleted it") from None
        if _key(found) != _key(os.fstat(self._file)):
            raise LostFile("somebody has put another file in its place")


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    """Keep other processes out; the lock is of this process alone, its children do not hold it.

    It is asked for at each write: whatever else in this process closes the file gives it up.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True

"""A ledger on disk: every step is there before it is released, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastclip.accounting.protected import KEY as PROTECTED
from fastclip.accounting.protected import Protected, protected_by
from fastclip.accounting.segments import (
    Entry,
    Segments,
    read_segments,
    remainder,
    runs,
    saved_entries,
)
from fastclip.errors import ArgumentError, StepError

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out
    fcntl = None  # type: ignore[assignment]

_OPEN: set[Path] = set()
"""Files that this process writes: its own locks do not keep it out."""


class WriteAheadLog:
    """A file to which lines are only ever added: a checksum, and what was recorded.

    Formal guarantee: `record` returns when the line is on the disk (fsync). A line that a killed process
    left half written is of a step that was not released, and is cut off; any other damage is refused.
    No file holds fewer steps than were released, and each process that was killed adds one at most.

    Args:
        path: of the file, which is begun or gone on with. Its folder must exist.
        writes: False on ranks that leave the writing to another: they only read what is there.

    Raises:
        ArgumentError: the file is damaged, or is being written by somebody else.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Any, writes: bool = True) -> None:
        self.path = Path(path).resolve()
        self._file: int | None = None
        self._torn = False
        self._process = os.getpid()
        self._known: Segments = {}
        self._whom = Protected()
        if writes:
            self._open()
        *lines, torn = self._content().split(b"\n")
        for number, line in enumerate(lines, 1):
            self._read(number, line)
        self._size = sum(len(line) + 1 for line in lines)
        if _whole(torn[:-1]) or _whole(torn):  # all of it is there, but for its end
            self._read(len(lines) + 1, torn)
            self._close_line(self._size + len(torn))
        elif torn and self._file is not None:
            os.ftruncate(self._file, self._size)

    def found(self) -> tuple[Segments, Protected]:
        """Every step that the file holds, by name, and whom they protect."""
        return {name: list(entries) for name, entries in self._known.items()}, self._whom

    def catch_up(self, segments: Segments, whom: Protected) -> None:
        """Write what the file lacks of these.

        Raises:
            StepError: it could not be written.
        """
        for name, entries in segments.items():
            known = self._known.get(name, [])
            rest = remainder(entries, known)
            if rest is None and remainder(known, entries) is None:
                rest = entries  # another story under this name: both count
            if rest:
                self.record(name, rest, whom)

    def record(self, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Write what is about to be released.

        Raises:
            StepError: it could not be written; nothing may be released.
        """
        if self._process != os.getpid():
            raise StepError(
                f"the ledger {self.path} belongs to the process that opened it, and this is a fork of "
                "it: call engine.write_ahead with a file of its own here"
            )
        entries = list(entries)
        if self._file is not None:
            said = {"name": name, "entries": saved_entries(entries), PROTECTED: whom.saved()}
            text = json.dumps(said).encode()
            self._append(self._file, b"%08x %s\n" % (zlib.crc32(text), text))
        self._note(name, entries)

    def close(self) -> None:
        """Let somebody else write."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if self._process == os.getpid():
                _OPEN.discard(self.path)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _append(self, file: int, line: bytes) -> None:
        try:
            self._check_untouched(file)
            if self._torn:
                os.ftruncate(file, self._size)
            self._torn = True
            if os.write(file, line) < len(line):
                raise OSError("no room for a whole line")
            os.fsync(file)
        except OSError as error:
            raise StepError(
                f"the ledger {self.path} cannot be written ({error}), so this step is not released; "
                "make room, and go on with the next batch"
            ) from error
        self._torn = False
        self._size += len(line)

    def _open(self) -> None:
        taken = ArgumentError(
            f"the ledger {self.path} is being written by another engine or process; give each run a "
            "file of its own, or end the other one first"
        )
        if self.path in _OPEN:
            raise taken
        new = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        _OPEN.add(self.path)
        if not _lock(self._file):
            self.close()
            raise taken
        if new:
            _write_name(self.path.parent)

    def _check_untouched(self, file: int) -> None:
        found = os.fstat(file)
        if not found.st_nlink:
            raise OSError("somebody has deleted it")
        if not _lock(file) or (found.st_size != self._size and not self._torn):
            raise OSError("somebody else has written to it")

    def _content(self) -> bytes:
        if self._file is None:
            return self.path.read_bytes() if self.path.exists() else b""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def _read(self, number: int, line: bytes) -> None:
        if not _whole(line):
            self.close()
            raise ArgumentError(
                f"line {number} of the ledger {self.path} is damaged, so what was spent is not known; "
                "restore the file from a copy, or name another one and count its steps yourself"
            )
        said = json.loads(line.partition(b" ")[2])
        state = {"mechanism": "", "history": said["entries"]}
        for entries in read_segments(state, "", str(self.path)).values():
            self._whom = self._whom.beside(protected_by(said, entries))
            self._note(said["name"], entries)

    def _close_line(self, end: int) -> None:
        if self._file is not None:
            self._size = end
            self._append(self._file, b"\n")

    def _note(self, name: str, entries: Iterable[Entry]) -> None:
        known = self._known.setdefault(name, [])
        for entry in entries:
            last = runs([*known[-1:], entry])
            known[-1:] = last


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


def _whole(line: bytes) -> bool:
    checksum, _, text = line.partition(b" ")
    return checksum == b"%08x" % zlib.crc32(text)


def _write_name(folder: Path) -> None:
    """A new file's name is on the disk as well."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

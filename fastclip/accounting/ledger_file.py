"""A ledger on disk. Every step is in the file before it is released, even if the process is killed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastclip.accounting.steps import PROTECTED_KEY as PROTECTED
from fastclip.accounting.steps import (
    Entry,
    Protected,
    Segments,
    Spent,
    protected_by,
    read_segments,
    remainder,
    runs,
    saved_entries,
)
from fastclip.core.system import keep_names, this_process
from fastclip.distributed.ranks import Ranks, together
from fastclip.errors import ArgumentError, StepError

# -------------------------------------------------------------------------------------------------
# The lines of a ledger's file, each chained to all lines before it.
#
# The first line holds the format and a random name, which makes the chain unique to this file. Each
# other line is a digest, a space and JSON. The digest is the SHA-256 of the previous line's digest and
# this JSON. A line that was changed, lost, repeated or moved therefore breaks the chain. Whole lines
# lost from the end do not, because the file alone does not show that there were more.


_FORMAT = b"fastclip ledger 2 "
_FIRST = re.compile(re.escape(_FORMAT) + rb"[0-9a-f]{32}")
_DIGITS = 64


@dataclass(frozen=True)
class Content:
    """The content of a ledger's file.

    Args:
        values: the JSON value of each line, in order.
        digest: digest of the last whole line, or b"" in a file without a first line.
        size: bytes of all whole lines. Bytes behind them were half written.
        open: whether the last line lacks only its newline. `size` counts it without the newline.
    """

    values: list[dict[str, Any]]
    digest: bytes
    size: int
    open: bool = False


def first_line() -> bytes:
    """Return the first line of a new file."""
    return _FORMAT + os.urandom(16).hex().encode() + b"\n"


def digest_of(line: bytes) -> bytes:
    """Return the digest to which the next line is chained.

    Args:
        line: a whole line, with or without its newline.
    """
    if line.startswith(_FORMAT):
        return hashlib.sha256(line.rstrip(b"\n")).hexdigest().encode()
    return line[:_DIGITS]


def sealed(value: dict[str, Any], before: bytes) -> bytes:
    """Return a line of the file.

    Args:
        value: plain values.
        before: the digest of the line before it.
    """
    text = json.dumps(value).encode()
    return _seal(text, before) + b" " + text + b"\n"


def read(content: bytes, place: str) -> Content:
    """Parse the content of a ledger's file.

    Args:
        content: all bytes of the file.
        place: the path, for messages.

    Raises:
        ArgumentError: the file is damaged, or not a ledger.
    """
    first, *lines = content.split(b"\n")
    if not lines and _may_become_first(first):
        return Content([], b"", 0)
    if not lines or not _FIRST.fullmatch(first):
        raise ArgumentError(
            f"Line 1 of the ledger {place} is damaged or not of this version ('fastclip ledger 2'), and "
            "the file is left unchanged. Restore it from a copy, or name another file and count its "
            "steps yourself.",
            doc="checkpoints",
        )
    *lines, torn = lines
    digest, found, size = digest_of(first), [], len(first) + 1
    for number, line in enumerate(lines, 2):
        found.append(_opened(line, digest, number, place))
        digest, size = digest_of(line), size + len(line) + 1
    if _is_whole(torn, digest) or _is_whole(torn[:-1], digest):
        # The line is complete except for its newline.
        found.append(_opened(torn, digest, len(lines) + 2, place))
        return Content(found, digest_of(torn), size + len(torn), open=True)
    return Content(found, digest, size)


def _may_become_first(text: bytes) -> bool:
    """Return whether this is the beginning of a first line, from a process killed while writing it."""
    whole = text + (_FORMAT + b"0" * 32)[len(text) :]
    return _FIRST.fullmatch(whole) is not None


def _seal(text: bytes, before: bytes) -> bytes:
    return hashlib.sha256(before + text).hexdigest().encode()


def _is_whole(line: bytes, before: bytes) -> bool:
    digest, _, text = line.partition(b" ")
    return digest == _seal(text, before)


def _opened(line: bytes, before: bytes, number: int, place: str) -> dict[str, Any]:
    if not _is_whole(line, before):
        raise ArgumentError(
            f"Line {number} of the ledger {place} is damaged or does not follow the line before it, so "
            "the privacy spent is unknown. Restore the file from a copy, or name another file and count "
            "its steps yourself.",
            doc="checkpoints",
        )
    value: dict[str, Any] = json.loads(line[_DIGITS + 1 :])
    return value


# -------------------------------------------------------------------------------------------------
# A file that only one process writes, whose additions are on the disk.


try:
    import fcntl
except ImportError:  # Windows has no lock against a second process
    fcntl = None  # type: ignore[assignment]

_HELD: dict[tuple[int, int], tuple[int, int]] = {}
"""Device and number of each open file -> its process. A process' locks do not exclude itself."""


class LostFile(OSError):
    """The file under the path is not, or not only, written by this process."""


class HeldFile:
    """A file that only grows, in whole pieces. The file under its path is checked before each write.

    Formal guarantee: `add` returns when the whole piece is on the disk (fsync), in the file that the
    path leads to, after all earlier pieces and nothing else. The next piece overwrites one that failed.

    Args:
        path: path of a regular file, which is created if needed. Its folder must exist. Symbolic links
            are followed, each time.

    Raises:
        ArgumentError: the file is not regular, or another engine or process writes to it.
        OSError: the file cannot be opened or created.
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(os.path.abspath(path))
        self._file: int | None = None
        self._process = this_process()
        self._unsure = 0
        """Bytes that may follow the end."""
        self._open()
        self._begun = len(self.content())
        self._end: tuple[int, Any] = self._begun, None

    @property
    def size(self) -> int:
        """Bytes that were added, or found when the file was opened."""
        return self._end[0]

    @property
    def mark(self) -> Any:
        """Mark of the last piece."""
        return self._end[1]

    def content(self) -> bytes:
        """Return all bytes of the file."""
        assert self._file is not None
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def cut(self, size: int, mark: Any = None) -> None:
        """Drop bytes after `size` at the next addition. `mark` belongs to the piece that ends there."""
        self._unsure += self.size - size  # comes first, because too many are harmless
        self._end = size, mark

    def add(self, piece: bytes, mark: Any) -> None:
        """Write a whole piece with its `mark` to the disk.

        Raises:
            LostFile, OSError: the piece could not be written.
        """
        self.check()
        assert self._file is not None
        if self._unsure:
            os.ftruncate(self._file, self.size)
        self._unsure = len(piece)
        if os.write(self._file, piece) < len(piece):
            raise OSError("no room for a whole line")
        os.fsync(self._file)
        self._check_place()  # the piece may have gone to a replaced file
        self._end = self.size + len(piece), mark
        self._unsure = 0

    def check(self) -> None:
        """Check that the path leads to the file of this process, and that no other writes to it.

        Raises:
            LostFile: otherwise. The message gives the reason.
        """
        if self._process != this_process():
            raise LostFile("this is a fork of the process that opened it")
        if self._file is None:
            raise LostFile("it was closed")
        self._check_place()
        if not _lock(self._file):
            raise LostFile("another process has taken it")
        if not self.size <= os.fstat(self._file).st_size <= self.size + self._unsure:
            raise LostFile("another program has written to it")

    def holds(self) -> bool:
        """Return whether `check` succeeds."""
        try:
            self.check()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the file, so another process can write to it."""
        file, self._file = self._file, None
        if file is not None:
            key = _key(os.fstat(file))
            os.close(file)
            if _HELD.get(key) == this_process() == self._process:
                del _HELD[key]

    def give_up(self) -> None:
        """Close the file. If it was created here or was empty, it is removed or emptied again."""
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
                    f"The ledger {self.path} is not a regular file, so it would keep nothing. Name "
                    "another file.",
                    doc="checkpoints",
                )
            if self._is_held(found):  # perhaps by an engine without references
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
            f"Another engine or process writes to the ledger {self.path}. Give each run its own file, "
            "or call engine.write_ahead(None) on the other engine first.",
            doc="checkpoints",
        )

    def _check_place(self) -> None:
        assert self._file is not None
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise LostFile("it was moved or deleted") from None
        if _key(found) != _key(os.fstat(self._file)):
            raise LostFile("another file has replaced it")


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    """Lock the file against other processes. Children of this process do not hold the lock.

    The lock is renewed at each write, because any other code of this process that closes the file
    releases it.
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


# -------------------------------------------------------------------------------------------------


TRAINING = ""
"""The line of the training set. Every other line is named after a data set."""
_OTHER_FILE = "another file to engine.write_ahead, or None to stop writing one."


class WriteAheadLog:
    """A file of recorded steps, to which lines are only ever added, each chained to those before.

    Formal guarantee: `record` returns when the line is on the disk, in the file that the path leads to
    (`HeldFile`). A line that a killed process left half written belongs to a step that was not released,
    and is dropped. Any other damage raises an error, except for whole lines lost from the end. Otherwise
    no file holds fewer steps than were released, and each killed process adds one at most.

    Args:
        path: path of the file, which is begun or continued. Its folder must exist.
        writes: False on ranks other than the first, which only read the file.
        ranks: the ranks that take every step together, or None.

    Raises:
        ArgumentError: the file is damaged, not a ledger, or another engine or process writes to it. It
            is left unchanged.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Any, writes: bool = True, ranks: Ranks | None = None) -> None:
        self.path, self.ranks = Path(path), ranks
        self._file = HeldFile(path) if writes else None
        try:
            self._content: Content = read(self._bytes(), str(path))
            self._known: dict[str, Spent] = {TRAINING: Spent({}, Protected())}
            for value in self._content.values:
                self._read(value)
            if self._file is not None and not self._content.digest:
                self._file.cut(0)
                line = first_line()
                self._add(line, digest_of(line))
                self._content = Content([], digest_of(line), self._file.size)
        except BaseException:
            self.give_up()
            raise

    def found(self, line: str = TRAINING) -> Spent:
        """Return the steps of one line in the file, by name, and the unit that they protect."""
        segments, whom = self._known[line]
        return Spent({name: list(entries) for name, entries in segments.items()}, whom)

    @property
    def lines(self) -> list[str]:
        """Lines of data sets other than the training set with steps in the file."""
        return [line for line in self._known if line != TRAINING]

    def of_line(self, line: str) -> LineLog:
        """Return the same file for the steps of another data set."""
        return LineLog(self, line)

    @property
    def seen(self) -> str:
        """A digest of the whole file, by which ranks compare their files."""
        return self._content.digest.decode() or "no ledger"

    def begin(self) -> None:
        """Start writing, after the steps of the file have been counted.

        Raises:
            StepError: the file could not be written.
        """
        if self._file is not None:
            self._file.cut(self._content.size, self._content.digest)
            if self._content.open:
                self._add(b"\n", self._content.digest)

    def catch_up(self, segments: Segments, whom: Protected, line: str = TRAINING) -> None:
        """Write those of these steps that the file lacks.

        Raises:
            StepError: the file could not be written.
        """
        for name, entries in segments.items():
            known = self._of(line).segments.get(name, [])
            rest = remainder(entries, known)
            if rest is None and remainder(known, entries) is None:
                rest = entries  # another history under this name, both count
            if rest:
                self.record(name, rest, whom, line)

    def record(
        self, name: str, entries: Iterable[Entry], whom: Protected, line: str = TRAINING
    ) -> None:
        """Write steps that are about to be released.

        Raises:
            StepError: the file could not be written, and nothing may be released.
        """
        entries = list(entries)
        if self._file is not None:
            value = {"name": name, "entries": saved_entries(entries), PROTECTED: whom.saved()}
            if line != TRAINING:
                value["line"] = line
            text = sealed(value, self._file.mark)
            self._add(text, digest_of(text))
        self._note(line, name, entries, whom)

    @property
    def held(self) -> bool:
        """Whether this process can write to the file, if the disk has space."""
        return self._file is not None and self._file.holds()

    def close(self) -> None:
        """Close the file, so another process can write to it."""
        if self._file is not None:
            self._file.close()

    def give_up(self) -> None:
        """Close the file, and remove one that was begun here."""
        if self._file is not None:
            self._file.give_up()

    def copied(self) -> NotWritten:
        """Return the log of a copied ledger, which raises an error at each step."""
        return NotWritten(
            f"This ledger is a copy and does not write to {self.path}, so the step is not released. "
            f"Pass {_OTHER_FILE}"
        )

    def _bytes(self) -> bytes:
        if self._file is not None:
            return self._file.content()
        return self.path.read_bytes() if self.path.exists() else b""

    def _add(self, line: bytes, digest: bytes) -> None:
        assert self._file is not None
        try:
            self._file.add(line, digest)
        except OSError as error:
            lost = isinstance(error, LostFile)
            room = "Pass" if lost else "Free disk space and continue with the next batch, or pass"
            raise StepError(
                f"The ledger {self.path} cannot be written ({error}), so this step is not released. "
                f"{room} {_OTHER_FILE}",
                doc="checkpoints",
            ) from error

    def _read(self, value: dict[str, Any]) -> None:
        state = {"mechanism": "", "history": value["entries"]}
        for entries in read_segments(state, "", str(self.path)).values():
            line = value.get("line", TRAINING)
            self._note(line, value["name"], entries, protected_by(value, entries))

    def _of(self, line: str) -> Spent:
        return self._known.get(line, Spent({}, Protected()))

    def _note(self, line: str, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        segments, before = self._of(line)
        self._known[line] = Spent(segments, before.beside(whom))
        known = segments.setdefault(name, [])
        for entry in entries:
            last = runs([*known[-1:], entry])
            known[-1:] = last


class LineLog:
    """A ledger's file, for the ledger of one data set other than the training set.

    Args:
        log: the file.
        line: name of the data set, which marks its steps.
    """

    def __init__(self, log: WriteAheadLog, line: str) -> None:
        self._log, self._line = log, line

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that take every step together."""
        return self._log.ranks

    @property
    def held(self) -> bool:
        """Whether this process can write to the file, if the disk has space."""
        return self._log.held

    def record(self, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Write steps, with the errors of `WriteAheadLog.record`."""
        self._log.record(name, entries, whom, self._line)

    def catch_up(self, segments: Segments, whom: Protected) -> None:
        """Write missing steps, with the errors of `WriteAheadLog.catch_up`."""
        self._log.catch_up(segments, whom, self._line)

    def copied(self) -> NotWritten:
        """Return the log of a copied ledger, which raises an error at each step."""
        return self._log.copied()

    def close(self) -> None:
        """Do nothing, because the training set's ledger closes the file."""


class NotWritten:
    """Replaces the log in a copied ledger, which must not release anything.

    Args:
        why: the error message of every step.
    """

    ranks: Ranks | None = None
    held = False

    def __init__(self, why: str) -> None:
        self._why = why

    def record(self, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Raise a StepError."""
        raise StepError(self._why, doc="checkpoints")

    def of_line(self, line: str) -> NotWritten:
        """Return itself for another data set."""
        return self

    def catch_up(self, segments: Segments, whom: Protected) -> None:
        """Write nothing. The steps are counted in memory."""

    def copied(self) -> NotWritten:
        """Return itself for a copy of the copy."""
        return self

    def close(self) -> None:
        """Do nothing, because no file is open."""


def keep_in_file(ledger: Any, path: Any, ranks: Ranks | None) -> None:
    """Implement `FastPrivacyEngine.write_ahead` on all ranks. The first one writes."""
    first, log = ranks is None or ranks.number == 0, None
    try:
        with together(ranks) as compared:
            compared["number of files for the ledger"] = int(path is not None)
            if path is not None and first:
                ledger.check_no_file()
                log = WriteAheadLog(path, ranks=ranks)
        if path is not None:
            with together(ranks) as compared:
                if not first:
                    log = WriteAheadLog(path, writes=False, ranks=ranks)
                assert log is not None
                compared["ledger file (one path, on a file system that all of them share)"] = (
                    log.seen
                )
            with together(ranks):
                ledger.count(log)
    except BaseException:
        if log is not None:
            log.give_up()
        raise
    ledger.keep_in(log)

"""A ledger on disk: every step is there before it is released, whatever becomes of the process."""

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
# The lines of a ledger's file: each is sealed with all that came before it.
#
# The first line says the format and a random name, under which no other file is chained. Each of
# the others is a digest, a space and JSON; the digest (SHA-256) is of the digest of the line before
# it and of this JSON. A line that was changed, lost, doubled or moved so breaks the chain. Lines
# that are lost from the end, whole, do not: the file alone cannot tell that there were more.


_FORMAT = b"fastclip ledger 2 "
_FIRST = re.compile(re.escape(_FORMAT) + rb"[0-9a-f]{32}")
_DIGITS = 64


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Args:
        said: by each line, in order. digest: of the last whole line, b"" in a file without a first one.
        size: bytes of all whole lines; what lies behind them was half written.
        open: the last line lacks its end alone, and is counted in `size` without it.
    """

    said: list[dict[str, Any]]
    digest: bytes
    size: int
    open: bool = False


def first_line() -> bytes:
    """Of a new file."""
    return _FORMAT + os.urandom(16).hex().encode() + b"\n"


def digest_of(line: bytes) -> bytes:
    """What the next line is chained to.

    Args:
        line: whole, with or without its end.
    """
    if line.startswith(_FORMAT):
        return hashlib.sha256(line.rstrip(b"\n")).hexdigest().encode()
    return line[:_DIGITS]


def sealed(said: dict[str, Any], before: bytes) -> bytes:
    """A line.

    Args:
        said: plain values. before: the digest of the line before it.
    """
    text = json.dumps(said).encode()
    return _seal(text, before) + b" " + text + b"\n"


def read(content: bytes, place: str) -> Content:
    """What a file says.

    Args:
        content: all of it. place: where it comes from, for messages.

    Raises:
        ArgumentError: it is damaged, or no such file.
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
        # All of it is there, but for its end.
        found.append(_opened(torn, digest, len(lines) + 2, place))
        return Content(found, digest_of(torn), size + len(torn), open=True)
    return Content(found, digest, size)


def _may_become_first(text: bytes) -> bool:
    """The first line of a process that was killed in the middle of it."""
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
    said: dict[str, Any] = json.loads(line[_DIGITS + 1 :])
    return said


# -------------------------------------------------------------------------------------------------
# A file that one process holds: nobody else writes it, and what was added is on the disk.


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
            raise LostFile("another program has written to it")

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
                    f"The ledger {self.path} is not a regular file, so it would keep nothing. Name "
                    "another file.",
                    doc="checkpoints",
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


# -------------------------------------------------------------------------------------------------


TRAINING = ""
"""The line of the training set; every other is named after a data set."""
_OTHER_FILE = "another file to engine.write_ahead, or None to stop writing one."


class WriteAheadLog:
    """A file to which lines are only ever added: what was recorded, chained to what was before.

    Formal guarantee: `record` returns when the line is on the disk, in the file that the path leads to
    (`HeldFile`). A line that a killed process left half written is of a step that was not released, and
    is cut off; any other damage, but for whole lines lost from the end, is refused (`ledger_lines`). No
    file holds fewer steps than were released, and each process that was killed adds one at most.

    Args:
        path: of the file, which is begun or gone on with. Its folder must exist.
        writes: False on ranks that leave the writing to the first: they only read what is there.
        ranks: who take every step together.

    Raises:
        ArgumentError: the file is damaged, no ledger, or is being written by somebody else; it is left
            as it is.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Any, writes: bool = True, ranks: Ranks | None = None) -> None:
        self.path, self.ranks = Path(path), ranks
        self._file = HeldFile(path) if writes else None
        try:
            self._content: Content = read(self._bytes(), str(path))
            self._known: dict[str, Spent] = {TRAINING: Spent({}, Protected())}
            for said in self._content.said:
                self._read(said)
            if self._file is not None and not self._content.digest:
                self._file.cut(0)
                line = first_line()
                self._add(line, digest_of(line))
                self._content = Content([], digest_of(line), self._file.size)
        except BaseException:
            self.give_up()
            raise

    def found(self, line: str = TRAINING) -> Spent:
        """Every step that the file holds in one line, by name, and whom they protect."""
        segments, whom = self._known[line]
        return Spent({name: list(entries) for name, entries in segments.items()}, whom)

    @property
    def lines(self) -> list[str]:
        """Of data sets other than the training set, of which the file holds something."""
        return [line for line in self._known if line != TRAINING]

    def of_line(self, line: str) -> LineLog:
        """The same file for the steps of another data set."""
        return LineLog(self, line)

    @property
    def seen(self) -> str:
        """A digest of all that the file holds: who sees another one sees another file."""
        return self._content.digest.decode() or "no ledger"

    def begin(self) -> None:
        """What the file holds is counted: it may be written from now on.

        Raises:
            StepError: it could not be written.
        """
        if self._file is not None:
            self._file.cut(self._content.size, self._content.digest)
            if self._content.open:
                self._add(b"\n", self._content.digest)

    def catch_up(self, segments: Segments, whom: Protected, line: str = TRAINING) -> None:
        """Write what the file lacks of these.

        Raises:
            StepError: it could not be written.
        """
        for name, entries in segments.items():
            known = self._of(line).segments.get(name, [])
            rest = remainder(entries, known)
            if rest is None and remainder(known, entries) is None:
                rest = entries  # another story under this name: both count
            if rest:
                self.record(name, rest, whom, line)

    def record(
        self, name: str, entries: Iterable[Entry], whom: Protected, line: str = TRAINING
    ) -> None:
        """Write what is about to be released.

        Raises:
            StepError: it could not be written; nothing may be released.
        """
        entries = list(entries)
        if self._file is not None:
            said = {"name": name, "entries": saved_entries(entries), PROTECTED: whom.saved()}
            if line != TRAINING:
                said["line"] = line
            text = sealed(said, self._file.mark)
            self._add(text, digest_of(text))
        self._note(line, name, entries, whom)

    @property
    def held(self) -> bool:
        """This process can write it, if there is room."""
        return self._file is not None and self._file.holds()

    def close(self) -> None:
        """Let somebody else write."""
        if self._file is not None:
            self._file.close()

    def give_up(self) -> None:
        """Close it; a file that was begun here is not there any more."""
        if self._file is not None:
            self._file.give_up()

    def copied(self) -> NotWritten:
        """What a copy of the ledger has in its place."""
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

    def _read(self, said: dict[str, Any]) -> None:
        state = {"mechanism": "", "history": said["entries"]}
        for entries in read_segments(state, "", str(self.path)).values():
            line = said.get("line", TRAINING)
            self._note(line, said["name"], entries, protected_by(said, entries))

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
        log: the file. line: what its steps are marked with.
    """

    def __init__(self, log: WriteAheadLog, line: str) -> None:
        self._log, self._line = log, line

    @property
    def ranks(self) -> Ranks | None:
        """Who take every step together."""
        return self._log.ranks

    @property
    def held(self) -> bool:
        """This process can write it, if there is room."""
        return self._log.held

    def record(self, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Raises: StepError: as `WriteAheadLog.record`."""
        self._log.record(name, entries, whom, self._line)

    def catch_up(self, segments: Segments, whom: Protected) -> None:
        """Raises: StepError: as `WriteAheadLog.catch_up`."""
        self._log.catch_up(segments, whom, self._line)

    def copied(self) -> NotWritten:
        """What a copy of the ledger has in its place."""
        return self._log.copied()

    def close(self) -> None:
        """The file is the training set's ledger's to close."""


class NotWritten:
    """In the place of a log that was left behind: nothing is released.

    Args:
        why: the message of every step.
    """

    ranks: Ranks | None = None
    held = False

    def __init__(self, why: str) -> None:
        self._why = why

    def record(self, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Raises: StepError."""
        raise StepError(self._why, doc="checkpoints")

    def of_line(self, line: str) -> NotWritten:
        """The same for another data set."""
        return self

    def catch_up(self, segments: Segments, whom: Protected) -> None:
        """There is nothing to write to: what is recorded here is counted in memory."""

    def copied(self) -> NotWritten:
        """The same of a copy's copy."""
        return self

    def close(self) -> None:
        """Nothing is open."""


def keep_in_file(ledger: Any, path: Any, ranks: Ranks | None) -> None:
    """`FastPrivacyEngine.write_ahead`, of ranks that come here together; the first of them writes."""
    first, log = ranks is None or ranks.number == 0, None
    try:
        with together(ranks) as told:
            told["number of files for the ledger"] = int(path is not None)
            if path is not None and first:
                ledger.check_no_file()
                log = WriteAheadLog(path, ranks=ranks)
        if path is not None:
            with together(ranks) as told:
                if not first:
                    log = WriteAheadLog(path, writes=False, ranks=ranks)
                assert log is not None
                told["ledger file (one path, on a file system that all of them share)"] = log.seen
            with together(ranks):
                ledger.count(log)
    except BaseException:
        if log is not None:
            log.give_up()
        raise
    ledger.keep_in(log)

"""A ledger on disk: every step is there before it is released, whatever becomes of the process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastclip.accounting.held_file import HeldFile, LostFile
from fastclip.accounting.ledger_lines import Content, digest_of, first_line, read, sealed
from fastclip.accounting.protected import KEY as PROTECTED
from fastclip.accounting.protected import Protected, protected_by
from fastclip.accounting.segments import (
    Entry,
    Segments,
    Spent,
    read_segments,
    remainder,
    runs,
    saved_entries,
)
from fastclip.errors import StepError
from fastclip.parallel.ranks import Ranks, together

TRAINING = ""
"""The line of the training set; every other is named after a data set."""
_WAY_OUT = (
    "name another file by engine.write_ahead(path), or end keeping one by engine.write_ahead(None)"
)


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
            f"this is a copy of the ledger that is kept in {self.path}, to which it does not write, so "
            f"this step is not released; {_WAY_OUT}"
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
            room = _WAY_OUT if lost else f"make room and go on with the next batch, or {_WAY_OUT}"
            raise StepError(
                f"the ledger {self.path} cannot be written ({error}), so this step is not released; "
                f"{room}"
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
        raise StepError(self._why)

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

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
    read_segments,
    remainder,
    runs,
    saved_entries,
)
from fastclip.errors import StepError
from fastclip.parallel.ranks import Ranks

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
            self._known: Segments = {}
            self._whom = Protected()
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

    def found(self) -> tuple[Segments, Protected]:
        """Every step that the file holds, by name, and whom they protect."""
        return {name: list(entries) for name, entries in self._known.items()}, self._whom

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
        entries = list(entries)
        if self._file is not None:
            said = {"name": name, "entries": saved_entries(entries), PROTECTED: whom.saved()}
            line = sealed(said, self._file.mark)
            self._add(line, digest_of(line))
        self._note(name, entries)

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
            self._whom = self._whom.beside(protected_by(said, entries))
            self._note(said["name"], entries)

    def _note(self, name: str, entries: Iterable[Entry]) -> None:
        known = self._known.setdefault(name, [])
        for entry in entries:
            last = runs([*known[-1:], entry])
            known[-1:] = last


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

    def copied(self) -> NotWritten:
        """The same of a copy's copy."""
        return self

    def close(self) -> None:
        """Nothing is open."""

"""A chain of lines: what is lost, doubled, moved or put in from elsewhere is seen; a torn end is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fastclip.accounting import ledger_file
from fastclip.errors import ArgumentError
from tests.accounting.runs import cause_and_fix

Lines = list[bytes]


def written(steps: int) -> Lines:
    """A file, line by line."""
    lines = [ledger_file.first_line()]
    for number in range(steps):
        lines.append(ledger_file.sealed({"step": number % 2}, ledger_file.digest_of(lines[-1])))
    return lines


def steps(content: bytes) -> int:
    return len(ledger_file.read(content, "ledger").values)


OTHER = written(6)
CHANGES: dict[str, Callable[[Lines], Lines]] = {
    "lost": lambda lines: lines[:2] + lines[3:],
    "first lost": lambda lines: lines[:1] + lines[2:],
    "doubled": lambda lines: lines[:3] + lines[2:],
    "last doubled": lambda lines: [*lines, lines[-1]],
    "pair doubled": lambda lines: [*lines, *lines[-2:]],
    "moved": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
    "of another file": lambda lines: lines[:3] + OTHER[3:],
    "all of another file": lambda lines: lines[:1] + OTHER[1:],
    "two files": lambda lines: lines + OTHER,
    "no first line": lambda lines: lines[1:],
    "an empty line": lambda lines: [*lines[:3], b"\n", *lines[3:]],
    "an empty line at the end": lambda lines: [*lines, b"\n"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_refused(change: str) -> None:
    """Though every line is one that was written."""
    lines = written(6)
    assert steps(b"".join(lines)) == 6
    with pytest.raises(ArgumentError, match=r"^Line \d of the ledger .* is damaged") as caught:
        steps(b"".join(CHANGES[change](lines)))
    assert cause_and_fix(caught.value)


def test_a_lost_end_is_not_seen() -> None:
    """As docs/tutorials/saving.md says."""
    assert steps(b"".join(written(6)[:-2])) == 4


def test_every_flipped_bit_of_whole_lines() -> None:
    whole = b"".join(written(3))
    name = range(8 * 50)  # of the first line
    for place in (*name, *random.Random(0).choices(range(8 * 50, 8 * len(whole)), k=300)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ArgumentError, match="is damaged"):
            steps(bytes(flipped))


def test_every_torn_end() -> None:
    """A line that lacks its end alone may be of a step that was released; other torn ones are not."""
    lines = written(2)
    whole, before = b"".join(lines), len(b"".join(lines[:-1]))
    for length in range(len(whole) + 1):
        found = ledger_file.read(whole[:length], "ledger")
        complete = [n for n in range(1, 4) if length >= len(b"".join(lines[:n]))]
        open_ends = [n for n in (2, 3) if length == len(b"".join(lines[:n])) - 1]
        assert len(found.values) == max([*complete, *open_ends, 1]) - 1
        assert found.open == bool(open_ends)
        assert found.size <= length
        assert (found.size == length) == (
            length in (0, len(lines[0]), before, before - 1, len(whole) - 1, len(whole))
        )


def test_a_torn_first_line() -> None:
    """Only what may have become one: the rest is somebody else's."""
    first = ledger_file.first_line()
    assert ledger_file.read(first[:-9], "ledger").digest == b""
    for other in (b"fastclip ledger 2 xyz", b"fast ledger", first[:-1] + b"0", b"\0" * 9):
        with pytest.raises(ArgumentError, match="not of this version"):
            ledger_file.read(other, "ledger")


def test_two_files_have_two_chains(tmp_path: Path) -> None:
    first, second = written(1), written(1)
    assert first[0] != second[0]
    assert first[1] != second[1]

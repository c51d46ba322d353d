"""The lines of a ledger's file: each is sealed with all that came before it.

The first line says the format and a random name, under which no other file is chained. Each of the
others is a digest, a space and JSON; the digest (SHA-256) is of the digest of the line before it and of
this JSON. A line that was changed, lost, doubled or moved so breaks the chain. Lines that are lost from
the end, whole, do not: the file alone cannot tell that there were more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from fastclip.errors import ArgumentError

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
            f"line 1 of the ledger {place} is damaged, or this is no ledger of this version (which "
            "begins with 'fastclip ledger 2'), so it is left as it is; restore the file from a copy, or "
            "name another one and count its steps yourself"
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
            f"line {number} of the ledger {place} is damaged, or does not follow the line before it, so "
            "what was spent is not known; restore the file from a copy, or name another one and count "
            "its steps yourself"
        )
    said: dict[str, Any] = json.loads(line[_DIGITS + 1 :])
    return said

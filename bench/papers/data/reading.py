"""Files as bytes or text, and what can go wrong while they are read."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fastclip.errors import ArgumentError


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, uncompressed if its name ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read becomes one sentence that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        with opened(path) as file:
            place = _not_utf8(file)
        raise ArgumentError(
            f"{path} is not UTF-8 text: {place or error}; get it again, or convert it"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentError(
            f"{path} is not a whole gzip file ({error}): it was cut off or damaged on the way; "
            "get it again"
        ) from error
    except csv.Error as error:
        raise ArgumentError(
            f"{path} is not the table that was expected ({error}): it was cut off or damaged on the "
            "way; get it again"
        ) from error


def _not_utf8(file: IO[bytes]) -> str | None:
    """The first line and byte that are not UTF-8."""
    before = 0
    for number, line in enumerate(file, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            return f"line {number}, byte {before + error.start} of the file, is 0x{byte:02x}"
        before += len(line)
    return None

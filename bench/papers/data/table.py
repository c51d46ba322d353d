"""Tables of text: read row by row, so that a row too short or too long is never filled up or cut."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from bench.papers.data.reading import opened, reading
from fastclip.errors import ArgumentError

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # notes of patients are longer than the default


def read_table(
    path: Path,
    columns: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    skip: int = 0,
    separator: str = ",",
    all_columns: bool = False,
) -> pd.DataFrame:
    """A table of separated text, gzip-compressed or not; every entry stays text.

    Args:
        columns: those that must be there, in the order in which they are returned.
        names: of a file without a header; `skip` lines before the first row are not looked at.
        separator: of the fields; " " stands for any number of spaces.
        all_columns: return the others, too.

    Returns:
        A row of text for each row of the file, numbered from 0.

    Raises:
        ArgumentError: columns are missing, a row has more or fewer fields than there are columns, or the
            file is not UTF-8, cut off, damaged or empty.
    """
    chunks = read_chunks(
        path, columns, names=names, skip=skip, separator=separator, all_columns=all_columns
    )
    return pd.concat(chunks)


def read_chunks(
    path: Path,
    columns: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    skip: int = 0,
    separator: str = ",",
    all_columns: bool = False,
    size: int = 20_000,
) -> Iterator[pd.DataFrame]:
    """The same, `size` rows at a time, for tables that are larger than memory."""
    with reading(path), opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        for _ in range(skip):
            text.readline()
        if separator == " ":
            lines: Iterator[list[str]] = (line.split() for line in text)
        else:
            lines = csv.reader(text, delimiter=separator, skipinitialspace=True, strict=True)
        found = next(lines, []) if names is None else list(names)
        if not found:
            raise ArgumentError(f"{path} is empty")
        wanted = _places(found, found if all_columns else columns, columns, path)
        rows = _of_width(filter(None, lines), len(found), path)
        first = 0
        while chunk := [[row[place] for place in wanted] for row in itertools.islice(rows, size)]:
            index = pd.RangeIndex(first, first + len(chunk))
            yield pd.DataFrame(chunk, index, [found[place] for place in wanted], dtype=str)
            first += len(chunk)
        if not first:
            raise ArgumentError(f"{path} has no rows")


def without_missing(frame: pd.DataFrame, marks: Sequence[str] = ("", "?")) -> pd.DataFrame:
    """The rows in which no entry is one of these marks; rows keep their numbers."""
    return frame[~frame.isin(list(marks)).any(axis=1)]


def _places(
    found: Sequence[str], returned: Sequence[str], needed: Sequence[str], path: Path
) -> list[int]:
    missing = [name for name in needed if name not in found]
    if missing:
        raise ArgumentError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(found)}"
        )
    return [list(found).index(name) for name in returned]


def _of_width(rows: Iterator[list[str]], width: int, path: Path) -> Iterator[list[str]]:
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise ArgumentError(
                f"{path}, row {number}: {len(row)} fields, expected the {width} of the columns: the "
                "file is cut off or damaged; get it again"
            )
        yield row

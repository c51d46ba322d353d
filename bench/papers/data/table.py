"""Tables of text: read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.papers.data.reading import reading
from fastclip.errors import ArgumentError


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
        all_columns: return the others, too.

    Returns:
        A row of text for each row of the file, numbered from 0.

    Raises:
        ArgumentError: columns are missing, or the file is not UTF-8, cut off, damaged or empty.
    """
    with reading(path):
        frame = pd.read_csv(
            path,
            **_AS_TEXT,
            sep=separator,
            header=0 if names is None else None,
            names=None if names is None else list(names),
            skiprows=skip,
        )
    check_table(frame, columns, path)
    return frame if all_columns else frame[list(columns)]


def read_chunks(path: Path, columns: Sequence[str], size: int = 20_000) -> Iterator[pd.DataFrame]:
    """The same of a large table with a header, `size` rows at a time and the named columns alone.

    Raises:
        ArgumentError: as read_table.
    """
    with reading(path):
        check_names(pd.read_csv(path, nrows=0).columns, columns, path)
        chunks = pd.read_csv(path, **_AS_TEXT, usecols=list(columns), chunksize=size)
        for chunk in chunks:
            check_table(chunk, columns, path)
            yield chunk[list(columns)]


_AS_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False, "skipinitialspace": True}


def check_names(found: Sequence[str], columns: Sequence[str], path: Path) -> None:
    """Raises ArgumentError if columns are missing."""
    missing = [name for name in columns if name not in found]
    if missing:
        raise ArgumentError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(map(str, found))}"
        )


def check_table(frame: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Raises ArgumentError if columns are missing or lines have another number of fields."""
    check_names(list(frame.columns), columns, path)
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes a first field too many as index
        raise ArgumentError(f"{path}: its rows have more fields than the {frame.shape[1]} columns")
    short = frame.isna().any(axis=1).to_numpy()  # pandas fills up: nothing else is NA here
    if short.any():
        raise ArgumentError(
            f"{path}, row {frame.index[int(np.argmax(short))] + 1}: fewer fields than the "
            f"{frame.shape[1]} columns: the file is cut off or damaged; get it again"
        )
    if frame.empty:
        raise ArgumentError(f"{path} has no rows")


def without_missing(frame: pd.DataFrame, marks: Sequence[str] = ("", "?")) -> pd.DataFrame:
    """The rows in which no entry is one of these marks; rows keep their numbers."""
    return frame[~frame.isin(list(marks)).any(axis=1)]

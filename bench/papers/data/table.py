"""Tables of text: read, checked, and encoded by domains that are written down.

Domains are public: they come from the data's documentation, so encoding looks at no row, and
neither test rows nor privacy are touched.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fastclip.errors import ArgumentError


@dataclass(frozen=True)
class Category:
    """A column of words, one-hot: one entry for each of `values`."""

    name: str
    values: tuple[str, ...]

    def encode(self, frame: pd.DataFrame, path: Path) -> Tensor:
        codes = codes_of(frame[self.name], self.values, path)
        return torch.nn.functional.one_hot(codes, len(self.values)).float()  # [n, values]


@dataclass(frozen=True)
class Number:
    """A column of numbers, scaled from its public range [low, high] to [0, 1]."""

    name: str
    low: float
    high: float

    def encode(self, frame: pd.DataFrame, path: Path) -> Tensor:
        values = numbers_of(frame[self.name], path, self.low, self.high)
        scaled = (values - self.low) / (self.high - self.low)
        return torch.from_numpy(scaled).float()[:, None]  # [n, 1]


def words(text: str) -> tuple[str, ...]:
    """The words of a domain."""
    return tuple(text.split())


def encoded(frame: pd.DataFrame, columns: Sequence[Category | Number], path: Path) -> Tensor:
    """The columns side by side, float32 [n, d]; `path` is what errors name."""
    return torch.cat([column.encode(frame, path) for column in columns], dim=1)


def codes_of(column: pd.Series, values: Sequence[str], path: Path) -> Tensor:
    """Of every row the place of its word in `values`, int64 [n].

    Raises:
        ArgumentError: a word is none of them.
    """
    codes = pd.Index(values).get_indexer(column)
    if (codes < 0).any():
        at = int(np.argmax(codes < 0))
        raise ArgumentError(
            f"{_place(column, at, path)} is {column.iloc[at]!r}, expected one of {', '.join(values)}"
        )
    return torch.from_numpy(codes.astype(np.int64))


def numbers_of(
    column: pd.Series, path: Path, low: float = -np.inf, high: float = np.inf
) -> np.ndarray:
    """The column's numbers, float64 [n].

    Raises:
        ArgumentError: an entry is no finite number, or lies outside [low, high].
    """
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    wrong = ~np.isfinite(values) | (values < low) | (values > high)
    if wrong.any():
        at = int(np.argmax(wrong))
        limits = "" if np.isinf(low) and np.isinf(high) else f" between {low:g} and {high:g}"
        raise ArgumentError(
            f"{_place(column, at, path)} is {column.iloc[at]!r}, expected a number{limits}"
        )
    return values


def _place(column: pd.Series, at: int, path: Path) -> str:
    return f"{path}, row {column.index[at] + 1}: {column.name}"  # rows count from 1, as readers do


def read_table(
    path: Path,
    columns: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    skip: int = 0,
    separator: str = ",",
    all_columns: bool = False,
) -> pd.DataFrame:
    """A table of comma-separated text, gzip-compressed or not; every entry stays text.

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
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            sep=separator,
            header=0 if names is None else None,
            names=None if names is None else list(names),
            skiprows=skip,
        )
    check_table(frame, columns, path)
    return frame if all_columns else frame[list(columns)]


def check_table(frame: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Raises ArgumentError if columns are missing or lines have another number of fields."""
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise ArgumentError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
            f"{', '.join(map(str, frame.columns))}"
        )
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


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, uncompressed if its name ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def reading(path: Path, open_file: Callable[[Path], IO[bytes]] = opened) -> Iterator[None]:
    """What goes wrong while a file is read becomes one sentence that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        with open_file(path) as file:
            place = _not_utf8(file)
        raise ArgumentError(
            f"{path} is not UTF-8 text: {place or error}; get it again, or convert it"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentError(
            f"{path} is not a whole gzip file ({error}): it was cut off or damaged on the way; "
            "get it again"
        ) from error
    except pd.errors.EmptyDataError as error:
        raise ArgumentError(f"{path} is empty") from error
    except pd.errors.ParserError as error:
        raise ArgumentError(
            f"{path} is not the table that was expected ({str(error).strip()}): it was cut off or "
            "damaged on the way; get it again"
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

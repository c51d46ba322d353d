"""Columns of text as numbers, by domains that are written down.

Domains are public: they come from the data's documentation, so encoding looks at no row, and neither
test rows nor privacy are touched. Where no range is public, `fitted` takes it from the training rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fastclip.errors import ArgumentError


@dataclass(frozen=True)
class Category:
    """A column of words, one-hot: one entry for each of `values`.

    Other words are an error, or, where the values are not known to be all (`strict` False), all zeros.
    """

    name: str
    values: tuple[str, ...]
    strict: bool = True

    def encode(self, frame: pd.DataFrame, path: Path) -> Tensor:
        if self.strict:
            codes_of(frame[self.name], self.values, path)
        words = frame[self.name].to_numpy(object)[:, None]
        return torch.from_numpy(words == np.array(self.values, object)).float()  # [n, values]


@dataclass(frozen=True)
class Number:
    """A column of numbers, scaled from the range [low, high] to [0, 1].

    Numbers outside are an error, or, where the range is not known to hold (`strict` False), clamped.
    """

    name: str
    low: float
    high: float
    strict: bool = True

    def encode(self, frame: pd.DataFrame, path: Path) -> Tensor:
        if self.strict:
            values = numbers_of(frame[self.name], path, self.low, self.high)
        else:
            values = numbers_of(frame[self.name], path).clip(self.low, self.high)
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


def fitted(frame: pd.DataFrame) -> list[Category | Number]:
    """Domains of columns for which none is public, from these rows (of the training part) alone.

    A column whose entries are all numbers becomes a number; one that holds a single value is left out.
    """
    columns: list[Category | Number] = []
    for name in frame.columns:
        entries = frame[name].unique()
        numbers = pd.to_numeric(pd.Series(entries), errors="coerce")
        if len(entries) < 2 or (numbers.nunique() == 1 and numbers.notna().all()):
            continue
        if np.isfinite(numbers).all():
            columns.append(Number(name, numbers.min(), numbers.max(), strict=False))
        else:
            columns.append(Category(name, tuple(sorted(entries)), strict=False))
    return columns

"""Whose each row of a data set is: ids of any kind, as the numbers 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from fastclip.data.sample_keys import value_of
from fastclip.errors import ArgumentError, ArgumentTypeError

_EACH = "unit_ids expects one id for each row of the data set, in its order"


def unit_numbers(unit_ids: Any, dataset: Any) -> Tensor:
    """The unit of each row, int64 [rows], from 0, in the order in which units first appear.

    Args:
        unit_ids: one id a row of the data set, in its order: a tensor, a list, an array or a Series of
            ids that can be compared (numbers, strings, tuples), or the name of a column: of a Hugging
            Face data set, or of the one DataFrame of as many rows that the data set holds, whose rows
            must come in the data set's order. Of a Subset: a column of what it is a subset of.

    Raises:
        ArgumentError, ArgumentTypeError: no such column, another number of ids, a missing id, or numbers
            beside strings: rows of one unit would count as several.
    """
    rows = len(dataset)
    ids = _column(dataset, unit_ids) if isinstance(unit_ids, str) else _listed(unit_ids)
    if len(ids) != rows:
        raise ArgumentError(f"{_EACH}: {rows} of them, got {len(ids)}")
    numbers: dict[Any, int] = {}
    found = [numbers.setdefault(_comparable(i, row), len(numbers)) for row, i in enumerate(ids)]
    _check_kinds(numbers, found)
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, (bytes, dict, set, frozenset, Iterator)):  # the last is read once
        raise ArgumentTypeError(
            f"{_EACH} (a tensor, list, array, or the name of a column), got {type(ids).__name__}"
        )
    shape = getattr(ids, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ArgumentError(f"{_EACH}, of shape [rows], got shape {list(shape)}")
    try:
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{_EACH} (a tensor, list, array, or the name of a column), got {type(ids).__name__}"
        ) from error


def _comparable(unit: Any, row: int) -> Any:
    """The id as something that is equal where ids are."""
    if isinstance(unit, tuple):
        return tuple(_comparable(part, row) for part in unit)
    if isinstance(unit, Tensor) and unit.dim():
        raise ArgumentError(f"{_EACH}, got a tensor of shape {list(unit.shape)} for row {row}")
    try:
        unit = value_of(unit)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{_EACH}, each of which can be hashed and compared by value (a number, a string, a tuple), "
            f"got {error} for row {row}"
        ) from error
    try:
        missing = unit is None or bool(unit != unit)
    except TypeError:  # pandas' missing value is neither equal to itself nor not
        missing = True
    if missing:
        raise ArgumentError(
            f"{_EACH}, got none ({unit!r}) for row {row}: such rows would count as units of their own; "
            "leave them out of the data set, or give each its unit"
        )
    return unit


def _check_kinds(numbers: dict[Any, int], found: list[int]) -> None:
    """Refuse numbers beside strings, and strings beside bytes: 12 and "12" are one patient, and unequal.

    Args:
        numbers: of the units, by their ids. found: of each row.
    """
    first: dict[tuple[int, ...], tuple[str, Any]] = {}
    for unit, number in numbers.items():
        for place, kind in _kinds(unit):
            before, other = first.setdefault(place, (kind, unit))
            if kind != before:
                rows = found.index(numbers[other]), found.index(number)
                raise ArgumentError(
                    f"{_EACH}, all of one kind, got {other!r} for row {rows[0]} and {unit!r} for row "
                    f"{rows[1]}: {before} and {kind} are never equal, so rows of one unit would count "
                    "as several; make all of them strings (dtype=str where pandas reads the file, or "
                    ".astype(str))"
                )


def _kinds(unit: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Of what kind an id is; of a tuple its parts, by its length and their places."""
    if isinstance(unit, tuple):
        for number, part in enumerate(unit):
            yield from _kinds(part, (*place, len(unit), number))
    elif isinstance(unit, Number):
        yield place, "numbers"
    elif isinstance(unit, (str, bytes)):
        yield place, "strings" if isinstance(unit, str) else "bytes"


def _column(dataset: Any, name: str) -> list[Any]:
    """A column of what the data set is, or holds."""
    tables = list(_tables(dataset, name))
    if not tables and isinstance(dataset, Subset):
        whole = _column(dataset.dataset, name)
        return [whole[int(i)] for i in dataset.indices]
    if len(tables) != 1:
        raise ArgumentError(
            f"unit_ids={name!r} expects such a column in the data set ({type(dataset).__name__}), "
            f"or in a DataFrame that it holds, with a row for each of its rows, found {len(tables)}; "
            "pass the ids themselves, one for each row"
        )
    return _listed(tables[0][name])


def _tables(dataset: Any, name: str) -> Iterator[Any]:
    """The data set, or what it holds, where that has a column of this name."""
    if name in _names(dataset):
        yield dataset
        return
    # of a Subset the whole is in another order, even where it has as many rows
    seen = {id(dataset.dataset)} if isinstance(dataset, Subset) else set()
    for held in getattr(dataset, "__dict__", {}).values():
        if name in _names(held) and len(held) == len(dataset) and id(held) not in seen:
            seen.add(id(held))
            yield held


def _names(table: Any) -> list[Any]:
    for attribute in ("column_names", "columns"):
        names = getattr(table, attribute, None)
        if names is not None and not callable(names) and hasattr(table, "__getitem__"):
            try:
                return list(names)
            except TypeError:
                continue
    return []

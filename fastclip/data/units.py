"""The privacy unit of each sample, and the samples of a batch that belong to each unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fastclip.data.dataset import value_of
from fastclip.errors import ArgumentError, ArgumentTypeError, BatchSizeError
from fastclip.ops.units import UnitSamples

_EACH = "unit_ids expects one id per sample of the data set"


def unit_numbers(unit_ids: Any, dataset: Any) -> Tensor:
    """Returns the unit of each sample, int64 [samples], numbered from 0 in order of appearance.

    Args:
        unit_ids: one id per sample of the data set, in its order. A tensor, a list, an array or a Series
            of ids that can be compared (numbers, strings, tuples), or the name of a column. The column
            belongs to a Hugging Face data set or a list of dicts, or to the one DataFrame or list of as
            many entries that the data set holds, in its order. For a Subset, it is a column of the whole
            data set.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such column, the number of ids differs, an id is
            missing, or numbers are mixed with strings. Samples of one unit would count as several.
    """
    samples = len(dataset)
    ids = _column(dataset, unit_ids) if isinstance(unit_ids, str) else _listed(unit_ids)
    if len(ids) != samples:
        raise ArgumentError(f"{_EACH} ({samples}), got {len(ids)}.", doc="privacy-units")
    numbers: dict[Any, int] = {}
    found = [
        numbers.setdefault(_comparable(i, sample), len(numbers)) for sample, i in enumerate(ids)
    ]
    _check_kinds(numbers, found)
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, (bytes, dict, set, frozenset, Iterator)):  # the last is read once
        raise ArgumentTypeError(
            f"{_EACH} (a tensor, list, array, or the name of a column), got {type(ids).__name__}."
        )
    shape = getattr(ids, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ArgumentError(f"{_EACH}, of shape [samples], got shape {list(shape)}.")
    try:
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{_EACH} (a tensor, list, array, or the name of a column), got {type(ids).__name__}."
        ) from error


def _comparable(unit: Any, sample: int) -> Any:
    """Converts an id to a value that is equal if ids are equal."""
    if isinstance(unit, tuple):
        return tuple(_comparable(part, sample) for part in unit)
    if isinstance(unit, Tensor) and unit.dim():
        raise ArgumentError(
            f"{_EACH}, got a tensor of shape {list(unit.shape)} for sample {sample}."
        )
    try:
        unit = value_of(unit)
    except TypeError as error:
        raise ArgumentTypeError(
            "unit_ids expects ids that can be hashed and compared by value (numbers, strings, tuples), "
            f"got {error} for sample {sample}."
        ) from error
    try:
        missing = unit is None or bool(unit != unit)
    except TypeError:  # pandas' missing value is neither equal to itself nor not
        missing = True
    if missing:
        raise ArgumentError(
            f"{_EACH}, got none ({unit!r}) for sample {sample}, so each such sample would count as a "
            "unit of its own. Leave these samples out of the data set, or give them ids.",
            doc="privacy-units",
        )
    return unit


def _check_kinds(numbers: dict[Any, int], found: list[int]) -> None:
    """Raises an error for ids of mixed kinds, because 12 and "12" are one patient and not equal.

    Args:
        numbers: number of each unit, by its id.
        found: unit of each sample.
    """
    first: dict[tuple[int, ...], tuple[str, Any]] = {}
    for unit, number in numbers.items():
        for place, kind in _kinds(unit):
            before, other = first.setdefault(place, (kind, unit))
            if kind != before:
                samples = found.index(numbers[other]), found.index(number)
                raise ArgumentError(
                    f"unit_ids expects ids of one kind, got {other!r} for sample {samples[0]} and "
                    f"{unit!r} for sample {samples[1]} ({before} and {kind}), so one unit would count "
                    "as several. Make all of them strings (dtype=str in pandas).",
                    doc="privacy-units",
                )


def _kinds(unit: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the kind of an id. For a tuple, of its parts, by its length and their positions."""
    if isinstance(unit, tuple):
        for number, part in enumerate(unit):
            yield from _kinds(part, (*place, len(unit), number))
    elif isinstance(unit, Number):
        yield place, "numbers"
    elif isinstance(unit, (str, bytes)):
        yield place, "strings" if isinstance(unit, str) else "bytes"


def _column(dataset: Any, name: str) -> list[Any]:
    """Returns a column of the data set, or of a table that it holds."""
    found = list(_tables(dataset, name))
    tables = [table for table in found if not isinstance(table, (list, tuple))] or found
    if not tables and isinstance(dataset, Subset):
        whole = _column(dataset.dataset, name)
        return [whole[int(i)] for i in dataset.indices]
    if not tables:
        raise ArgumentError(
            f"unit_ids={name!r} names a column, but neither the data set ({type(dataset).__name__}) nor "
            "a table or a list of dicts that it holds has one. Pass the ids themselves, one per sample.",
            doc="privacy-units",
        )
    if len(tables) > 1:
        raise ArgumentError(
            f"unit_ids={name!r} names a column of {len(tables)} tables that the data set "
            f"({type(dataset).__name__}) holds. Pass the ids themselves, one per sample.",
            doc="privacy-units",
        )
    (table,) = tables
    if isinstance(table, (list, tuple)):
        return [sample.get(name) for sample in table]
    return _listed(table[name])


def _tables(dataset: Any, name: str) -> Iterator[Any]:
    """Yields the data set, or the tables that it holds, with a column of this name."""
    if name in _names(dataset):
        yield dataset
        return
    # the data set of a Subset has another order, even if it has as many samples
    seen = {id(dataset.dataset)} if isinstance(dataset, Subset) else set()
    for held in getattr(dataset, "__dict__", {}).values():
        if name in _names(held) and len(held) == len(dataset) and id(held) not in seen:
            seen.add(id(held))
            yield held


def _names(table: Any) -> list[Any]:
    """Returns the names of the columns of a table, or of a list of dicts, one per sample."""
    if isinstance(table, (list, tuple)) and table:
        if not all(isinstance(sample, Mapping) for sample in table):
            return []
        return list(dict.fromkeys(name for sample in table for name in sample))
    for attribute in ("column_names", "columns"):
        names = getattr(table, attribute, None)
        if names is not None and not callable(names) and hasattr(table, "__getitem__"):
            try:
                return list(names)
            except TypeError:
                continue
    return []


# -------------------------------------------------------------------------------------------------
# Samples that belong to one privacy unit (a patient), in a sampled batch and in the batch in hand.
#
# A batch of units holds their samples, unit by unit, so the numbers of samples identify the unit of
# each. Batches are split only between units. A unit's gradient is clipped as one, so its samples must
# come in one pass.


def of_sizes(sizes: Sequence[int], reduction: str) -> UnitSamples:
    """Returns the samples of units with these numbers of samples, in order."""
    counts = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    units = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
    return UnitSamples(
        units.repeat_interleave(counts), len(sizes), max(sizes, default=0), reduction
    )


def cut_between_units(sizes: Iterable[int], most: int | None) -> list[range]:
    """Splits a batch into parts of at most `most` samples, without splitting a unit.

    Args:
        sizes: number of samples of each unit, in order.
        most: largest number of samples of a part. None: one part.

    Raises:
        BatchSizeError: a unit has more samples.
    """
    cuts, start, stop = [], 0, 0
    for size in sizes:
        if most is not None and size > most:
            raise BatchSizeError(too_large(size, most), doc="privacy-units")
        if most is not None and stop + size - start > most:
            cuts.append(range(start, stop))
            start = stop
        stop += size
    return [*cuts, range(start, stop)] if stop > start else cuts


def too_large(samples: int, most: int) -> str:
    """Returns the message for a unit that does not fit into a physical batch."""
    return (
        f"Physical batches of at most {most} samples cannot hold a unit of {samples} samples, which is "
        f"clipped as one and must not be split. Allow physical batches of {samples} samples "
        "(max_physical_batch_size, per_device_train_batch_size), or pass "
        f"max_samples_per_unit={most} to make_private."
    )


class UnitBatch(list):
    """The samples of drawn units, unit by unit.

    Opacus' BatchMemoryManager splits a batch by np.array_split. This class implements it by NumPy's
    protocol for arrays of other libraries (NEP 18), with parts that end between units.

    Args:
        samples: numbers of the samples.
        sizes: number of samples of each unit, in order.
        largest: largest number of samples of any unit.
        reduction: as in `UnitSamples`.
    """

    def __init__(
        self, samples: Iterable[int], sizes: Sequence[int], largest: int, reduction: str
    ) -> None:
        super().__init__(samples)
        self.sizes, self.largest, self.reduction = tuple(sizes), largest, reduction
        self.most: int | None = None
        """Samples of a physical batch, if a splitting sampler draws."""
        self.cuts: list[range] | None = None
        """The parts that a splitting sampler was given, as positions in this list."""

    def __reduce__(self) -> Any:
        """Sends a worker process, which reads the samples, only their numbers."""
        return list, (list(self),)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> Any:
        plain: list[Any] = [_plain(a) for a in args]
        if function is not np.array_split or kwargs or args[0] is not self:
            return function(*plain, **kwargs)
        most = self.most
        if most is None:
            return function(*plain)
        if self.largest > most:
            raise BatchSizeError(too_large(self.largest, most), doc="privacy-units")
        self.cuts = cut_between_units(self.sizes, most)
        return [np.asarray(self[cut.start : cut.stop]) for cut in self.cuts]

    def samples_of(self, part: range) -> UnitSamples | None:
        """Returns the units of the samples of a part. None if it begins or ends within a unit."""
        sizes, stop = [], 0
        for size in self.sizes:
            start, stop = stop, stop + size
            if part.start <= start and stop <= part.stop:
                sizes.append(size)
        return of_sizes(sizes, self.reduction) if sum(sizes) == len(part) else None


def _plain(value: Any) -> Any:
    """Converts unit batches to lists, including nested ones."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value

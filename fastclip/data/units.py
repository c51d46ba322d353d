"""Privacy units: the unit of each sample, and which samples of a batch belong to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The unit of each sample, int64 [samples], from 0, in the order in which units first appear.

    Args:
        unit_ids: one id a sample of the data set, in its order: a tensor, a list, an array or a
            Series of ids that can be compared (numbers, strings, tuples), or the name of a column:
            of a Hugging Face data set, or of the one DataFrame of as many samples that the data set
            holds, whose samples must come in the data set's order. Of a Subset: a column of what it
            is a subset of.

    Raises:
        ArgumentError, ArgumentTypeError: no such column, another number of ids, a missing id, or numbers
            beside strings: samples of one unit would count as several.
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
    """The id as something that is equal where ids are."""
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
    """Refuse numbers beside strings, and strings beside bytes: 12 and "12" are one patient, and unequal.

    Args:
        numbers: of the units, by their ids. found: of each sample.
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
            f"unit_ids={name!r} expects one such column in the data set ({type(dataset).__name__}) or "
            f"its DataFrame, with an entry per sample, got {len(tables)}. Pass the ids themselves, one "
            "per sample.",
            doc="privacy-units",
        )
    return _listed(tables[0][name])


def _tables(dataset: Any, name: str) -> Iterator[Any]:
    """The data set, or what it holds, where that has a column of this name."""
    if name in _names(dataset):
        yield dataset
        return
    # of a Subset the whole is in another order, even where it has as many samples
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


# -------------------------------------------------------------------------------------------------
# Samples that belong to one unit of privacy (a patient), in a draw and in the batch that is in hand.
#
# A draw of units is their samples, unit by unit, so how many samples each unit has says whose a
# sample is. Batches are cut between units alone: a unit's gradient is clipped as one, so its
# samples must come in one pass.


def of_sizes(sizes: Sequence[int], reduction: str) -> UnitSamples:
    """The samples of units of so many samples each, in their order."""
    counts = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    units = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
    return UnitSamples(
        units.repeat_interleave(counts), len(sizes), max(sizes, default=0), reduction
    )


def cut_between_units(sizes: Iterable[int], most: int | None) -> list[range]:
    """The samples of a draw in parts of at most `most` samples, none of which holds a part of a unit.

    Args:
        sizes: samples of each unit, in order. most: None does not cut.

    Raises:
        BatchSizeError: one unit has more samples.
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
    """What to say where a unit does not fit into a physical batch."""
    return (
        f"Physical batches of at most {most} samples cannot hold a unit of {samples} samples, which is "
        f"clipped as one and must not be split. Allow physical batches of {samples} samples "
        "(max_physical_batch_size, per_device_train_batch_size), or pass "
        f"max_samples_per_unit={most} to make_private."
    )


class UnitBatch(list):
    """The samples of drawn units, unit by unit.

    Opacus' BatchMemoryManager splits a draw by np.array_split, which this class answers by NumPy's own
    protocol for arrays of other libraries (NEP 18): with parts that end between units.

    Args:
        samples: numbers of samples. sizes: how many belong to each unit, in order. largest: samples
            that any unit can bring. reduction: as of UnitSamples.
    """

    def __init__(
        self, samples: Iterable[int], sizes: Sequence[int], largest: int, reduction: str
    ) -> None:
        super().__init__(samples)
        self.sizes, self.largest, self.reduction = tuple(sizes), largest, reduction
        self.most: int | None = None
        """Samples of a physical batch, where a splitting sampler draws."""
        self.cuts: list[range] | None = None
        """The parts that a splitting sampler was given, as places in this list."""

    def __reduce__(self) -> Any:
        """To a worker process, which reads the samples, go their numbers alone."""
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

    def rows_of(self, part: range) -> UnitSamples | None:
        """Whose the samples of a part are; None where it begins or ends within a unit."""
        sizes, stop = [], 0
        for size in self.sizes:
            start, stop = stop, stop + size
            if part.start <= start and stop <= part.stop:
                sizes.append(size)
        return of_sizes(sizes, self.reduction) if sum(sizes) == len(part) else None


def _plain(value: Any) -> Any:
    """Lists in the place of unit batches, nested ones included."""
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value

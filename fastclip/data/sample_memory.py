"""Samples of a data set that share memory, and so are one record or hold parts of one.

A sample is the tensors that it is read from. Two laws state what samples may have in common:

1. Two samples share no more than each has for itself. Several samples may share a tensor as a whole,
   such as a constant label, an expanded mask or position numbers, or an entry of a table. They may also
   share a list or an object, which is known by its identity, as is the sample itself. Equal numbers and
   strings may be one object, so sharing them shows nothing.
2. Tensors of different samples never overlap in part. If they do (windows of one series), the middle of
   one sample is at the edge of another, and belongs to both.

Memory is compared as intervals of bytes, and no value is read. Containers and objects are opened.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import inf, prod
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, TensorDataset

from fastclip.data.dataset import parts_of
from fastclip.errors import ArgumentError

_NUMBERS = (int, float, complex, np.generic, Enum)
_NOTHING = (
    type(None), type, torch.dtype, torch.layout, torch.memory_format, FunctionType, MethodType,
    BuiltinFunctionType, ModuleType,
)  # fmt: skip
"""Types of objects that hold no data."""
_OPAQUE = 1024
"""Elements that a shared object that cannot be opened (an image) counts for."""
_DEEPEST, _LONGEST = 32, 64
"""Depth to which objects are opened. One that holds more than _LONGEST leaves counts as one leaf."""
_MOST_RUNS = 2**22
"""Largest number of runs of tensors that are compared at once."""


class Layout(NamedTuple):
    """Positions of the bytes of a tensor, from its first byte."""

    space: Any
    """Space of its address, a device or the entries of one data set."""
    run: int
    """Number of adjacent bytes."""
    outer: tuple[tuple[int, int], ...] = ()
    """(size, stride in bytes) of the dimensions along which runs repeat, ascending."""

    @property
    def extent(self) -> int:
        """Bytes from the first to the last, inclusive."""
        return self.run + sum((size - 1) * stride for size, stride in self.outer)


@dataclass(frozen=True, eq=False)
class Leaves:
    """Tensors of one layout, each of one sample.

    Args:
        starts: int64 [n], addresses of their first bytes.
        samples: int64 [n], the sample of each.
        least: elements that each counts for if samples share it.
        most: elements that each counts for if one sample holds it. More if it cannot be opened, fewer
            for the numbers in a list, which any sample may hold.
    """

    layout: Layout
    starts: np.ndarray
    samples: np.ndarray
    least: float
    most: float


_STRINGS, _OBJECTS, _ITEMS = (Layout(name, 1) for name in ("strings", "objects", "items"))


class Shared(NamedTuple):
    """Two samples that are not independent."""

    first: int
    second: int
    how: str
    """They are "copies", share "more" than one of them has for itself, or overlap in "part"."""


class _Held(NamedTuple):
    """One leaf of a sample, with its layout, address and numbers of elements (`Leaves`)."""

    layout: Layout
    start: int
    least: float
    most: float


_Known = dict[int, tuple[Any, list[Any], list[_Held]]]
"""By identity, an object and its parts, which are kept alive by it, and the leaves that it holds."""


def leaves_of(dataset: Any, numbers: np.ndarray, samples: np.ndarray) -> Iterator[Leaves]:
    """Yields the tensors of some samples of a data set.

    In a user's own data set, the number of a sample represents all of it.

    Args:
        numbers: int64 [n], numbers of the samples in this data set.
        samples: int64 [n], names of the samples in the result.
    """
    for part in parts_of(dataset, numbers):
        base, mine, called = part.dataset, part.samples, samples[part.places]
        space = "numbers", id(base)
        if isinstance(base, StackDataset):
            for member in _members(base):
                yield from leaves_of(member, mine, called)
        elif (columns := _columns(base)) is not None:
            for column in columns:
                yield _of_column(column, mine, called)
        elif type(base) in (list, tuple):
            yield from leaves_of_items(
                [base[sample] for sample in mine.tolist()], called, space, mine
            )
        else:
            yield Leaves(Layout(space, 1), mine, called, inf, inf)


def leaves_of_items(
    items: list[Any], samples: np.ndarray, space: Any, numbers: np.ndarray
) -> Iterator[Leaves]:
    """Yields the tensors of samples that are in memory.

    Args:
        space, numbers: identify plain values, which have no memory of their own.
    """
    found: dict[tuple[Layout, float, float], list[tuple[int, int]]] = defaultdict(list)
    known: _Known = {}
    for item, sample, number in zip(items, samples.tolist(), numbers.tolist(), strict=True):
        held, plain = _held(item, known)
        for each in held:
            found[each.layout, each.least, each.most].append((each.start, sample))
        if plain or not held:  # an object that holds more than values is known by its identity
            values = all(each.layout is _STRINGS for each in held)
            layout, start = (Layout(space, 1), number) if values else (_ITEMS, id(item))
            found[layout, max(1, plain), 1].append((start, sample))
    for (layout, least, most), pairs in found.items():
        starts, called = np.array(pairs, dtype=np.int64).T
        yield Leaves(layout, starts, called, least, most)


def reads_by_itself(dataset: Any) -> bool:
    """Whether a data set is the user's own, and only reading a sample shows its memory."""
    for part in parts_of(dataset):
        base = part.dataset
        if isinstance(base, StackDataset):
            if any(map(reads_by_itself, _members(base))):
                return True
        elif type(base) not in (list, tuple) and _columns(base) is None:
            return True
    return False


def shared(leaves: list[Leaves], unit: np.ndarray) -> Shared | None:
    """Returns two samples of different units that are one record or overlap. None if there are none.

    Args:
        unit: int64, the unit of each sample, indexed by `Leaves.samples`.

    Formal guarantee: None only if no memory belongs to samples of two units. Exempt are whole tensors,
    if each of these samples has another tensor for itself that is at least as large.
    """
    groups: dict[Layout, list[Leaves]] = defaultdict(list)
    for each in leaves:
        groups[each.layout].append(each)
    wholes = [_whole(layout, members, unit) for layout, members in groups.items()]
    needed, own = np.zeros(len(unit)), np.zeros(len(unit))
    for whole in wholes:
        alone = ~whole.common[whole.which]
        np.maximum.at(needed, whole.samples[~alone], whole.least[~alone])
        np.maximum.at(own, whole.samples[alone], whole.most[alone])
    for sample in np.flatnonzero(own < needed)[:1].tolist():
        return _same(wholes, unit, sample, "more" if own[sample] else "copies")
    return _overlapping(wholes, unit)


@dataclass(frozen=True, eq=False)
class _Whole:
    """All tensors of one layout, sorted by address.

    Args:
        starts, first: int64 [m], address and first use of each tensor.
        common: bool [m], whether several units use it.
        which, samples, least, most: [n], for each use the number of the tensor, sample and elements.
    """

    layout: Layout
    starts: np.ndarray
    first: np.ndarray
    common: np.ndarray
    which: np.ndarray
    samples: np.ndarray
    least: np.ndarray
    most: np.ndarray

    def users(self, number: int) -> np.ndarray:
        """Returns the samples that hold one of the tensors."""
        return self.samples[self.which == number]


def _whole(layout: Layout, members: list[Leaves], unit: np.ndarray) -> _Whole:
    starts = np.concatenate([each.starts for each in members])
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    samples = np.concatenate([each.samples for each in members])[order]
    least, most = (
        np.repeat([getattr(each, name) for each in members], [len(each.starts) for each in members])
        for name in ("least", "most")
    )
    new = np.ones(len(starts), dtype=bool)
    new[1:] = starts[1:] != starts[:-1]
    first = np.flatnonzero(new)
    units = unit[samples]
    common = np.minimum.reduceat(units, first) != np.maximum.reduceat(units, first)
    which = np.cumsum(new) - 1
    return _Whole(layout, starts[first], first, common, which, samples, least[order], most[order])


def _same(wholes: list[_Whole], unit: np.ndarray, sample: int, how: str) -> Shared:
    """Returns this sample and one of another unit that shares its largest common tensor."""
    mine = [(w, p) for w in wholes for p in np.flatnonzero(w.samples == sample).tolist()]
    common = [(w, p) for w, p in mine if w.common[w.which[p]]]
    whole, place = max(common, key=lambda one: one[0].least[one[1]])
    users = whole.users(int(whole.which[place]))
    other = int(users[unit[users] != unit[sample]][0])
    return Shared(min(sample, other), max(sample, other), how)


def _overlapping(wholes: list[_Whole], unit: np.ndarray) -> Shared | None:
    """Returns two samples of different units whose tensors overlap in part."""
    spaces: dict[Any, list[_Whole]] = defaultdict(list)
    for whole in wholes:
        spaces[whole.layout.space].append(whole)
    for members in spaces.values():
        low = np.concatenate([w.starts for w in members])
        units = np.concatenate([np.where(w.common, -1, unit[w.samples[w.first]]) for w in members])
        number = np.repeat(np.arange(len(members)), [len(w.starts) for w in members])
        nth = np.concatenate([np.arange(len(w.starts)) for w in members])
        found = _first_pair([w.layout for w in members], low, units, number)
        if found is not None:
            one, other = (members[number[k]].users(int(nth[k])).tolist() for k in found)
            a, b = next((a, b) for a in one for b in other if unit[a] != unit[b])
            return Shared(min(a, b), max(a, b), "part")
    return None


def _first_pair(
    layouts: list[Layout], low: np.ndarray, units: np.ndarray, number: np.ndarray
) -> tuple[int, int] | None:
    """Returns two tensors of different units whose runs overlap.

    Tensors that interleave (a transposed data set) are compared by a first run of each. If all that
    touch fit into one step of a dimension, no step leads from one to another.

    Raises:
        ArgumentError: there are too many runs to compare.
    """
    extent = np.array([layout.extent for layout in layouts])[number]
    left = np.flatnonzero(_touching(low, low + extent, units))
    own = [layouts[i].outer for i in np.unique(number[left]).tolist()]
    below = np.full(len(low), np.iinfo(np.int64).max)
    """Bound of the steps that are left to compare."""
    for step in sorted({stride for outer in own for _, stride in outer}, reverse=True):
        spans = [sum((n - 1) * step for n, stride in x.outer if stride == step) for x in layouts]
        first = extent - np.array(spans)[number]
        part = _connected(low[left], (low + extent)[left])
        start, stop = np.full(len(left), np.iinfo(np.int64).max), np.zeros(len(left), np.int64)
        np.minimum.at(start, part, low[left])
        np.maximum.at(stop, part, (low + first)[left])
        fitting = left[(stop - start)[part] <= step]
        extent[fitting], below[fitting] = first[fitting], step
        left = left[_touching(low[left], (low + extent)[left], units[left])]
    return _of_runs(layouts, left, low, units, number, below) if len(left) else None


def _of_runs(
    layouts: list[Layout], left: np.ndarray, low: np.ndarray, units: np.ndarray,
    number: np.ndarray, below: np.ndarray,
) -> tuple[int, int] | None:  # fmt: skip
    """Compares all runs of the tensors `left`, of steps below `below`, and returns two that overlap."""
    kinds, which_kind = np.unique(
        np.stack([number[left], below[left]]), axis=1, return_inverse=True
    )
    which_kind = which_kind.reshape(-1)
    dims = [[dim for dim in layouts[i].outer if dim[1] < step] for i, step in kinds.T.tolist()]
    count = int(np.array([prod(n for n, _ in each) for each in dims])[which_kind].sum())
    if count > _MOST_RUNS:
        raise ArgumentError(
            f"Samples of the data set interleave in memory in {count} pieces, too many to check for "
            "overlaps. Call contiguous() on the tensors that they are read from.",
            doc="internal-limits",
        )
    lows, which, runs = [], [], []
    for k, (i, _) in enumerate(kinds.T.tolist()):
        mine, offsets = left[which_kind == k], np.zeros(1, np.int64)
        for size, stride in dims[k]:
            offsets = np.add.outer(np.arange(size) * stride, offsets).reshape(-1)
        lows.append(np.add.outer(low[mine], offsets).reshape(-1))
        which.append(np.repeat(mine, len(offsets)))
        runs.append(np.full(len(lows[-1]), layouts[i].run))
    start, tensor = np.concatenate(lows), np.concatenate(which)
    stop = start + np.concatenate(runs)
    mixed = np.flatnonzero(_touching(start, stop, units[tensor]))
    mixed = mixed[np.argsort(start[mixed], kind="stable")]
    if not len(mixed):
        return None
    # the first intervals up to `change` belong to one unit
    change = int((units[tensor[mixed]] != units[tensor[mixed[0]]]).argmax())
    before = mixed[:change]
    return int(tensor[before[stop[before].argmax()]]), int(tensor[mixed[change]])


def _touching(low: np.ndarray, high: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Whether intervals [low, high) are connected, by overlaps, with one of another unit."""
    if not len(low):
        return np.zeros(0, dtype=bool)
    part = _connected(low, high)
    order = np.argsort(part, kind="stable")
    first, units = np.flatnonzero(np.diff(part[order], prepend=-1)), units[order]
    mixed = np.minimum.reduceat(units, first) != np.maximum.reduceat(units, first)
    return np.asarray(mixed[part])


def _connected(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Numbers the groups of overlapping intervals [low, high), from 0."""
    order = np.argsort(low, kind="stable")
    part = np.zeros(len(low), np.int64)
    part[order[1:]] = np.cumsum(low[order[1:]] >= np.maximum.accumulate(high[order])[:-1])
    return part


def _members(stack: Any) -> list[Any]:
    datasets = stack.datasets
    return list(datasets.values() if isinstance(datasets, dict) else datasets)


def _columns(dataset: Any) -> tuple[Any, ...] | None:
    """Returns the tensors or arrays that hold the samples of a data set along axis 0, if it has them."""
    if isinstance(dataset, TensorDataset):
        if type(dataset).__getitem__ is not TensorDataset.__getitem__:
            return None
        columns: tuple[Any, ...] = dataset.tensors
    else:
        columns = (dataset,)
    return columns if all(_has_memory(c) and len(c.shape) for c in columns) else None


def _held(item: Any, known: _Known, depth: int = 0) -> tuple[list[_Held], int]:
    """Returns the leaves of an item, and the number of plain values and characters without memory."""
    if isinstance(item, (bytearray, memoryview, array)):
        item = np.asarray(memoryview(item))
    if _has_memory(item):
        start, layout, size = _memory(item)
        return [_Held(layout, start, size, size)], 0
    if isinstance(item, (str, bytes)):
        return [_Held(_STRINGS, id(item), 0, len(item))], len(item)
    if isinstance(item, (*_NUMBERS, *_NOTHING)):
        return [], int(isinstance(item, _NUMBERS))
    if isinstance(item, (tuple, frozenset)):
        return _held_in(item, known, depth)
    if id(item) in known:
        return known[id(item)][-1], 0
    held: list[_Held] = []
    parts, opaque = _parts(item)
    known[id(item)] = item, parts, held
    if not parts and opaque and not isinstance(item, Tensor) and _by_value(type(item)):
        del known[id(item)]
        return [], 1
    if opaque or depth == _DEEPEST:
        held.append(_Held(_OBJECTS, id(item), _OPAQUE, inf))
        parts = parts[:0] if depth == _DEEPEST else parts
    inner, plain = _held_in(parts, known, depth)
    held.extend(inner)
    most: float = max([len(parts), plain, *(each.least for each in held)])
    itself = _Held(_ITEMS, id(item), most, min(1, plain))
    held.append(itself)
    if len(held) > _LONGEST:
        known[id(item)] = item, parts, [itself]
    return held, 0


def _held_in(parts: Any, known: _Known, depth: int) -> tuple[list[_Held], int]:
    held: list[_Held] = []
    plain = 0
    for part in parts:
        if type(part) in (int, float, bool):  # fast, as there may be many
            plain += 1
            continue
        more, values = _held(part, known, depth + 1)
        held += more
        plain += values
    return held, plain


def _parts(item: Any) -> tuple[list[Any], bool]:
    """Returns the parts of a container or an object, and whether it may hold more that is hidden."""
    if isinstance(item, Mapping):
        return list(item.values()), False
    if isinstance(item, (list, set, deque)):
        return list(item), False
    if isinstance(item, np.ndarray):
        return list(item.flat), False
    kind: Any = type(item)
    names, whole = _slots(kind)
    slots = [getattr(item, name) for name in names if hasattr(item, name)]
    return [*getattr(item, "__dict__", {}).values(), *slots], not whole


@cache
def _slots(kind: Any) -> tuple[list[str], bool]:
    """Returns the slots of a class, and whether its objects hold only these and their __dict__."""
    slots = [m for base in kind.__mro__ for m in vars(base).items()]
    names = [name for name, member in slots if isinstance(member, MemberDescriptorType)]
    pointers = len(names) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return names, kind.__basicsize__ <= object.__basicsize__ + 8 * pointers


def _by_value(kind: type) -> bool:
    """Whether objects of a class, such as dates, compare by value instead of identity."""
    return kind.__eq__ is not object.__eq__ and kind.__hash__ is not None


def _has_memory(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.layout is torch.strided and not x.is_nested and not x.is_meta
    return isinstance(x, np.ndarray) and x.dtype != object


def _memory(x: Any, skipped: int = 0) -> tuple[int, Layout, int]:
    """Returns (address of the first byte, layout, elements) of a tensor without its first axes."""
    if isinstance(x, Tensor):
        start, item, space = x.data_ptr(), x.element_size(), str(x.device)
        strides = [stride * item for stride in x.stride()]
    else:
        start, item, space = x.__array_interface__["data"][0], x.itemsize, "cpu"
        strides = list(x.strides)
    dims = [
        (size, stride)
        for size, stride in zip(x.shape[skipped:], strides[skipped:], strict=True)
        if size != 1 and stride
    ]
    if 0 in x.shape:
        return start, Layout(space, 0), 0
    start += sum((size - 1) * stride for size, stride in dims if stride < 0)
    run = item
    outer: list[tuple[int, int]] = []
    for size, stride in sorted(((n, abs(s)) for n, s in dims), key=lambda dim: dim[1]):
        if not outer and stride <= run:
            run += (size - 1) * stride
        else:
            outer.append((size, stride))
    return start, Layout(space, run, tuple(outer)), prod(size for size, _ in dims)


def _of_column(column: Any, numbers: np.ndarray, samples: np.ndarray) -> Leaves:
    start, layout, size = _memory(column, 1)
    step = (
        column.stride(0) * column.element_size()
        if isinstance(column, Tensor)
        else column.strides[0]
    )
    return Leaves(layout, start + numbers * step, samples, size, size)

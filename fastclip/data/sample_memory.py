"""Which samples of a data set are one record, or hold parts of one: they share memory.

A sample is the tensors that it is read from. Two laws say what samples may have in common:

1. A sample has memory of its own: at least one of its largest tensors belongs to no other sample. A
   smaller one may, as a whole: a constant label, a mask or position numbers that are expanded over all
   samples, an entry of a table. It holds no more than what the sample has for itself.
2. Tensors of different samples never overlap in part. Where they do (windows of one series), what is
   in the middle of one sample is at the edge of another, so it is data of both.

Memory is compared as intervals of bytes, and no value is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, TensorDataset

from fastclip.data.base_rows import parts_of

_NUMBERS = (int, float, complex, np.generic, Enum)


class Layout(NamedTuple):
    """Where the bytes of a tensor lie, seen from its first."""

    space: Any
    """What its address is of: a device, or the entries of one data set."""
    run: int
    """Bytes in a row."""
    outer: tuple[tuple[int, int], ...] = ()
    """(size, distance in bytes) of the dimensions along which runs are repeated, ascending."""

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last."""
        return self.run + sum((size - 1) * stride for size, stride in self.outer)


@dataclass(frozen=True, eq=False)
class Leaves:
    """Tensors of one layout, each of one sample.

    Args:
        starts: int64 [n], addresses of their first bytes. samples: int64 [n], whose they are.
        least: elements that each is known to have. most: that it may have: more, if it cannot be looked
            into.
    """

    layout: Layout
    starts: np.ndarray
    samples: np.ndarray
    least: float
    most: float


class Shared(NamedTuple):
    """Two samples that are not independent."""

    first: int
    second: int
    in_part: bool
    """They overlap in part; else they have their largest tensor in common."""


def leaves_of(dataset: Any, rows: np.ndarray, samples: np.ndarray) -> Iterator[Leaves]:
    """The tensors of some samples of a data set.

    Of a data set of the user's own, the number of a sample stands for all of it.

    Args:
        rows: int64 [n], numbers in this data set. samples: int64 [n], what they are called.
    """
    for part in parts_of(dataset, rows):
        base, mine, called = part.dataset, part.rows, samples[part.places]
        space = "numbers", id(base)
        if isinstance(base, StackDataset):
            for member in _members(base):
                yield from leaves_of(member, mine, called)
        elif (columns := _columns(base)) is not None:
            for column in columns:
                yield _of_column(column, mine, called)
        elif type(base) in (list, tuple):
            yield from leaves_of_items([base[row] for row in mine.tolist()], called, space, mine)
        else:
            yield Leaves(Layout(space, 1), mine, called, inf, inf)


def leaves_of_items(
    items: list[Any], samples: np.ndarray, space: Any, numbers: np.ndarray
) -> Iterator[Leaves]:
    """The tensors of samples that are in memory.

    Args:
        space, numbers: what plain values, which have no memory of their own, are identified by.
    """
    found: dict[tuple[Layout, float, float], list[tuple[int, int]]] = defaultdict(list)
    for item, sample, number in zip(items, samples.tolist(), numbers.tolist(), strict=True):
        values, before = 0.0, len(found)
        for leaf in _leaves(item):
            if _has_memory(leaf):
                start, layout, size = _memory(leaf)
                found[layout, size, size].append((start, sample))
            elif isinstance(leaf, _NUMBERS):
                values += 1
            elif isinstance(leaf, (str, bytes)):  # of any length, and equal ones may be one object
                values = inf
            elif leaf is not None:
                found[Layout("objects", 1), 1, inf].append((id(leaf), sample))
        if values or len(found) == before == 0:
            found[Layout(space, 1), values, values].append((number, sample))
    for (layout, least, most), pairs in found.items():
        starts, called = np.array(pairs, dtype=np.int64).T
        yield Leaves(layout, starts, called, least, most)


def reads_by_itself(dataset: Any) -> bool:
    """Whether a data set is the user's own, so that only reading a sample shows its memory."""
    for part in parts_of(dataset):
        base = part.dataset
        if isinstance(base, StackDataset):
            if any(map(reads_by_itself, _members(base))):
                return True
        elif type(base) not in (list, tuple) and _columns(base) is None:
            return True
    return False


def shared(leaves: list[Leaves], owner: np.ndarray) -> Shared | None:
    """Two samples of different owners that are one record, or overlap; None if there are none.

    Args:
        owner: int64, the owner of each sample, by the number that it is called by.

    Formal guarantee: None only if no memory is of samples of two owners, except for whole tensors than
    which each of these samples has another one, at least as large, for itself.
    """
    groups: dict[Layout, list[Leaves]] = defaultdict(list)
    for each in leaves:
        groups[each.layout].append(each)
    wholes = [_whole(layout, members, owner) for layout, members in groups.items()]
    needed, own = np.zeros(len(owner)), np.zeros(len(owner))
    for whole in wholes:
        alone = ~whole.common[whole.which]
        np.maximum.at(needed, whole.samples, whole.least)
        np.maximum.at(own, whole.samples[alone], whole.most[alone])
    for sample in np.flatnonzero(own < needed)[:1].tolist():
        return _same(wholes, owner, sample)
    return _overlapping(wholes, owner)


@dataclass(frozen=True, eq=False)
class _Whole:
    """All tensors of one layout, those at one address beside each other.

    Args:
        starts, first: int64 [m], address and first place of each one. common: bool [m], several owners'.
        which, samples, least, most: [n], of each use: number of the one, sample, elements.
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
        """The samples that one of the tensors is of."""
        return self.samples[self.which == number]


def _whole(layout: Layout, members: list[Leaves], owner: np.ndarray) -> _Whole:
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
    whose = owner[samples]
    common = np.minimum.reduceat(whose, first) != np.maximum.reduceat(whose, first)
    which = np.cumsum(new) - 1
    return _Whole(layout, starts[first], first, common, which, samples, least[order], most[order])


def _same(wholes: list[_Whole], owner: np.ndarray, sample: int) -> Shared:
    """Another owner's sample that has the largest tensor of this one, which is common."""
    mine = [(w, p) for w in wholes for p in np.flatnonzero(w.samples == sample).tolist()]
    whole, place = max(
        mine, key=lambda one: (one[0].least[one[1]], one[0].common[one[0].which[one[1]]])
    )
    users = whole.users(int(whole.which[place]))
    other = int(users[owner[users] != owner[sample]][0])
    return Shared(min(sample, other), max(sample, other), False)


def _overlapping(wholes: list[_Whole], owner: np.ndarray) -> Shared | None:
    """Two samples whose tensors overlap in part."""
    spaces: dict[Any, list[_Whole]] = defaultdict(list)
    for whole in wholes:
        spaces[whole.layout.space].append(whole)
    for members in spaces.values():
        low = np.concatenate([w.starts for w in members])
        high = np.concatenate([w.starts + w.layout.extent for w in members])
        whose = np.concatenate([np.where(w.common, -1, owner[w.samples[w.first]]) for w in members])
        number = np.repeat(np.arange(len(members)), [len(w.starts) for w in members])
        nth = np.concatenate([np.arange(len(w.starts)) for w in members])
        left = _touching(low, high, whose)  # by their extents
        several = _touching(low, high, number) & left
        for i, whole in enumerate(members):
            mine = left & (number == i)
            if mine.any() and not several[mine].any() and _interleaved(whole.layout, low[mine]):
                left &= ~mine
        found = _first_pair([w.layout for w in members], np.flatnonzero(left), low, whose, number)
        if found is not None:
            one, other = (members[number[k]].users(int(nth[k])).tolist() for k in found)
            a, b = next((a, b) for a in one for b in other if owner[a] != owner[b])
            return Shared(min(a, b), max(a, b), True)
    return None


def _first_pair(
    layouts: list[Layout], left: np.ndarray, low: np.ndarray, whose: np.ndarray, number: np.ndarray
) -> tuple[int, int] | None:
    """Two of the tensors `left`, of different owners, whose runs overlap."""
    lows, which = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    runs = [np.zeros(0, np.int64)]
    for i in np.unique(number[left]).tolist():
        mine, layout = left[number[left] == i], layouts[i]
        offsets = np.zeros(1, np.int64)
        for size, stride in layout.outer:
            offsets = np.add.outer(np.arange(size) * stride, offsets).reshape(-1)
        lows.append(np.add.outer(low[mine], offsets).reshape(-1))
        which.append(np.repeat(mine, len(offsets)))
        runs.append(np.full(len(lows[-1]), layout.run))
    start, tensor = np.concatenate(lows), np.concatenate(which)
    stop = start + np.concatenate(runs)
    mixed = np.flatnonzero(_touching(start, stop, whose[tensor]))
    mixed = mixed[np.argsort(start[mixed], kind="stable")]
    if not len(mixed):
        return None
    # of those that touch each other all before the first of another owner are one owner's
    change = int((whose[tensor[mixed]] != whose[tensor[mixed[0]]]).argmax())
    before = mixed[:change]
    return int(tensor[before[stop[before].argmax()]]), int(tensor[mixed[change]])


def _touching(low: np.ndarray, high: np.ndarray, whose: np.ndarray) -> np.ndarray:
    """Which intervals [low, high) are connected, by overlapping ones, with one of another owner."""
    touching = np.zeros(len(low), dtype=bool)
    if len(low):
        order = np.argsort(low, kind="stable")
        new = np.ones(len(low), dtype=bool)
        new[1:] = low[order[1:]] >= np.maximum.accumulate(high[order])[:-1]
        first, owners = np.flatnonzero(new), whose[order]
        mixed = np.minimum.reduceat(owners, first) != np.maximum.reduceat(owners, first)
        touching[order] = mixed[np.cumsum(new) - 1]
    return touching


def _interleaved(layout: Layout, starts: np.ndarray) -> bool:
    """Tensors whose extents overlap lie between each other's runs: a transposed data set.

    So it is where every dimension, that of the samples too, steps over all of the smaller ones.
    """
    steps = np.diff(np.sort(starts))
    step = int(np.gcd.reduce(steps))
    reach = 0
    dims = [(layout.run, 1), *layout.outer, (int(steps.sum()) // step + 1, step)]
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < reach:
            return False
        reach = (size - 1) * stride + max(reach, 1)
    return True


def _members(stack: Any) -> list[Any]:
    datasets = stack.datasets
    return list(datasets.values() if isinstance(datasets, dict) else datasets)


def _columns(dataset: Any) -> tuple[Any, ...] | None:
    """What a data set reads its samples from, if it is tensors or arrays with one along axis 0."""
    if isinstance(dataset, TensorDataset):
        if type(dataset).__getitem__ is not TensorDataset.__getitem__:
            return None
        columns: tuple[Any, ...] = dataset.tensors
    else:
        columns = (dataset,)
    return columns if all(_has_memory(c) and len(c.shape) for c in columns) else None


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, (Tensor, int, float, str)):  # the others take longer to tell
        yield item
        return
    if isinstance(item, Mapping):
        item = list(item.values())
    elif is_dataclass(item) and not isinstance(item, type):
        item = [getattr(item, field.name) for field in fields(item)]
    if isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)
    else:
        yield item


def _has_memory(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.layout is torch.strided and not x.is_nested and not x.is_meta
    return isinstance(x, np.ndarray) and x.dtype != object


def _memory(x: Any, sample: int = 0) -> tuple[int, Layout, int]:
    """(address of its first byte, layout, elements) of a tensor, without its `sample` first axes."""
    if isinstance(x, Tensor):
        start, item, space = x.data_ptr(), x.element_size(), str(x.device)
        strides = [stride * item for stride in x.stride()]
    else:
        start, item, space = x.__array_interface__["data"][0], x.itemsize, "cpu"
        strides = list(x.strides)
    dims = [
        (size, stride)
        for size, stride in zip(x.shape[sample:], strides[sample:], strict=True)
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


def _of_column(column: Any, rows: np.ndarray, samples: np.ndarray) -> Leaves:
    start, layout, size = _memory(column, 1)
    step = (
        column.stride(0) * column.element_size()
        if isinstance(column, Tensor)
        else column.strides[0]
    )
    return Leaves(layout, start + rows * step, samples, size, size)

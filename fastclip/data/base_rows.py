"""Which row of which data set a loader's row is, through torch's own subsets and joined data sets."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset


@dataclass(frozen=True, eq=False)
class Part:
    """Rows that one data set of no known parts brings.

    Args:
        dataset: that data set. places: int64 [rows], of the rows among those that were asked for.
        rows: int64 [rows], their numbers in it.
    """

    dataset: Any
    places: np.ndarray
    rows: np.ndarray


def parts_of(dataset: Any) -> list[Part]:
    """All rows of a data set, by the data sets that they come from: random_split's and nested ones too.

    Data sets of the user's own that repeat or reorder what they hold are taken as they are.
    """
    places = np.arange(len(dataset), dtype=np.int64)
    return list(_parts(dataset, places, places))


def _parts(dataset: Any, places: np.ndarray, rows: np.ndarray) -> Iterator[Part]:
    if isinstance(dataset, Subset) and len(dataset) == len(dataset.indices):
        chosen = numbers(dataset.indices)
        if chosen is not None:
            yield from _parts(dataset.dataset, places, chosen[rows])
            return
        with suppress(TypeError):  # of names that cannot be compared nothing is known
            first: dict[Any, int] = {}
            same = [first.setdefault(name, place) for place, name in enumerate(dataset.indices)]
            rows = np.asarray(same, dtype=np.int64)[rows]
    elif isinstance(dataset, ConcatDataset) and len(dataset) == dataset.cumulative_sizes[-1]:
        rows = np.where(rows < 0, rows + len(dataset), rows)
        ends = np.asarray(dataset.cumulative_sizes, dtype=np.int64)
        which = np.searchsorted(ends, rows, side="right")
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(ends) + 1))
        for number, each in enumerate(dataset.datasets):
            mine = order[cuts[number] : cuts[number + 1]]
            if len(mine):
                before = int(ends[number - 1]) if number else 0
                yield from _parts(each, places[mine], rows[mine] - before)
        return
    length = length_of(dataset)
    yield Part(dataset, places, rows if length is None else np.where(rows < 0, rows + length, rows))


def length_of(dataset: Any) -> int | None:
    """Rows of a data set; None where it does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def numbers(indices: Any) -> np.ndarray | None:
    """Of a Subset, int64; None where it names its rows otherwise."""
    if isinstance(indices, Tensor):
        indices = indices.cpu().numpy()
    found = np.asarray(indices) if len(indices) else np.zeros(0, dtype=np.int64)
    if found.ndim == 1 and found.dtype.kind in "iub":
        return found.astype(np.int64)
    try:
        return np.fromiter((operator.index(i) for i in indices), np.int64, len(indices))
    except TypeError:
        return None


def keys_of(dataset: Any) -> np.ndarray:
    """int64 [rows, k], alike where two rows are one: the same row of the same data set or memory.

    A row of a StackDataset is those of its members.
    """
    rows = np.arange(len(dataset), dtype=np.int64)
    keys = _keys(dataset, rows, {})
    if len(keys):
        keys = keys[:, (keys != keys[0]).any(0)]  # what tells none apart only costs
    return keys if keys.shape[1] else np.zeros((len(rows), 1), dtype=np.int64)


def _keys(dataset: Any, rows: np.ndarray, known: dict[Hashable, int]) -> np.ndarray:
    """Args: known: the number of each data set so far."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for part in _parts(dataset, np.arange(len(rows), dtype=np.int64), rows):
        if isinstance(part.dataset, StackDataset):
            members: Any = part.dataset.datasets
            members = members.values() if isinstance(members, dict) else members
            columns = [_keys(member, part.rows, known) for member in members]
        else:
            whose, first = _identity(part.dataset)
            number = known.setdefault(whose, len(known))
            columns = [np.stack([np.full_like(part.rows, number), part.rows + first], axis=1)]
        found.append((part.places, np.concatenate(columns, axis=1)))
    width = max((own.shape[1] for _, own in found), default=2)
    keys = np.full((len(rows), width), -1, dtype=np.int64)  # no data set has this number
    for places, own in found:
        keys[places, : own.shape[1]] = own
    return keys


def _identity(dataset: Any) -> tuple[Hashable, int]:
    """One for data sets of the same rows, and the number there of this one's row 0.

    A TensorDataset is its tensors; of views of one memory row i is where it lies, in steps of a row.
    """
    tensors = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    if not all(_lies_in_rows(tensor) for tensor in tensors):
        ids = tuple(id(tensor) for tensor in tensors)
        return ids, 0
    steps = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    first = tensors[0].data_ptr() // steps[0]
    layouts = (
        (t.device, t.dtype, t.shape[1:], t.stride(), t.is_conj(), t.is_neg()) for t in tensors
    )
    starts = (t.data_ptr() - first * step for t, step in zip(tensors, steps, strict=True))
    return tuple(zip(layouts, starts, strict=True)), first


def _lies_in_rows(tensor: Any) -> bool:
    """An ordinary tensor, each row of which has memory of its own."""
    return (
        type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() > 0
        and tensor.numel() > 0 and tensor.stride(0) > 0 and tensor.device.type != "meta"
    )  # fmt: skip

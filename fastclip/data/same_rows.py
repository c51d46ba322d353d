"""A data set still has its rows where they were: `unit_ids` says whose each row is by its place.

What a data set is, or holds, with an entry for each row (lists, tensors, arrays, tables) is looked at in
a few places when a pass begins. An entry that has changed is no reason to complain, for a data set may
cache or label its rows anew; one that has changed its place is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fastclip.data.base_rows import Part, length_of, parts_of
from fastclip.data.rows_told import held
from fastclip.errors import StepError

_PLACES = 64
"""That are looked at, evenly spaced."""
_BYTES = 2**28
"""Of a tensor or an array whose rows are looked for; of larger ones only some entries of each row."""


class SameRows:
    """What a data set was when `make_private` was called.

    No Snapshot, for entries may change: it is asked where they are now. Formal guarantee: none: a few
    rows that change places, and data sets that hold no entry for each row, are not seen.

    Args:
        dataset: of the loader. unit: int64 [rows], whose each row is, -1 for rows that are never drawn;
            None where rows are drawn one by one, and only their number matters.
    """

    def __init__(self, dataset: Any, unit: Tensor | None = None) -> None:
        self._dataset, self._rows = dataset, len(dataset)
        self._parts = [] if unit is None else parts_of(dataset)
        self._looks: list[dict[str, _Look]] = []
        for part in self._parts:
            assert unit is not None
            length = length_of(part.dataset)
            owner = np.full(length or 0, -1)
            if length is not None:
                owner[part.rows] = unit.numpy()[part.places]
            columns = dict(_columns(part.dataset, len(owner)))
            self._looks.append({name: _look(column, owner) for name, column in columns.items()})

    def check(self) -> None:
        """When a pass over the data begins.

        Raises:
            StepError: rows are gone, or are at other places.
        """
        rows = len(self._dataset)
        if rows < self._rows:
            raise StepError(
                f"the data set ({type(self._dataset).__name__}) has {rows} rows, and had {self._rows} "
                "when make_private was called, which are drawn by their numbers; call make_private "
                "again, on a data loader of the rows that are left"
            )
        if not self._parts:
            return
        now = parts_of(self._dataset)
        if not all(map(self._as_before, now, self._parts)) or len(now) < len(self._parts):
            self._refuse(type(self._dataset).__name__)
        for part, looks in zip(now, self._looks, strict=False):
            columns = dict(_columns(part.dataset, len(part.dataset))) if looks else {}
            for name, look in looks.items():
                if name in columns and look.moved(columns[name]):
                    kind = type(part.dataset).__name__
                    self._refuse(f"{kind}.{name}" if name else kind)

    def _as_before(self, now: Part, before: Part) -> bool:
        old = now.places < self._rows  # rows behind them are never drawn
        places, rows = now.places[old], now.rows[old]
        return np.array_equal(places, before.places) and np.array_equal(rows, before.rows)

    def _refuse(self, name: str) -> None:
        raise StepError(
            f"rows of the data set ({name}) are at other places than when make_private was called, and "
            "unit_ids says whose a row is by its place, so that rows of several units would be clipped "
            "as one; leave the order as it is (rows are drawn at random anyway), or call make_private "
            "again with the ids in the new order"
        )


@dataclass(frozen=True, eq=False)
class _Look:
    """Entries of one column, at some places.

    Args:
        owner: int64 [rows], whose each row is. places: that are looked at. stride: of the entries of
            a row. keys: equal where entries are. kept: the entries, whose identities are keys.
    """

    owner: np.ndarray
    places: np.ndarray
    stride: int
    keys: Sequence[Any]
    kept: Any

    def moved(self, column: Any) -> bool:
        """Most entries that are not where they were are, each at one place only, elsewhere."""
        now = _keys(column, self.places, self.stride)
        gone = [i for i, key in enumerate(self.keys) if key != now[i]]
        if not gone:
            return False
        found: dict[Any, list[int]] = {self.keys[i]: [] for i in gone}
        for place, key in enumerate(_keys(column, None, self.stride)):
            if key in found:
                found[key].append(place)
        times = Counter(self.keys)  # what stood at several places tells nothing: a label, None
        alone = [i for i in gone if times[self.keys[i]] == len(found[self.keys[i]]) == 1]
        once = [(self.places[i], found[self.keys[i]][0]) for i in alone]
        others = any(
            place >= len(self.owner) or self.owner[place] != self.owner[before]
            for before, place in once
        )
        return others and 2 * len(once) > len(gone)


def _look(column: Any, owner: np.ndarray) -> _Look:
    rows = len(owner)
    places = np.unique(np.linspace(0, rows - 1, min(_PLACES, rows)).astype(np.int64))
    size = getattr(column, "nbytes", 0)
    stride = max(1, -(-size // _BYTES)) if isinstance(size, int) else 1
    kept = [column[i] for i in places.tolist()] if isinstance(column, (list, tuple)) else None
    return _Look(owner, places, stride, _keys(column, places, stride), kept)


def _keys(column: Any, places: np.ndarray | None, stride: int) -> Sequence[Any]:
    """Of the entries at these places, or of all: of a list their identities, else what they hold."""
    if isinstance(column, (list, tuple)):
        return [id(column[i]) for i in (range(len(column)) if places is None else places.tolist())]
    if isinstance(column, Tensor):
        some = column.detach()
        if places is not None:
            some = some[torch.from_numpy(places).to(column.device)]
        entries = some.reshape(len(some), -1)[:, ::stride].cpu().contiguous()
        column, places, stride = entries.view(torch.uint8).numpy(), None, 1
    if not isinstance(column, np.ndarray):  # a table
        column = (column if places is None else column.iloc[places]).to_numpy()
        places = None
    chosen = column if places is None else column[places]
    if chosen.dtype == object:
        return [repr(row) for row in chosen.tolist()]
    flat = np.ascontiguousarray(chosen.reshape(len(chosen), -1)[:, ::stride])
    return [row.tobytes() for row in flat]


def _columns(dataset: Any, rows: int, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What a data set is, or holds, with an entry for each row, by name; also of one around another."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    numbered = ((f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors))
    for name, values in (("", dataset), *numbered, *held(getattr(dataset, "__dict__", {}))):
        if _by_row(values) and len(values) == rows > 0:
            yield name, values
        elif isinstance(values, Dataset) and values is not dataset and id(values) not in around:
            inside = length_of(values) == rows
            for inner, column in _columns(values, rows, (*around, id(dataset))) if inside else ():
                yield f"{name}.{inner}", column


def _by_row(values: Any) -> bool:
    if type(values) in (list, tuple):
        return True
    if isinstance(values, Tensor):
        odd = values.is_nested or values.is_quantized or values.is_complex() or values.is_meta
        return (
            type(values) is Tensor
            and values.layout is torch.strided
            and values.dim() > 0
            and not odd
        )
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return hasattr(values, "iloc") and hasattr(values, "to_numpy")

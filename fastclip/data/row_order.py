"""Collate functions, tried before rows are drawn: whether they keep the order of rows, which tells whose
each of them is, and what an empty batch looks like."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from fastclip._opacus import without_empty
from fastclip.data.collating import CheckedCollate, plain_collate
from fastclip.data.empty import EmptyBatches, draws_none
from fastclip.errors import ArgumentError, BatchSizeError
from fastclip.noise.aside import set_aside

_MOST = 16
"""Rows that are looked at, spread over the data set."""
_WAY_OUT = (
    "; with unit_ids row i of a batch must be the i-th drawn, for its place says whose it is; pass a "
    "collate_fn that keeps the order and draws no random numbers (let the data set's __getitem__ draw "
    "them), and whose leaves are tensors, arrays or lists with the rows along their first axis"
)

_NAMES = (
    "poisson_sampling=True draws samples by their numbers, and the data set ({kind}) has no sample "
    "{row}. If its keys are names, pass torch.utils.data.Subset(dataset, list_of_names)"
)
_NONE = (
    "{kind}.__getitems__ of the data set raises an error for an empty list of numbers, which Poisson "
    "sampling draws at times. Let it return an empty list"
)


def check_row_order(loader: DataLoader, rows: list[int], batch_first: bool = True) -> None:
    """Refuse a collate function, or a data set's __getitems__, that may change the order of rows.

    A few rows are read and collated in three orders, with the same random numbers.

    Args:
        rows: those that may be drawn.
        batch_first: rows lie along axis 0; else along axis 0 or 1.

    Raises:
        ArgumentError: the batches are not the same rows in these orders, or it cannot be told.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    while isinstance(collate, EmptyBatches):  # of a Poisson loader, around the user's own
        collate = collate.wrapped_collator_fn or list
    collate = plain_collate(without_empty(collate))
    if collate is default_collate and not _reads_at_once(dataset):
        return
    n = min(len(rows), _MOST)
    chosen = [rows[i * (len(rows) - 1) // max(n - 1, 1)] for i in range(n)]
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(n, generator=generator, device="cpu").tolist()
    name = f"collate_fn {getattr(collate, '__name__', type(collate).__name__)}"
    if _reads_at_once(dataset):
        name = f"{type(dataset).__name__}.__getitems__, or {name},"
    with generators_restored() as again:
        read = _reader(dataset, chosen)
        plain = list(_leaves(collate(read(range(n)))))
        moved = 0
        for order in ([*reversed(range(n))], shuffled):
            again()
            read = _reader(dataset, chosen) if _reads_at_once(dataset) else read
            other = list(_leaves(collate(read(order))))
            if len(other) != len(plain):
                raise ArgumentError(f"{name} gives rows in another order{_WAY_OUT}")
            moved += sum(
                _follows(a, b, order, name, batch_first) for a, b in zip(plain, other, strict=True)
            )
        if not moved and n > 1:
            raise ArgumentError(
                f"it cannot be told whether {name} keeps the order of rows: nothing in its "
                f"batch of {n} rows changes with them{_WAY_OUT}"
            )


def know_empty(loader: DataLoader, row: int) -> None:
    """Let the collate function of a Poisson loader learn from a row what a batch looks like.

    Raises:
        ArgumentError: the data set has no samples by number, or draws may be empty, and no such batch
            can be made.
    """
    collate, dataset = loader.collate_fn, loader.dataset
    assert isinstance(collate, EmptyBatches)
    with generators_restored():
        try:
            read, longer = _reader(dataset, [row]), None
            batch = collate.collated(read([0]))
            with suppress(Exception):
                longer = collate.collated(read([0, 0]))
            collate.learn(batch, 1, longer)
        except Exception as error:  # of a row that cannot be read, the loader tells
            if isinstance(error, KeyError) and error.args == (row,):
                raise ArgumentError(_NAMES.format(kind=type(dataset).__name__, row=row)) from error
        if not draws_none(loader.batch_sampler):
            return
        if collate.refusal is not None:
            raise ArgumentError(collate.refusal)
        if _reads_at_once(dataset):
            try:
                dataset.__getitems__([])  # type: ignore[attr-defined]
            except Exception as error:  # whatever it raises
                raise ArgumentError(_NONE.format(kind=type(dataset).__name__)) from error


def try_collate(loader: DataLoader, rows: list[int]) -> None:
    """Check what a Poisson loader's collate function makes of a few samples, before workers run it.

    Raises:
        BatchSizeError: it repeats or mixes them.
    """
    checked = getattr(loader.collate_fn, "checked", None)
    if not isinstance(checked, CheckedCollate):
        return
    found: BatchSizeError | None = None
    with generators_restored(), suppress(Exception):  # of one that cannot be read, the loader tells
        items = _reader(loader.dataset, rows)(range(len(rows)))
        try:
            checked(items)
        except BatchSizeError as error:
            found = error
    if found is not None:
        raise found


def _reads_at_once(dataset: Any) -> bool:
    """Rows come from a method of the data set's own that is given all of them."""
    if type(dataset) is Subset:
        return _reads_at_once(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def _reader(dataset: Any, chosen: list[int]) -> Any:
    """Rows at given places among the chosen ones, read as a DataLoader reads them."""
    if _reads_at_once(dataset):
        return lambda order: dataset.__getitems__([chosen[i] for i in order])
    kept = [dataset[row] for row in chosen]  # once: a data set may draw random numbers
    try:
        copy.deepcopy(kept)
    except Exception:  # whatever their own classes raise: a row that holds a lock, a file, a graph
        return lambda order: [dataset[chosen[i]] for i in order]
    return lambda order: [copy.deepcopy(kept[i]) for i in order]  # a collator may take rows apart


def _follows(a: Any, b: Any, order: list[int], name: str, batch_first: bool) -> bool:
    """Whether a leaf changes with the order of rows, as it must; False if it is of no rows.

    Raises:
        ArgumentError: it changes otherwise.
    """
    for axis in (0,) if batch_first else (0, 1):
        if _length(a, axis) == _length(b, axis) == len(order):
            permuted = _at(a, order, axis)
            if _same(permuted, b):
                return not _same(a, b)
    if not _same(a, b) or _length(a, 0) == len(order) > 1:
        raise ArgumentError(
            f"{name} does not keep the order of rows, or draws random numbers{_WAY_OUT}"
        )
    return False


def _length(leaf: Any, axis: int) -> int:
    if isinstance(leaf, Tensor):
        return leaf.shape[axis] if leaf.dim() > axis else -1
    return len(leaf) if isinstance(leaf, list) and not axis else -1


def _at(leaf: Any, order: list[int], axis: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.index_select(axis, torch.tensor(order, dtype=torch.int64, device=leaf.device))
    return [leaf[i] for i in order]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and bool(a == b)


def _leaves(batch: Any) -> Iterator[Any]:
    """Tensors, and lists of plain values, of a batch; arrays as tensors."""
    if isinstance(batch, np.ndarray) and batch.dtype != object:
        yield torch.from_numpy(np.array(batch)) if batch.dtype.kind in "biufc" else batch.tolist()
    elif isinstance(batch, (Tensor, str, bytes, int, float, bool, type(None))):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        if batch and all(isinstance(v, (str, bytes, int, float, bool, type(None))) for v in batch):
            yield list(batch)
        else:
            for value in batch:
                yield from _leaves(value)
    else:
        raise ArgumentError(
            f"it cannot be told whether collate_fn keeps the order of rows in a {type(batch).__name__}"
            f"{_WAY_OUT}"
        )


@contextmanager
def generators_restored() -> Iterator[Any]:
    """Gives what sets random numbers back to the block's start, as its end does."""
    with set_aside():
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()

        def again() -> None:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

        try:
            yield again
        finally:
            again()

"""What a special row holds, a row of whatever kind of input: tensor, packed sequence, array, list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip.samples.inputs import flatten_inputs, rebuild
from fastclip.samples.row_lists import is_array, is_data, is_list
from fastclip.samples.selected import counts

_LARGE, _LARGE_IN_HALF = 1e6, 1e2
_LARGE_MASK = 1e3
"""A mask's sum may be how much the model allocates."""
_SHORT = 2 / 3  # of a row's length

Change = Callable[[Tensor], Any]
"""Of one row, in place; it has an axis for its length at first or at last, or holds one number."""


def _tails(row: Tensor) -> list[Tensor]:
    """Its end, along the first and the last of its axes."""
    axes = {axis: row.shape[axis] for axis in {0, row.dim() - 1} if 0 <= axis < row.dim()}
    ends = {axis: max(1, int(_SHORT * size)) for axis, size in axes.items()}
    return [row.narrow(a, end, axes[a] - end) for a, end in ends.items() if axes[a] > end]


def ordinary(row: Tensor) -> None:
    pass


def short(row: Tensor) -> None:
    for tail in _tails(row):
        tail.zero_()


def gaps(row: Tensor) -> None:
    for tail in _tails(row) or [row]:
        tail.fill_(torch.nan)


def nan(row: Tensor) -> None:
    row.fill_(torch.nan)


def infinite(row: Tensor) -> None:
    row.fill_(-torch.inf)
    for tail in _tails(row):
        tail.fill_(torch.inf)


def _large(sign: int, row: Tensor) -> None:
    largest = _LARGE_MASK if counts(row) else _LARGE
    row.mul_(sign * (_LARGE_IN_HALF if row.dtype == torch.float16 else largest))


up, down = partial(_large, 1), partial(_large, -1)


def but_for_wholes(change: Change, changed: list[bool]) -> Change:
    """The same, but whole numbers stay: they may be categories.

    Args:
        changed: takes for every row whether anything else is left.
    """

    def one(row: Tensor) -> None:
        old = row.clone()
        change(row)
        if not row.is_complex():
            row.copy_(torch.where(old == old.round(), old, row))
        changed.append(bool((row != old).any()))

    return one


def changed(rows: Any, axis: int, changes: Sequence[Change]) -> Any:
    """Rows of an input, each changed in its way as far as it holds numbers that may be anything."""
    if isinstance(rows, PackedSequence):
        padded, lengths = pad_packed_sequence(rows)
        if not _free(padded):
            return rows
        padded = padded.detach().clone()
        for i, (one, length) in enumerate(zip(changes, lengths.tolist(), strict=True)):
            one(padded[:length, i])
        return pack_padded_sequence(padded, lengths, enforce_sorted=False)
    if is_list(rows):
        if all(map(_is_number, rows)):  # as a vector
            numbers = torch.tensor(rows, dtype=torch.float64, device="cpu")
            found = changed(numbers, 0, changes).tolist()
            return type(rows)(type(x)(value) for x, value in zip(rows, found, strict=True))
        return type(rows)(_entry(x, one) for x, one in zip(rows, changes, strict=True))
    x = _tensor_of(rows)
    if x is None or not _free(x):
        return rows
    x = x.detach().clone()
    for i, one in enumerate(changes):
        one(x.select(axis, i))
    return x if isinstance(rows, Tensor) else x.numpy()


def changeable(rows: Any, axis: int, count: int) -> bool:
    """Whether there are such numbers in so many rows of an input."""
    found: list[Tensor] = []
    with suppress(
        Exception
    ):  # an object that cannot be put together again: runs fail, and that is told
        changed(rows, axis, [found.append] * count)
    return bool(found)


def _is_number(x: Any) -> bool:
    """A floating-point number, one of NumPy's perhaps."""
    of_numpy = type(x).__module__ == "numpy" and type(x).__name__.startswith("float")
    return isinstance(x, float) or of_numpy


def _tensor_of(x: Any) -> Tensor | None:
    """A tensor, or one in the memory of an array."""
    if isinstance(x, Tensor) or not is_array(x):
        return x if isinstance(x, Tensor) else None
    try:
        return torch.from_numpy(x)
    except (TypeError, ValueError):  # of objects, texts, bytes in another order
        return None


def _free(x: Tensor, axes: int = 2) -> bool:
    """Whether its numbers may be anything; whole ones may be labels or lengths, one a row.

    Args:
        axes: of tensors that have more than one number a row.
    """
    if x.layout != torch.strided or x.is_nested or not x.numel():
        return False
    if x.is_complex() or not x.is_floating_point():
        return x.is_complex()
    return x.dim() >= axes or counts(x) or not bool((x == x.round()).all())


def _entry(row: Any, change: Change) -> Any:
    """One row of a list, in which tensors, arrays and numbers are changed."""
    if change is ordinary:
        return row
    leaves, structure = flatten_inputs((row,), {})
    found = [_leaf(x, change) for x in leaves]
    if all(x is y for x, y in zip(leaves, found, strict=True)):
        return row
    return rebuild(found, structure)[0][0]


def _leaf(leaf: Any, change: Change) -> Any:
    number, several = _is_number(leaf), is_data(leaf) and all(map(_is_number, leaf))
    x = _tensor_of(leaf)
    if number or several:
        x = torch.tensor(leaf, dtype=torch.float64, device="cpu")
    if x is None or not _free(x, axes=1):
        return leaf
    x = x.detach().clone()
    change(x)
    if number or several:
        return type(leaf)(x.tolist())
    return x if isinstance(leaf, Tensor) else x.numpy()

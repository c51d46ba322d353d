"""What may become of the other rows of a batch, of which a first one may hold none: very large ones,
zeros, whole masks, padded rows; or rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip.samples.inputs import flatten_inputs, rebuild
from fastclip.samples.row_lists import is_array, is_list, is_rows, shorter

Change = Callable[[Tensor], Tensor]
"""Of rows, which lie along the first axis."""
_LARGE = 1e4


def _is_mask(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _is_of_numbers(x: Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and not _is_mask(x)


def _large(x: Tensor) -> Tensor:
    """Whole numbers may be categories."""
    if not x.is_floating_point() or _is_mask(x):
        return x
    return torch.where(x == x.round(), x, x * _LARGE)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _full(x: Tensor) -> Tensor:
    """Masks that hide nothing."""
    return torch.ones_like(x) if x.numel() and _is_mask(x) and bool(x.any()) else x


def _half(x: Tensor) -> Tensor:
    """The second half of every row is hidden, or zero."""
    x = x.clone()
    if x.dim() > 1:
        x[:, x.shape[1] // 2 :] = 0
    return x


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan) if _is_of_numbers(x) else x


def _infinite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.inf) if _is_of_numbers(x) else x


def _shorter(x: Tensor) -> Tensor:
    """Entries of lists and arrays say that they are shorter."""
    return x


SPECIAL: tuple[Change, ...] = (_large, _zeros, _full, _half)
IN_LISTS: tuple[Change, ...] = (*SPECIAL, _shorter)
"""The same where rows come in lists, of unlike lengths perhaps."""
NOT_FINITE: tuple[Change, ...] = (_nan, _infinite)


def of_others(change: Change, kept: Collection[int], x: Any, axis: int) -> Any:
    """An input with all rows changed except those that are kept."""
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x)
        padded = of_others(change, kept, padded, 1)
        return pack_padded_sequence(padded, lengths, enforce_sorted=False)
    if is_rows(x):
        if change is _shorter:
            return shorter(x, {*range(len(x))} - {*kept})
        if is_list(x):
            return type(x)(e if i in kept else _entry(change, e) for i, e in enumerate(x))
        with suppress(TypeError, ValueError):  # of objects, texts, bytes in another order
            return of_others(change, kept, torch.from_numpy(x.copy()), 0).numpy()
        return x
    if type(x) is not Tensor:
        return x
    index = torch.tensor([*kept], dtype=torch.int64, device=x.device)
    found = change(x.movedim(axis, 0)).movedim(0, axis)
    return found.index_copy(axis, index, x.index_select(axis, index))


def _entry(change: Change, entry: Any) -> Any:
    """One row of a list, in which tensors, arrays and numbers are changed."""
    leaves, structure = flatten_inputs((entry,), {})
    found = [_leaf(change, x) for x in leaves]
    if all(x is y for x, y in zip(leaves, found, strict=True)):
        return entry
    return rebuild(found, structure)[0][0]


def _leaf(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf[None])[0]
    if isinstance(leaf, float):
        return float(change(torch.tensor([leaf], dtype=torch.float64, device="cpu")))
    if is_list(leaf) and all(isinstance(x, float) for x in leaf):
        return type(leaf)(_leaf(change, x) for x in leaf)
    if is_array(leaf):
        with suppress(TypeError, ValueError):
            return change(torch.from_numpy(leaf.copy())[None])[0].numpy()
    return leaf

"""Batches of draws without rows: what the collate function makes, with none in it.

Opacus' collator does so for tensors in dicts, lists and tuples, and fails on the rest when the first
empty draw comes, which may be hours later. This one knows from the beginning what it can make.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.data.collating import Checks, checked_collate
from fastclip.errors import ArgumentError

_CANNOT = (
    "collate_fn makes batches of which none without rows can be made ({what}), and Poisson sampling "
    "draws empty ones at times: let collate_fn take an empty list and return a batch without rows, or "
    "let it make tensors, arrays, plain values, or dicts, lists, tuples and dataclasses of these"
)
_MANY = 24.0
"""Where so many rows are drawn on average, none is with a probability of at most exp(-24)."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class EmptyBatches(Checks):
    """Opacus' collator of a Poisson loader (CollateFnWithEmpty), for more than tensors.

    Rows lie along the batch axis of tensors, along the first axis of arrays, and in lists that are as
    long as the batch. Without rows these are empty; a placeholder row (rand_on_empty) is made of ones:
    it is neither random, for a length or a divisor of 0 makes a model fail, nor a copy of a row, which
    would train where a loop of its own takes it for a batch that was drawn.

    Args:
        collate: the user's function; None for the list of samples.
        batch_first: rows lie along the first axis of tensors; else along the second.
        rand_on_empty: an empty draw is a placeholder row.
        ordered: sample i of a batch must be the i-th drawn.
        views: rows that the user's function may make of each sample.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, batch_first: bool = True,
        rand_on_empty: bool = False, *, ordered: bool = False, views: int = 1,
    ) -> None:  # fmt: skip
        self.wrapped_collator_fn = collate
        self.batch_first, self.rand_on_empty = batch_first, rand_on_empty
        self.checked = checked_collate(
            collate, batch_first=batch_first, ordered=ordered, views=views
        )
        self.views = views
        self.first_batch: Any = None
        self.known = False
        self.refusal: str | None = None
        """Why no empty batch can be made."""

    def __call__(self, batch: list[Any]) -> Any:
        """Collated rows.

        Raises:
            ArgumentError: there are none, and no such batch can be made.
            BatchSizeError: as `CheckedCollate`.
        """
        if len(batch):
            output = self.checked(batch) if self.checked else batch
            if not self.known:
                self.learn(output, len(batch))
            return output
        if not self.known:  # no sample was read yet, nor could one be
            try:
                return self.collated([])
            except Exception as error:
                what = "no sample has been read yet"
                raise ArgumentError(_CANNOT.format(what=what)) from error
        if self.refusal is not None:
            raise ArgumentError(self.refusal)
        return copy.deepcopy(self.first_batch)

    def collated(self, rows: list[Any]) -> Any:
        """What the user's collate function makes, of a sample that is tried."""
        return self.wrapped_collator_fn(rows) if self.wrapped_collator_fn else rows

    def learn(self, batch: Any, rows: int, longer: Any = None) -> None:
        """Keep an empty batch like this one, or why there is none.

        Args:
            batch: of `rows` rows. longer: the same with one row more, which tells lists of rows from
                others; None: not known.
        """
        self.known = True
        try:
            self.first_batch = self._empty(batch, rows, longer)
        except Exception as error:  # whatever types of the user's own raise
            try:
                self.first_batch = self.collated([])
            except Exception:  # it does not take an empty list
                what = str(error) if isinstance(error, _CannotError) else type(batch).__name__
                self.refusal = _CANNOT.format(what=what)

    def _empty(self, batch: Any, rows: int, longer: Any) -> Any:
        if isinstance(batch, PackedSequence):
            if not self.rand_on_empty or rows > 1:
                raise _CannotError("PackedSequence")
            return batch._replace(data=torch.ones_like(batch.data))
        if isinstance(batch, Tensor):
            shape = list(batch.shape)
            if shape:
                axis = 0 if self.batch_first or len(shape) == 1 else 1
                shape[axis] = self._placeholders(shape[axis], rows)
            return torch.ones(shape, dtype=batch.dtype, device=batch.device)
        if isinstance(batch, np.ndarray):
            shape = list(batch.shape)
            shape[:1] = [self._placeholders(n, rows) for n in shape[:1]]
            return np.ones(shape, dtype=batch.dtype)
        if isinstance(batch, (list, tuple)) and _of_rows(batch, rows, longer, self.views):
            return type(batch)([_ones(batch[0])] * self._placeholders(len(batch), rows))
        return _rebuilt(batch, longer, lambda part, other: self._empty(part, rows, other))

    def _placeholders(self, length: int, rows: int) -> int:
        """Rows of an empty batch, where those of `rows` samples have this length."""
        each = self.views if length == rows * self.views else 1
        return each if self.rand_on_empty else 0


def draws_none(sampler: Any) -> bool:
    """Whether a Poisson sampler may be expected to draw nothing in a training run."""
    rates = getattr(sampler, "rates", None)
    mean = sampler.num_samples * sampler.sample_rate if rates is None else float(rates.sum())
    return bool(mean < _MANY)


class _CannotError(Exception):
    """The name of a type of which nothing empty can be made."""


def _of_rows(batch: Any, rows: int, longer: Any, views: int) -> bool:
    """Whether a list has an entry for each row, or for each view of it."""
    if len(batch) not in (rows, rows * views) or hasattr(batch, "_fields"):
        return False
    if longer is not None:
        return bool(len(longer) * rows == (rows + 1) * len(batch))
    return all(isinstance(entry, _PLAIN) for entry in batch)


def _ones(row: Any) -> Any:
    """Something like a row, of ones."""
    if isinstance(row, Tensor):
        return torch.ones_like(row)
    if isinstance(row, np.ndarray):
        return np.ones_like(row)
    if isinstance(row, bytes):
        return b"1"
    if isinstance(row, (str, bool, int, float, complex)):
        return type(row)(1)
    return _rebuilt(row, None, lambda part, _: _ones(part))


def _rebuilt(whole: Any, longer: Any, of_part: Callable[[Any, Any], Any]) -> Any:
    """The same of other parts; a plain value, which is not of single rows, as it is.

    Raises:
        _CannotError: it is not known what its parts are.
    """

    def other(get: Any) -> Any:
        with suppress(Exception):  # `longer` is built otherwise
            return None if longer is None else get(longer)
        return None

    if isinstance(whole, _PLAIN):
        return whole
    if isinstance(whole, MutableMapping):
        made: Any = copy.copy(whole)
        for key, part in whole.items():
            made[key] = of_part(part, other(lambda x, key=key: x[key]))
        return made
    if isinstance(whole, (list, tuple)):
        parts = [of_part(part, other(lambda x, i=i: x[i])) for i, part in enumerate(whole)]
        return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)
    if is_dataclass(whole) and not isinstance(whole, type):
        made = copy.copy(whole)
        for name in (field.name for field in fields(whole)):
            part = of_part(getattr(whole, name), other(lambda x, name=name: getattr(x, name)))
            object.__setattr__(made, name, part)  # a frozen one, too
        return made
    raise _CannotError(type(whole).__name__)

"""Samples that a sampler of the user's own draws: each at most once in a pass over the data.

Epsilon is stated for samples that are in a batch with probability q = 1 / len(data_loader), once. A
sample that is drawn twice in a batch contributes twice; one that is drawn twice in a pass has the rate
2q. Which sample it is says the key that the data set is asked for, so keys must compare by value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from fastclip.errors import ArgumentError


def value_of(key: Any) -> Any:
    """The key as something that is equal to another one's if the keys are.

    Raises:
        TypeError: keys of this type are equal to themselves alone, or cannot be hashed.
    """
    if isinstance(key, (Tensor, np.ndarray)) and not key.shape:  # tensors compare by identity
        key = key.item()
    if isinstance(key, tuple):
        return tuple(map(value_of, key))
    kind = type(key)
    by_identity = kind.__eq__ is object.__eq__ and key is not None and not isinstance(key, Enum)
    if by_identity or kind.__hash__ is None:
        raise TypeError(kind.__name__)
    if is_dataclass(key):
        for field in fields(key):
            if field.compare:
                value_of(getattr(key, field.name))
    return key


class Distinct:
    """Raises an error for a sample that was drawn before.

    Args:
        rows: of the data set. name: of the sampler, for the message. once: a sample may be drawn once in
            a pass; else once in a draw.
    """

    def __init__(self, rows: int, name: str, *, once: bool = True) -> None:
        self.rows, self.name, self.once = rows, name, once
        self._clear()

    def _clear(self) -> None:
        self._numbers = bytearray(self.rows)
        self._keys: set[Any] = set()

    def one_pass(self) -> Distinct:
        """The same for a pass that begins."""
        return Distinct(self.rows, self.name, once=self.once)

    def check(self, drawn: Any) -> int:
        """Note the samples of one draw; of a list of keys, which the data set is asked for at once, all.

        Returns:
            How many these are.

        Raises:
            ArgumentError: one of them was drawn before, or that cannot be known.
        """
        if not self.once:
            self._clear()
        count = 0
        for key in _single(drawn, self.rows):
            count += 1
            if self._seen(key):
                raise ArgumentError(
                    f"the data loader's {self.name} drew sample {key!r} twice in one "
                    f"{'pass over the data' if self.once else 'batch'}, so it contributes more often "
                    "than epsilon states; let it draw each sample at most once, or use "
                    "poisson_sampling=True with shuffle=True"
                )
        return count

    def _seen(self, key: Any) -> bool:
        try:
            key = value_of(key)
        except TypeError as error:
            raise ArgumentError(
                unknown_keys(f"the data loader's {self.name} draws", error)
            ) from error
        try:
            number = (
                int(key) if isinstance(key, float) and key.is_integer() else operator.index(key)
            )
        except TypeError:  # keys of a data set that is not indexed by numbers
            before = key in self._keys
            self._keys.add(key)
            return before
        number += self.rows if -self.rows <= number < 0 else 0
        if not 0 <= number < self.rows:
            raise ArgumentError(
                f"the data loader's {self.name} drew sample {number} of a data set of {self.rows}"
            )
        before = bool(self._numbers[number])
        self._numbers[number] = 1
        return before


def unknown_keys(who: str, error: TypeError) -> str:
    """What to say of keys that `value_of` does not take."""
    return (
        f"{who} keys of type {error}, which do not compare by value, so a sample drawn twice under two "
        f"keys would not be seen. Use numbers, strings or tuples as keys, or give {error} __eq__ and "
        "__hash__"
    )


def _single(drawn: Any, rows: int) -> Iterator[Any]:
    """The keys of single samples among those of a draw."""
    if isinstance(drawn, slice):
        drawn = range(*drawn.indices(rows))
    if isinstance(drawn, (Tensor, np.ndarray)):
        drawn = drawn.tolist()
    if rows > 1 and len(drawn) == rows and all(isinstance(key, bool) for key in drawn):
        drawn = [number for number, chosen in enumerate(drawn) if chosen]  # a mask
    for key in drawn:
        listed = isinstance(key, (list, range, slice, set, frozenset))
        if listed or (isinstance(key, (Tensor, np.ndarray)) and key.shape):
            yield from _single(key, rows)
        else:
            yield key

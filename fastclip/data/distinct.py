"""Rows that a sampler of the user's own draws: each at most once in a pass over the data.

Epsilon is stated for rows that are in a batch with probability q = 1 / len(data_loader), once. A row
that is drawn twice in a batch contributes twice; one that is drawn twice in a pass has the rate 2q.
"""

from __future__ import annotations

import operator
from typing import Any

from fastclip.errors import ArgumentError


class Distinct:
    """Refuses a row that was drawn before.

    Args:
        rows: of the data set. name: of the sampler, for the message. once: a row may be drawn once in a
            pass; else once in a draw.
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

    def check(self, drawn: Any) -> None:
        """Note the rows of one draw.

        Raises:
            ArgumentError: one of them was drawn before.
        """
        if not self.once:
            self._clear()
        for row in drawn.tolist() if hasattr(drawn, "tolist") else drawn:
            if self._seen(row):
                raise ArgumentError(
                    f"the data loader's {self.name} drew row {row!r} twice in one "
                    f"{'pass over the data' if self.once else 'batch'}, so it would contribute more "
                    "often than epsilon says; let it draw each row at most once, or use "
                    "poisson_sampling=True with shuffle=True"
                )

    def _seen(self, row: Any) -> bool:
        try:
            number = operator.index(row)
        except TypeError:  # keys of a data set that is not indexed by numbers
            before = row in self._keys
            self._keys.add(row)
            return before
        number += self.rows if -self.rows <= number < 0 else 0
        if not 0 <= number < self.rows:
            raise ArgumentError(
                f"the data loader's {self.name} drew row {number} of a data set of {self.rows}"
            )
        before = bool(self._numbers[number])
        self._numbers[number] = 1
        return before

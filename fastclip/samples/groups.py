"""Which rows of a run are changed, and which are kept."""

from __future__ import annotations

from itertools import cycle

_SPLIT = frozenset({0, 3, 5, 6})
"""Rows to change: neighbours, halves, strides of two, and rows in reverse lie on either side."""
_FEWEST = 5
"""Rows that are run at least, for that."""
_SEVERAL = 3
MANY = 512
"""Rows of the largest batch that is looked at."""


def spread(choice: int, ordered: bool) -> tuple[list[int], list[frozenset[int]]]:
    """Positions for so many rows, and two groups of them that hold different rows.

    Args:
        ordered: two rows, in their order.
    """
    if ordered:
        return [0, 0, 1, 1], [frozenset({2, 3}), frozenset({0, 1})]
    count = max(choice, _FEWEST)
    group = _SPLIT & set(range(count))
    inside, outside = (cycle(range(first, max(choice, first + 1), 2)) for first in (0, 1))
    if choice == 1:
        outside = cycle([0])
    rows = [next(inside if i in group else outside) for i in range(count)]
    return rows, [group, frozenset(range(count)) - group]


def others_changed(rows: list[int], kept: frozenset[int]) -> list[int]:
    """The same rows where they are kept, and one of them everywhere else."""
    return [row if i in kept else rows[min(kept)] for i, row in enumerate(rows)]


def few(rows: list[int]) -> list[int]:
    """The first of them, of which there are several."""
    distinct = list(dict.fromkeys(rows))[:_SEVERAL]
    return rows[: rows.index(distinct[-1]) + 1]


def smaller(rows: list[int], batch: int) -> list[list[int]]:
    """Their first few; and as many of them as the batch has, whose number a model may ask for."""
    some = few(rows)
    return [some] if batch in (len(some), *range(len(rows), batch + 1)) else [some, rows[:batch]]

"""Forward passes under one loss hold their samples in the same rows: the first ones are compared."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fastclip.errors import GraphError, say
from fastclip.samples.calls import Forward

_COMPARED = 4
"""Backward passes over several forward passes whose rows are compared: reading them waits for a GPU."""

_FEW = 4
"""Whole numbers of a row below which rows are alike by accident: a letter, a category."""


_FEW_SHARED = (
    "two forward passes under one loss have few rows in common, and row i of each is taken for what one "
    "sample has given: two views of it, or two parts of what the data loader drew for it. If one takes "
    "rows of another source (a public data set, a replay buffer), one row less moves every pair behind "
    "it, and a sample changes the sum by many times max_grad_norm: let the data set that is drawn from "
    "return both rows of a pair"
)


class RowOrders:
    """Refuses samples that enter one backward pass in two rows, where they would contribute 2 C.

    `criterion(model(x), y) + criterion(model(x[order]), y[order])` clips what two samples have given
    to one row. Inputs are compared bit for bit. Where passes have few rows in common (two views of each
    row, or rows of two sources), whoever trains is told once what is taken for granted.
    """

    def __init__(self) -> None:
        self._left, self._told = _COMPARED, False

    def finish(self, forwards: Sequence[Forward]) -> None:
        """One backward pass has reached these forward passes; none may reach them again.

        Raises:
            GraphError: two of them hold the same samples in other rows.
        """
        for forward in forwards:
            forward.finished = True
        several = len(forwards) > 1 and self._left > 0
        if several and torch.cuda.is_available():
            several = (
                not torch.cuda.is_current_stream_capturing()
            )  # what rehearsed it was looked at
        seen = [rows for rows in map(_rows, forwards) if rows is not None] if several else []
        for number, (kind, rows) in enumerate(seen):
            for other, before in seen[:number]:
                if kind == other and (_moved(before, rows) or _moved(rows, before)):
                    raise GraphError(
                        "two forward passes under one loss hold the same samples in other rows "
                        "(such as model(x) and model(x[order])), so that a sample would contribute "
                        "up to twice what it is clipped to; each row of all forward passes under "
                        "one loss must be computed from one sample"
                    )
                if kind == other and not self._told and 2 * len({*before} & {*rows}) < len({*rows}):
                    self._told = True
                    say(_FEW_SHARED)
        self._left -= len(seen) > 1
        for forward in forwards:
            forward.inputs = None
            if forward.layout is not None:
                forward.layout.ended()


def _rows(forward: Forward) -> tuple[Hashable, list[int]] | None:
    """How a call was given its inputs, and for each row of them what tells it from others."""
    size, layout = forward.batch_size or 0, forward.layout
    if forward.inputs is None or layout is None or size < 2:
        return None
    given = layout.read(*forward.inputs)
    leaves, structure = given.leaves, given.structure
    axes = layout.cuts(given.way) or (layout.axis,) * len(leaves)
    keys: list[list[bytes]] = []
    told = 0
    for leaf, axis in zip(leaves, axes, strict=True):
        if isinstance(leaf, PackedSequence):
            leaf, axis = pad_packed_sequence(leaf, batch_first=True)[0], 0
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or axis is None:
            continue
        if leaf.dim() > axis and leaf.shape[axis] == size:
            rows = leaf.detach().movedim(axis, 0).cpu().reshape(size, -1).contiguous()
            keys.append([row.tobytes() for row in rows.view(torch.uint8).numpy()])
            told += _FEW if leaf.is_floating_point() else rows.shape[1]
    if told < _FEW:
        return None
    return structure, [hash(row) for row in zip(*keys, strict=True)]


def _moved(distinct: list[int], others: list[int]) -> bool:
    """Whether half of the `others`, two at the least, are rows that stand in other places.

    Rows that are not all distinct tell nothing: categories or empty texts are alike by accident.
    """
    places = {row: place for place, row in enumerate(distinct)}
    if len(places) < len(distinct) or len(distinct) != len(others):
        return False
    moved = sum(places.get(row, place) != place for place, row in enumerate(others))
    return moved >= 2 and 2 * moved >= len(others)

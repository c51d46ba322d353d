"""What a pass computes for several parameters at once: small operations cost most when they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.layers import KeptRecord, LinearRecord, Record, ViewedRecord, join

SMALL = 4096
"""Entries up to which a parameter's kept gradients wait for others of their size."""

ROOM = 32 << 20
"""Bytes of sums of linear layers, computed together, that are always allowed."""


@dataclass
class Entry:
    """The contributions of one pass to one parameter."""

    records: list[Record]
    norm_sq: Tensor | ops.UnfinishedNorm | None
    """[b], or what it is made of; None while it waits: for another use, or for other parameters."""
    small: bool = False
    """Its one record waits for those of other small parameters."""

    def join(self, record: Record) -> None:
        """One more contribution: the norm waits for the end."""
        self.norm_sq = None
        join(self.records, record)
        self.small = len(self.records) == 1 and waits(self.records[0])


def waits(record: Record) -> bool:
    """It holds the gradients of a small parameter, as they are."""
    if type(record) is not KeptRecord or not record.as_given:
        return False
    return record.gradients.dim() > 0 and record.gradients.shape[1:].numel() <= SMALL


@dataclass
class Stack:
    """The gradients of k small parameters of n entries each, [k, b, n]."""

    parameters: list[nn.Parameter]
    gradients: Tensor

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every parameter, [n].

        Args:
            scales: [b], or [k, b].
        """
        sums = ops.kept_sums(self.gradients, scales).unbind()
        # `data` has a version of its own, so that no part need be copied out of the buffer.
        return zip(self.parameters, (row.data for row in sums), strict=True)


def stack_small(entries: dict[nn.Parameter, Entry]) -> list[Stack]:
    """Small parameters' gradients, taken out of their entries, which get their norms.

    Raises:
        GraphError: one was changed in place since it was recorded.
    """
    groups: dict[Any, list[tuple[nn.Parameter, Entry, Tensor]]] = {}
    for parameter, entry in entries.items():
        if entry.norm_sq is not None or not entry.small:
            continue
        record = entry.records[0]
        record.check_unmodified()
        gradients = record.per_sample()
        key = (gradients.shape[0], gradients.shape[1:].numel(), gradients.dtype, gradients.device)
        groups.setdefault(key, []).append((parameter, entry, gradients))
    found = []
    for (b, size, *_), small in groups.items():
        if len(small) < 2:
            continue
        rows = torch.stack([ops.shaped(gradients, b, size) for _, _, gradients in small])
        norms = ops.row_norm_sq(rows.flatten(0, 1)).view(len(small), b)
        for (_, entry, _), norm_sq in zip(small, norms, strict=True):
            entry.records.clear()
            entry.norm_sq = norm_sq
        found.append(Stack([parameter for parameter, _, _ in small], rows))
    return found


def finish_norms(entries: Iterable[Entry]) -> None:
    """The last operations of norms that wait for those of other layers."""
    groups: dict[Any, list[tuple[Entry, ops.UnfinishedNorm]]] = {}
    for entry in entries:
        if type(entry.norm_sq) is not Tensor and isinstance(entry.norm_sq, ops.UnfinishedNorm):
            groups.setdefault(entry.norm_sq.kind, []).append((entry, entry.norm_sq))
    for pairs in groups.values():
        norms = type(pairs[0][1]).finished([norm for _, norm in pairs])
        for (entry, _), norm_sq in zip(pairs, norms, strict=True):
            entry.norm_sq = norm_sq


class LinearSums:
    """Clipped sums of linear layers on a GPU, of layers of one kind together.

    Records are let go of when their group is summed, and its sums come into being at once: no more
    than ROOM, or than the operands of one of its layers.

    Args:
        add: takes a parameter and its sum, of any shape. scales: [b], of all layers.
    """

    def __init__(self, add: Callable[[nn.Parameter, Tensor], None], scales: Tensor) -> None:
        self._add, self._scales = add, scales
        self._waiting: dict[Any, list[tuple[nn.Parameter, tuple[Tensor, Tensor]]]] = {}

    def take(self, parameter: nn.Parameter, records: list[Record]) -> bool:
        """Whether it is the one record of a layer for which a kernel would sum several together."""
        record = records[0]
        if type(record) is ViewedRecord:
            record = record.record
        if len(records) > 1 or type(record) is not LinearRecord or record.instantiates:
            return False
        if ops.computes_reference(record.a):
            return False
        a, g = pair = record.pair()
        kind = [(x.shape, x.stride(), x.dtype, x.device) for x in pair]
        waiting = self._waiting.setdefault(tuple(kind), [])
        waiting.append((parameter, pair))
        room = max(ROOM, a.nbytes + g.nbytes)
        sums = 4 * a.shape[-1] * g.shape[-1] * (len(waiting) + 1)  # with one more layer
        if len(waiting) == ops.LAYERS_TOGETHER or sums > room:
            self._sum(waiting)
        return True

    def finish(self) -> None:
        """Sum what waits."""
        for waiting in self._waiting.values():
            self._sum(waiting)

    def _sum(self, waiting: list[tuple[nn.Parameter, tuple[Tensor, Tensor]]]) -> None:
        parameters, pairs = [p for p, _ in waiting], [pair for _, pair in waiting]
        waiting.clear()
        if not pairs:
            return
        scales = self._scales.to(pairs[0][0].device)
        if len(pairs) == 1:
            self._add(parameters[0], ops.scaled_sum(*pairs[0], scales))
            return
        for parameter, total in zip(parameters, ops.scaled_sums(pairs, scales), strict=True):
            self._add(parameter, total.data)  # which has a version of its own

"""What a pass computes for several parameters at once: small operations cost most when they begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.layers import KeptRecord, Record

SMALL = 4096
"""Entries up to which a parameter's kept gradients wait for others of their size."""


@dataclass
class Entry:
    """The contributions of one pass to one parameter."""

    records: list[Record]
    norm_sq: Tensor | ops.UnfinishedNorm | None
    """[b], or what it is made of; None while it waits: for another use, or for other parameters."""


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
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter, entry in entries.items():
        if entry.norm_sq is not None or len(entry.records) != 1 or not waits(entry.records[0]):
            continue
        record = entry.records[0]
        record.check_unmodified()
        gradients = record.per_sample()
        b = gradients.shape[0]
        size = gradients.numel() // b if b else gradients.shape[1:].numel()
        key = (b, size, gradients.dtype, gradients.device)
        groups.setdefault(key, []).append(parameter)
    found = []
    for (b, size, *_), parameters in groups.items():
        if len(parameters) < 2:
            continue
        held = [entries[parameter].records.pop().per_sample() for parameter in parameters]
        rows = [x if x.dim() == 2 else x.reshape(b, size) for x in held]
        stack = Stack(parameters, torch.stack(rows))
        norms = ops.row_norm_sq(stack.gradients.flatten(0, 1)).view(len(parameters), b)
        for parameter, norm_sq in zip(parameters, norms, strict=True):
            entries[parameter].norm_sq = norm_sq
        found.append(stack)
    return found


def finish_norms(entries: Iterable[Entry]) -> None:
    """The last operations of norms that wait for those of other layers."""
    groups: dict[Any, list[tuple[Entry, ops.UnfinishedNorm]]] = {}
    for entry in entries:
        if isinstance(entry.norm_sq, ops.UnfinishedNorm):
            groups.setdefault(entry.norm_sq.kind, []).append((entry, entry.norm_sq))
    for pairs in groups.values():
        norms = type(pairs[0][1]).finished([norm for _, norm in pairs])
        for (entry, _), norm_sq in zip(pairs, norms, strict=True):
            entry.norm_sq = norm_sq

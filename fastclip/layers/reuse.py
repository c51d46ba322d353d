"""A parameter used more than once: a sample's gradient is the sum over the uses.

Cross terms count, so norms cannot be added. Linear uses are concatenated along t (look-ups and kept
gradients are one record by now), a table tied to an output head takes the gathered cross product,
and anything else is instantiated and added. Clipped sums are linear in the gradients: each record
gives its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import LinearRecord, LookupRecord, Record
from fastclip.layers.unit_record import of_one_kind
from fastclip.planner import Planner


def joint_norm_sq(records: Sequence[Record], planner: Planner) -> Tensor:
    """Squared norms [b] of the summed gradients that `records` contribute to one parameter."""
    together = of_one_kind(records)
    if together is not None and len(together) > 1:
        layout = together[0].layout(together[1:])
        runs = zip(*(record.rows.laid(layout) for record in together), strict=True)
        return layout.gather([joint_norm_sq(run, planner) for run in runs])
    uses = [(r.a, r.g) for r in records if isinstance(r, LinearRecord)]
    if len(uses) == len(records) > 1 and _alike(records) and _ghost(uses, planner):
        return ops.ghost_norm_concat(uses)
    merged = _merge(records, planner)
    if len(merged) == 1:
        return merged[0].norm_sq()
    if len(merged) == 2:
        head, table = merged
        if isinstance(head, LinearRecord) and isinstance(table, LookupRecord):
            dense = table.dense()
            if dense is not None and not head.transposed:
                separate = head.norm_sq() + table.norm_sq()
                return ops.tied_norm(*dense, head.a, head.g, separate)
    return instantiated_norm_sq(merged)


def instantiated_norm_sq(records: Sequence[Record]) -> Tensor:
    """Squared norms [b] of the gradients themselves, added, and what rounding can hide of their sum.

    The records' sums are taken one by one: where large ones cancel, what is left of them may be
    rounding, of each by its size.
    """
    total: Any = 0
    hidden: Any = 0
    for record in records:
        own = record.per_sample()
        total = total + own
        lost = 2 * len(records) * ops.unit_roundoff(own.dtype) * ops.row_norm_sq(own).sqrt()
        hidden = hidden + lost
        slack = record.slack()
        hidden = hidden if slack is None else hidden + slack
    return (ops.row_norm_sq(total).sqrt() + hidden).square()


def _alike(records: Sequence[Record]) -> bool:
    """All transposed or none, and of the same types: they can be laid along t."""
    linear = [r for r in records if isinstance(r, LinearRecord)]
    return len({(r.transposed, r.a.dtype, r.g.dtype) for r in linear}) == 1


def _ghost(uses: Sequence[tuple[Tensor, Tensor]], planner: Planner) -> bool:
    """Whether the planner takes Grams for the uses laid along t."""
    (b, _, d), (_, _, p) = uses[0][0].shape, uses[0][1].shape
    t, first = sum(a.shape[1] for a, _ in uses), uses[0][0]
    size = first.element_size()
    return planner.linear(b, t, d, p, size, may_keep=False, device=first.device).ghost


def _merge(records: Sequence[Record], planner: Planner) -> list[Record]:
    linear = [r for r in records if isinstance(r, LinearRecord)]
    lookup = [r for r in records if isinstance(r, LookupRecord)]
    rest = [r for r in records if not isinstance(r, (LinearRecord, LookupRecord))]
    return [*_concatenate_linear(linear, planner), *lookup, *rest]


def _concatenate_linear(records: list[LinearRecord], planner: Planner) -> list[LinearRecord]:
    if len(records) < 2 or not _alike(records):
        return records
    a = torch.cat([r.a for r in records], dim=1)
    g = torch.cat([r.g for r in records], dim=1)
    b, t, d = a.shape
    choice = planner.linear(b, t, d, g.shape[2], a.element_size(), may_keep=False, device=a.device)
    return [LinearRecord(a, g, ghost=choice.ghost, transposed=records[0].transposed)]

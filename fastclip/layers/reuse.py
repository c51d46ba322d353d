"""A parameter used more than once: a sample's gradient is the sum over the uses.

Cross terms count, so norms cannot be added. Linear uses are concatenated along t, look-ups along
n, a table tied to an output head takes the gathered cross product, and anything else is
instantiated and added. Clipped sums are linear in the gradients: each record gives its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import LinearRecord, LookupRecord, Record
from fastclip.planner import Planner


def joint_norm_sq(records: Sequence[Record], planner: Planner) -> Tensor:
    """Squared norms [b] of the summed gradients that `records` contribute to one parameter."""
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
    total = merged[0].per_sample()
    for record in merged[1:]:
        total = total + record.per_sample()
    return ops.row_norm_sq(total)


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
    return [*_concatenate_linear(linear, planner), *_concatenate_lookups(lookup), *rest]


def _concatenate_linear(records: list[LinearRecord], planner: Planner) -> list[LinearRecord]:
    if len(records) < 2 or not _alike(records):
        return records
    a = torch.cat([r.a for r in records], dim=1)
    g = torch.cat([r.g for r in records], dim=1)
    b, t, d = a.shape
    choice = planner.linear(b, t, d, g.shape[2], a.element_size(), may_keep=False, device=a.device)
    return [LinearRecord(a, g, ghost=choice.ghost, transposed=records[0].transposed)]


def _concatenate_lookups(records: list[LookupRecord]) -> list[LookupRecord]:
    if len(records) < 2 or len({r.padding_idx for r in records}) > 1:
        return records
    first = records[0]
    dense = [pair for pair in (r.dense() for r in records) if pair is not None]
    if len(dense) == len(records):
        ids = torch.cat([ids for ids, _ in dense], dim=1)
        g = torch.cat([g for _, g in dense], dim=1)
        return [LookupRecord.from_dense(ids, g, first.num_embeddings, first.padding_idx)]
    return [
        LookupRecord(
            torch.cat([r.ids for r in records]), torch.cat([r.sample for r in records]),
            torch.cat([r.g for r in records]), batch_size=first.batch_size,
            num_embeddings=first.num_embeddings, padding_idx=first.padding_idx,
        )
    ]  # fmt: skip

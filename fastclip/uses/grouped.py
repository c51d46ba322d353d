"""Products of rows that a router has sorted by their expert, all experts at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.uses.elementwise import flat_operands
from fastclip.uses.records import GroupedRecord
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward


@register_use("_grouped_mm", "grouped_mm")
class GroupedUse(UseRule):
    """A batch of matrices, each for its own rows: rows offs[e - 1] to offs[e] meet matrix e."""

    name = "grouped product"
    routed = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return flat_operands(name, args, kwargs) if len(args) > 1 else None

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        x, weight = operands["0"], operands["1"]
        return (
            private == ["1"] and x.dim() == 2 and weight.dim() == 3 and _ends(operands) is not None
        )

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in private]

    def records(self, use: UseBackward) -> None:
        ends = use[next(n for n in use.tensors() if not use[n].is_floating_point())]
        rows = torch.arange(len(use.g), dtype=ends.dtype, device=ends.device)
        expert = torch.searchsorted(ends, rows, right=True).to(torch.int64)
        experts = len(use["1"])
        owner = use.row_owners().masked_fill(expert >= experts, -1)

        def total(a: Tensor, g: Tensor) -> Tensor:
            return _by_expert(a, g, expert, experts)

        record = GroupedRecord(
            use["0"], use.g, owner, expert.clamp_max(experts - 1), batch=use.batch, members=experts,
            total=total,
        )  # fmt: skip
        use.record("1", record)


@ops.in_full_float32
def _by_expert(a: Tensor, g: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The sum of a_n g_n^T over each expert's rows, in the accumulation type: [e, d, p].

    Not by the function's own backward: of 16-bit operands that would round the scaled gradients and the
    sum, by more than the norm tells of. A GPU is not waited for: each expert meets all rows.

    Args:
        a: [n, d]. g: [n, p]. expert: of each row, sorted, int64 [n]; `experts` of none.
    """
    a, g = ops.widen(a), ops.widen(g)
    if a.device.type == "cpu":
        counts = expert.bincount(minlength=experts)[:experts].tolist()
        rows = (x[: sum(counts)].split(counts) for x in (a, g))
        return torch.stack([x.t() @ y for x, y in zip(*rows, strict=True)])
    return torch.stack([a.t() @ g.masked_fill((expert != e)[:, None], 0) for e in range(experts)])


def _ends(operands: Operands) -> Tensor | None:
    found = [v for v in operands.values() if isinstance(v, Tensor) and not v.is_floating_point()]
    return found[0] if len(found) == 1 else None

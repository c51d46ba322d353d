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
        own = use["1"].detach()

        def total(a: Tensor, g: Tensor) -> Tensor:
            weight = own.requires_grad_()
            out = use.replay({"0": a, "1": weight})
            return ops.widen(torch.autograd.grad(out, weight, g.to(out.dtype))[0])

        record = GroupedRecord(
            use["0"], use.g, owner, expert.clamp_max(experts - 1), batch=use.batch, members=experts,
            total=total,
        )  # fmt: skip
        use.record("1", record)


def _ends(operands: Operands) -> Tensor | None:
    found = [v for v in operands.values() if isinstance(v, Tensor) and not v.is_floating_point()]
    return found[0] if len(found) == 1 else None

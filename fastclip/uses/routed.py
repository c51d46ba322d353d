"""Rows that the model has moved, as a router does for its experts: a sample's are told one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import Record
from fastclip.ops.linear import gram_bound
from fastclip.planner import Planner
from fastclip.uses.elementwise import flat_operands
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

_GRAM_ENTRIES = 1 << 24
"""Of the products of all rows with some of them, at once."""


class RoutedRecord(Record):
    """Linear maps of rows a [n, d] to rows with gradient g [n, p]: sample b's is the sum over its rows.

    Args:
        owner: the sample of each row, int64 [n]; -1: of nobody. expert: the map of each, int64 [n].
        batch, experts: how many there are. backward: the gradient of all maps for such a and g.
    """

    def __init__(
        self, a: Tensor, g: Tensor, owner: Tensor, expert: Tensor, *, batch: int, experts: int,
        planner: Planner, backward: Callable[[Tensor, Tensor], Tensor],
    ) -> None:  # fmt: skip
        super().__init__(a, g)
        self.a, self.g, self.owner, self.expert = a, g, owner, expert
        self.batch, self.experts = batch, experts
        self._planner, self._backward = planner, backward

    def norm_sq(self) -> Tensor:
        mine = self.owner >= 0
        group = torch.where(mine, self.owner * self.experts + self.expert, -1)
        if self.g.device.type == "cpu":
            return self._by_group(group, mine)
        return self._by_pair(group)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        rows = scale[self.owner.clamp_min(0)].masked_fill(self.owner < 0, 0)
        a, g = ops.drop_zeroed(rows, self.a, ops.widen(self.g))
        return self._backward(a, g * rows.to(g.dtype)[:, None])

    def per_sample(self) -> Tensor:
        one = torch.eye(self.batch, dtype=torch.float32, device=self.g.device)
        return torch.stack([self.clipped_sum(scale) for scale in one])

    def slack(self) -> Tensor:
        sizes = []
        for x in (self.a, self.g):
            rows = ops.row_norm_sq(x).masked_fill(self.owner < 0, 0)
            size = rows.new_zeros(self.batch)
            sizes.append(size.index_add_(0, self.owner.clamp_min(0), rows))
        product = (sizes[0] * sizes[1]).sqrt()
        return 2 * ops.unit_roundoff(product.dtype) * product

    def _by_group(self, group: Tensor, mine: Tensor) -> Tensor:
        """The rows of one sample and expert, laid side by side."""
        total = ops.widen(self.g).new_zeros(self.batch)
        kept, order = group[mine].sort()
        if not len(kept):
            return total
        known, which, counts = kept.unique_consecutive(return_inverse=True, return_counts=True)
        position = torch.arange(len(kept), dtype=torch.int64, device=kept.device)
        position = position - (counts.cumsum(0) - counts)[which]
        longest = int(counts.max())
        a, g = (
            self._laid(x[mine][order], which, position, len(known), longest)
            for x in (self.a, self.g)
        )
        choice = self._planner.linear(
            len(known), longest, a.shape[2], g.shape[2], a.element_size(), False, a.device
        )
        norms = ops.ghost_norm(a, g) if choice.ghost else ops.instantiated_norm(a, g)
        assert isinstance(norms, Tensor)
        return total.index_add_(0, known.div(self.experts, rounding_mode="floor"), norms)

    @staticmethod
    def _laid(rows: Tensor, which: Tensor, position: Tensor, groups: int, longest: int) -> Tensor:
        laid = rows.new_zeros(groups, longest, rows.shape[1])
        laid[which, position] = rows
        return laid

    @ops.in_full_float32
    def _by_pair(self, group: Tensor) -> Tensor:
        """Every row with every row: as many as there are need not be known to the host."""
        a, g = ops.widen(self.a), ops.widen(self.g)
        n = max(len(g), 1)
        step = max(1, _GRAM_ENTRIES // n)
        parts = []
        for i in range(0, len(g), step):
            rows = slice(i, i + step)
            same = group[rows, None] == group[None]
            product = (a[rows] @ a.t()) * (g[rows] @ g.t())
            parts.append(product.masked_fill(~same, 0).sum(1))
        owner = self.owner.clamp_min(0)
        sums = [
            torch.cat(parts) if parts else g.new_zeros(0),
            ops.row_norm_sq(a),
            ops.row_norm_sq(g),
        ]
        total, size_a, size_g = (
            g.new_zeros(self.batch).index_add_(0, owner, x.masked_fill(self.owner < 0, 0))
            for x in sums
        )
        bound = gram_bound(total.clamp_min(0), n, size_a, size_g, n * a.shape[1], n * g.shape[1])
        return total.clamp_min(0) + bound


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

        def backward(a: Tensor, g: Tensor) -> Tensor:
            weight = own.requires_grad_()
            out = use.replay({"0": a, "1": weight})
            return ops.widen(torch.autograd.grad(out, weight, g.to(out.dtype))[0])

        record = RoutedRecord(
            use["0"], use.g, owner, expert.clamp_max(experts - 1), batch=use.batch, experts=experts,
            planner=use.planner, backward=backward,
        )  # fmt: skip
        use.record("1", record)


def _ends(operands: Operands) -> Tensor | None:
    found = [v for v in operands.values() if isinstance(v, Tensor) and not v.is_floating_point()]
    return found[0] if len(found) == 1 else None


def routed_linear(use: UseBackward, a: Tensor, transposed: bool) -> RoutedRecord:
    """The record of one matrix, [p, d] or, transposed, [d, p], for the rows of a [..., d]."""
    a, g = a.reshape(-1, a.shape[-1]), use.g.reshape(-1, use.g.shape[-1])
    owner = use.row_owners()

    def backward(a: Tensor, g: Tensor) -> Tensor:
        a = ops.widen(a)
        return a.t() @ g if transposed else g.t() @ a

    return RoutedRecord(
        a, g, owner, torch.zeros_like(owner), batch=use.batch, experts=1, planner=use.planner,
        backward=ops.in_full_float32(backward),
    )  # fmt: skip

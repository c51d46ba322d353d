"""Functions that only move entries: cat, stack, repeat, pad, roll, an index, x[:, 0] = p.

They are called once more on the numbers of the parameter's entries, and so say which entry of the output
is which; its gradient goes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import KeptRecord, LookupRecord, Record, ViewedRecord
from fastclip.uses.elementwise import flat_operands
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

_MOST = 4
"""Times as many entries as the output's may be in all samples' gradients; above, they are looked up."""


@register_use(
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "repeat",
    "tile", "expand", "expand_as", "broadcast_to", "repeat_interleave", "roll", "flip", "fliplr",
    "flipud", "rot90", "gather", "take", "take_along_dim", "getitem", "setitem", "index_select",
    "index_copy", "select", "unbind", "split", "chunk", "masked_select", "tril", "triu",
    "select_scatter", "slice_scatter", "diagonal_scatter", "diag_embed", "transpose", "permute",
    "movedim", "unsqueeze", "squeeze", "flatten", "unflatten", "view", "reshape", "contiguous",
    "copy", "clone",
)  # fmt: skip
class MoveUse(UseRule):
    """Every entry of the output is one of an operand's, as it is."""

    name = "move"
    routed = True
    last = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return None if "out" in kwargs else flat_operands(name, args, kwargs)

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        return out.is_floating_point()

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in private]

    def records(self, use: UseBackward) -> None:
        for name in use.private:
            if use.wants(name):
                use.record(name, self._record(use, name))

    @staticmethod
    def _record(use: UseBackward, name: str) -> Record:
        shape, device = use.shape_of(name), use.g.device
        n, b = shape.numel(), use.batch
        numbers = torch.arange(1, n + 1, dtype=torch.int64, device=device).view(shape)
        zeros = {
            other: torch.zeros(use.shape_of(other), dtype=torch.int64, device=device)
            for other in use.tensors() if use[other].is_floating_point()
        }  # fmt: skip
        with torch.no_grad():
            entry = use.called_on({**zeros, name: numbers}) - 1  # -1: another operand's
        owner = use.entry_owners().expand(use.g.shape)
        known = (entry >= 0) & (owner >= 0)
        g = ops.widen(use.g).masked_fill(~known, 0)
        entry, owner = entry.clamp_min(0).reshape(-1), owner.clamp_min(0).reshape(-1)
        if b * n <= _MOST * use.g.numel() or not b:
            own = g.new_zeros(b * n)
            if b:
                own.index_add_(0, owner * n + entry, g.reshape(-1))
            return KeptRecord(own.view(b, *shape))
        record = LookupRecord(entry, owner, g.reshape(-1, 1), batch_size=b, num_embeddings=n)
        return ViewedRecord(record, shape)

"""Rows of a table looked up by ids of the batch: F.embedding, table[ids], index_select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip.errors import UnsupportedLayerError
from fastclip.layers.records import LookupRecord, Record, ViewedRecord
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


@register_use("embedding", "getitem", "index_select")
class LookupUse(UseRule):
    """Entries of the first axis of a table."""

    name = "lookup"

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        operands = table_ids(name, args, kwargs)
        if operands is not None and name == "embedding":
            check_options(name, operands)
        return operands

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        table, ids = operands["table"], operands["ids"]
        if private != ["table"] or place is None or out.dim() != ids.dim() + table.dim() - 1:
            return False
        return place.axis < ids.dim()

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return ["ids"]

    def records(self, use: UseBackward) -> None:
        table, ids, g = use.shape_of("table"), use["ids"], use.g
        g = g.reshape(*g.shape[: ids.dim()], table[1:].numel())
        ids, g = use.rows(ids), use.rows(g)
        b = len(ids)
        ids = ids.reshape(b, ids.numel() // b if b else 0).to(torch.int64)
        ids = ids.where(ids >= 0, ids + table[0])
        g = g.reshape(b, ids.shape[1], g.shape[-1])
        use.record("table", looked_up(ids, g, table, use.operands.get("padding")))


def table_ids(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
    """What is looked up where; None for another kind of index."""
    if name == "embedding":
        names = ("ids", "table", "padding", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        words = {"input": "ids", "weight": "table", "padding_idx": "padding"}
        given = {words.get(n, n): value for n, value in kwargs.items()}
        return {**dict(zip(names, args, strict=False)), **given}
    if kwargs:
        return None
    if name == "index_select":
        return {"table": args[0], "ids": args[2]} if args[1] == 0 else None
    ids = args[1][0] if isinstance(args[1], tuple) and len(args[1]) == 1 else args[1]
    whole = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    return {"table": args[0], "ids": ids} if whole else None


def looked_up(ids: Tensor, g: Tensor, table: torch.Size, padding: int | None) -> Record:
    """The record of ids [b, t], none negative, and g [b, t, d] for a table [v, ...] of rows of d."""
    padding = padding + table[0] if padding is not None and padding < 0 else padding
    record = LookupRecord.from_dense(ids, g, table[0], padding)
    return record if len(table) == 2 else ViewedRecord(record, table)


def check_options(name: str, operands: Operands) -> None:
    asked = [option for option in OPTIONS if operands.get(option)]
    if asked:
        raise UnsupportedLayerError(
            f"F.{name} with {', '.join(asked)} is not supported: it depends on what else the batch "
            "looks up, or its gradient is sparse, which noise makes dense. Leave it off"
        )

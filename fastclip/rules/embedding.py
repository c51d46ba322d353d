"""Tables: Embedding, EmbeddingBag, and rows looked up by ids of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.errors import UnsupportedLayerError
from fastclip.ops.units import UnitSamples
from fastclip.rules.protocol import LayerCall, LayerRule, register_rule
from fastclip.rules.records import LookupRecord, Record, ViewedRecord
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


ONLY_PLAIN = "max_norm", "scale_grad_by_freq", "sparse"
"""Options that no rule computes."""


def _check_options(module: Any) -> None:
    """Raises TypeError for unsupported options that were set after make_private."""
    options = [name for name in ONLY_PLAIN if getattr(module, name)]
    if options:
        raise TypeError(f"{', '.join(options)} is not supported. Omit it.")


def padding_of(module: Any) -> int | None:
    """Returns the row without a gradient, counted from the first as in torch's functions."""
    padding, rows = module.padding_idx, module.weight.shape[0]
    return padding + rows if padding is not None and padding < 0 else padding


@register_rule(nn.Embedding)
class EmbeddingRule(LayerRule):
    """Rows of a table, for ids of any shape."""

    name = "embedding"

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        _check_options(module)
        return super().prepare(module, args, kwargs)[0], padding_of(module)

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return F.embedding(x, module.weight, extra), (x,)

    def backward(self, call: LayerCall) -> Tensor | None:
        if call.wants("weight"):
            ids, module = call.saved[0], call.module
            ids, g = call.samples(ids), call.samples(call.g)
            b = ids.shape[0]
            t = ids.numel() // b if b else 0
            record = LookupRecord.from_dense(
                ids.reshape(b, t), g.reshape(b, t, g.shape[-1]), len(module.weight), call.extra
            )
            call.record("weight", record)
        return None


@register_rule(nn.EmbeddingBag)
class EmbeddingBagRule(LayerRule):
    """Sum, mean or maximum of the rows of each bag; one bag is one sample."""

    name = "embedding_bag"
    counts_samples = True

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        _check_options(module)
        x, extra = self._prepare(*args, **kwargs)
        return x, (*extra, padding_of(module))

    @staticmethod
    def _prepare(
        input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise UnsupportedLayerError(
                "EmbeddingBag with per_sample_weights that need a gradient has no per-sample "
                "rule. Detach them, or use nn.Embedding and a weighted sum."
            )
        if input.dim() == 2:
            if offsets is not None:
                raise TypeError("offsets expects ids of one dimension, got two.")
            b, t = input.shape
            offsets = torch.arange(0, b * t, max(t, 1), device=input.device)[:b]
            if t == 0:
                offsets = torch.zeros(b, dtype=torch.long, device=input.device)
            weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
            return input.reshape(-1), (offsets, weights, False)
        return input, (offsets, per_sample_weights, True)

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        offsets, weights, may_include_last, padding = extra
        mode = {"sum": 0, "mean": 1, "max": 2}[module.mode]  # type: ignore[index]
        include_last = bool(module.include_last_offset) and may_include_last
        out, _, _, max_indices = torch.embedding_bag(
            module.weight, x, offsets, False, mode, False, weights, include_last, padding
        )
        return out, (x, _bag_of_entry(len(x), offsets, out.shape[0]), max_indices)

    def backward(self, call: LayerCall) -> Tensor | None:
        if not call.wants("weight"):
            return None
        module, g, padding = call.module, call.g, call.extra[3]
        ids, bag, max_indices = call.saved
        b = g.shape[0]
        counted = torch.ones_like(ids) if padding is None else ids != padding
        sizes = torch.zeros(b, dtype=torch.float32, device=g.device)
        sizes.index_add_(0, bag, counted.to(torch.float32))
        if module.mode == "max":
            g = g.masked_fill((sizes == 0)[:, None], 0)
            call.record("weight", MaxBagRecord(max_indices, g, len(module.weight)))
            return None
        per_entry = ops.widen(g)[bag]
        weights = call.extra[1]
        if weights is not None:
            per_entry = per_entry * weights.to(per_entry.dtype)[:, None]
        if module.mode == "mean":
            per_entry = per_entry / sizes[bag].clamp_min(1).to(per_entry.dtype)[:, None]
        record = LookupRecord(
            ids, bag, per_entry, batch_size=b, num_embeddings=len(module.weight),
            padding_idx=padding,
        )  # fmt: skip
        call.record("weight", record)
        return None


def _bag_of_entry(entries: int, offsets: Tensor, bags: int) -> Tensor:
    """Returns the bag of each entry, [n], from the bags' first positions."""
    position = torch.arange(entries, device=offsets.device)
    return torch.searchsorted(offsets[:bags].contiguous(), position, right=True) - 1


class MaxBagRecord(Record):
    """Feature c of bag b came from row index[b, c]: every entry has a separate cell."""

    def __init__(self, index: Tensor, g: Tensor, num_embeddings: int) -> None:
        super().__init__(index, g)
        self.index, self.g, self.num_embeddings = index, g, num_embeddings

    def norm_sq(self) -> Tensor:
        return ops.row_norm_sq(self.g)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        (g,) = ops.drop_zeroed(scale, ops.widen(self.g))
        weighted = g * scale.to(g.dtype)[:, None]
        return g.new_zeros(self.num_embeddings, g.shape[1]).scatter_add_(0, self.index, weighted)

    def per_sample(self) -> Tensor:
        g = ops.widen(self.g)
        table = g.new_zeros(g.shape[0], self.num_embeddings, g.shape[1])
        return table.scatter_add_(1, self.index[:, None], g[:, None])

    def of_units(self, units: UnitSamples) -> Record:
        """Returns the record of units. Samples of a unit may share cells, so each is looked up."""
        d = self.g.shape[1]
        cells = self.index * d + torch.arange(d, dtype=torch.int64, device=self.g.device)
        owner = units.on(self.g.device).repeat_interleave(d)
        record = LookupRecord(
            cells.flatten(), owner, self.g.reshape(-1, 1), batch_size=units.count,
            num_embeddings=self.num_embeddings * d,
        )  # fmt: skip
        return ViewedRecord(record, torch.Size((self.num_embeddings, d)))


# -------------------------------------------------------------------------------------------------
# Rows of a table looked up by ids of the batch: F.embedding, table[ids], index_select.


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
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        table, ids = operands["table"], operands["ids"]
        if private != ["table"] or batch_axis is None or out.dim() != ids.dim() + table.dim() - 1:
            return False
        return batch_axis.axis < ids.dim()

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return ["ids"]

    def records(self, use: UseBackward) -> None:
        table, ids, g = use.shape_of("table"), use["ids"], use.g
        g = g.reshape(*g.shape[: ids.dim()], table[1:].numel())
        ids, g = use.samples(ids), use.samples(g)
        b = len(ids)
        ids = ids.reshape(b, ids.numel() // b if b else 0).to(torch.int64)
        ids = ids.where(ids >= 0, ids + table[0])
        g = g.reshape(b, ids.shape[1], g.shape[-1])
        use.record("table", looked_up(ids, g, table, use.operands.get("padding")))


def table_ids(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
    """Returns the table and the ids; None for another kind of index."""
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
    """Returns the record of ids [b, t] >= 0 and g [b, t, d] for a table [v, ...] with rows of d."""
    padding = padding + table[0] if padding is not None and padding < 0 else padding
    record = LookupRecord.from_dense(ids, g, table[0], padding)
    return record if len(table) == 2 else ViewedRecord(record, table)


def check_options(name: str, operands: Operands) -> None:
    asked = [option for option in OPTIONS if operands.get(option)]
    if asked:
        raise UnsupportedLayerError(
            f"F.{name} with {', '.join(asked)} is not supported, because it depends on other ids "
            "of the batch or its gradient is sparse. Omit the option."
        )

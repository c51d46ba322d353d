"""Sums, products, gates, moves: each entry of the output depends on one entry of the parameter.

The parameter is broadcast over the output. Its gradient there, entry by entry, is summed over the
entries of each sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.torch_names import tree_flatten
from fastclip.rules.records import KeptRecord, LookupRecord, Record, ViewedRecord
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


# -------------------------------------------------------------------------------------------------
# Entry-wise gradients, summed over the entries of each sample that use one entry of a parameter.


_CHUNK_BYTES = 1 << 22
"""Bytes of a product that is summed at once; larger ones are summed a few samples at a time."""


def aligned(shape: torch.Size | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Returns `shape` as broadcast to so many dimensions."""
    return (1,) * (dims - len(shape)) + tuple(shape)


def summed_to(
    use: UseBackward, each: Tensor, shape: torch.Size, factor: Tensor | None = None,
    own: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Sums each * factor over the axes that `shape` lacks, per sample: [b, *shape].

    Args:
        each: gradients, entry by entry of the output. factor: broadcasts to them; 1 if None.
        own: `shape` in the output; aligned to the right if None.
    """
    batch_axis = use.batch_axis
    own = aligned(shape, each.dim()) if own is None else own
    if batch_axis is None:
        return _summed_rows(use, each, shape, factor)
    kept = [size for axis, size in enumerate(own) if axis != batch_axis.axis]
    rows = use.samples(each)  # [b, (n,) *others]
    folded = rows.dim() - 1 - len(kept)
    axes = [*range(1, 1 + folded), *(1 + folded + i for i, n in enumerate(kept) if n == 1)]
    axes = [axis for axis in axes if rows.shape[axis] != 1]
    if factor is None:
        total = ops.widen(rows)
        total = total.sum(axes) if axes else total
    else:
        total = _products(rows, _rows_like(use, factor, each), axes)
    return total.reshape(len(rows), *shape)


def _summed_rows(
    use: UseBackward, each: Tensor, shape: torch.Size, factor: Tensor | None
) -> Tensor:
    """Does the same if each row (all axes except the last) may be any sample's; `shape` is a row's.

    For a scalar, each entry may.
    """
    wide = ops.widen(each)
    wide = wide if factor is None else wide * factor.to(wide.dtype)
    if shape.numel() == 1:
        owner = use.sample_of_entry().expand(each.shape).reshape(-1)
        return ops.sum_by_sample(wide.reshape(-1), owner, use.batch).reshape(use.batch, *shape)
    rows = wide.reshape(wide.shape[:-1].numel(), wide.shape[-1])
    return ops.sum_by_sample(rows, use.sample_of_row(), use.batch).reshape(use.batch, *shape)


def _rows_like(use: UseBackward, factor: Tensor, each: Tensor) -> Tensor:
    """Returns the factor with samples along axis 0; size 1 there if it has none."""
    assert use.batch_axis is not None
    factor = factor.view(aligned(factor.shape, each.dim()))
    if factor.shape[use.batch_axis.axis] == each.shape[use.batch_axis.axis]:
        return use.samples(factor)
    first = factor.movedim(use.batch_axis.axis, 0)
    return first if use.batch_axis.plain else first[None]


def _products(rows: Tensor, factor: Tensor, axes: list[int]) -> Tensor:
    whole = len(axes) == rows.dim() - 1 - sum(n == 1 for n in rows.shape[1:])
    if whole and factor.shape == rows.shape and rows.numel():
        n = rows[0].numel()
        wide = ops.widen(rows).reshape(len(rows), 1, n)
        return _dots(wide, factor.to(wide.dtype).reshape(len(rows), n, 1))
    step = _CHUNK_BYTES // max(1, rows[:1].numel() * 4) or 1
    if len(rows) <= step:
        return _product(rows, factor, axes)
    each = len(factor) == len(rows)
    parts = [
        _product(part, factor[i * step : (i + 1) * step] if each else factor, axes)
        for i, part in enumerate(rows.split(step))
    ]
    return torch.cat(parts)


def _product(rows: Tensor, factor: Tensor, axes: list[int]) -> Tensor:
    wide = ops.widen(rows)
    product = wide * factor.to(wide.dtype)
    return product.sum(axes) if axes else product


@ops.in_full_float32
def _dots(one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other)


# -------------------------------------------------------------------------------------------------


_SUMS = frozenset({"add", "sub", "expand", "expand_as", "broadcast_to"})
"""The gradient of the first operand is that of the output."""
_PRODUCTS = frozenset({"mul", "multiply"})


def flat_operands(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands:
    """Returns the leaves of the arguments by their number, and the structure to rebuild them."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    known = {"function": name, "structure": structure, "keywords": tuple(kwargs)}
    return {**{str(i): leaf for i, leaf in enumerate(leaves)}, **known}


@register_use(
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide", "rtruediv",
    "pow", "rpow", "maximum", "minimum", "fmax", "fmin", "where", "lerp", "addcmul", "addcdiv", "atan2",
    "hypot", "logaddexp", "xlogy", "expand", "expand_as", "broadcast_to", "masked_fill", "float_power",
    "clamp",
)  # fmt: skip
class ElementwiseUse(UseRule):
    """A function of broadcast operands, one entry of each for one entry of the output."""

    name = "element-wise"
    routed = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return None if "out" in kwargs else flat_operands(name, args, kwargs)

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        shapes = [operands[name].shape for name in private]
        if any(len(shape) > out.dim() for shape in shapes):
            return False
        axes = (
            range(out.dim() - 1) if batch_axis is None else [batch_axis.axis]
        )  # rows may belong to any sample
        return (
            out.dim() > 0
            and not out.is_complex()
            and all(aligned(shape, out.dim())[axis] == 1 for shape in shapes for axis in axes)
        )

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        if _is_sum(operands):
            return []
        return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in private]

    def records(self, use: UseBackward) -> None:
        wanted = [name for name in use.private if use.wants(name)]
        if _is_sum(use.operands):
            second = {"1": True} if use.operands["function"] == "sub" else {}
            for name in wanted:
                own = summed_to(use, use.g, use.shape_of(name))
                use.record(name, KeptRecord(-own if second.get(name) else own))
        elif use.operands["function"] in _PRODUCTS and len(use.tensors()) == 2:
            for name in wanted:
                (other,) = (use[n] for n in use.tensors() if n != name)
                use.record(name, KeptRecord(summed_to(use, use.g, use.shape_of(name), other)))
        elif use.operands["function"] == "masked_fill":
            for name in wanted:
                kept = use["1"] if name == "2" else ~use["1"]
                use.record(name, KeptRecord(summed_to(use, use.g, use.shape_of(name), kept)))
        else:
            leaves = {
                name: use[name].expand(use.g.shape).detach().requires_grad_() for name in wanted
            }
            out = use.replay(leaves)
            found = torch.autograd.grad(out, list(leaves.values()), use.g.to(out.dtype))
            for name, each in zip(wanted, found, strict=True):
                use.record(name, KeptRecord(summed_to(use, each, use.shape_of(name))))


def _is_sum(operands: Operands) -> bool:
    return operands["function"] in _SUMS and "alpha" not in operands["keywords"]


# -------------------------------------------------------------------------------------------------
# Functions that only move entries: cat, stack, repeat, pad, roll, an index, x[:, 0] = p.
#
# They are called once more on the indices of the parameter's entries. The result says which entry of
# the output is which, and its gradient goes there.


_MOST = 4
"""Maximal entries of all per-sample gradients relative to the output; above, they are looked up."""


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
    """Every entry of the output is an entry of an operand, unchanged."""

    name = "move"
    routed = True
    last = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return None if "out" in kwargs else flat_operands(name, args, kwargs)

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
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
        owner = use.sample_of_entry().expand(use.g.shape)
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

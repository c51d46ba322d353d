"""Sums, products, gates, position tables: every entry of the output meets one of the parameter.

The parameter is broadcast over the output; its gradient there, entry by entry, is summed over the
entries of each sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip._torch import tree_flatten
from fastclip.layers.records import KeptRecord
from fastclip.uses.reductions import aligned, summed_to
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

_SUMS = frozenset({"add", "sub", "expand", "expand_as", "broadcast_to"})
"""The gradient of the first operand is that of the output."""
_PRODUCTS = frozenset({"mul", "multiply"})


def flat_operands(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands:
    """The leaves of the arguments by their number, and how they are put together again."""
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
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        shapes = [operands[name].shape for name in private]
        if any(len(shape) > out.dim() for shape in shapes):
            return False
        axes = range(out.dim() - 1) if place is None else [place.axis]  # rows may be anybody's
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

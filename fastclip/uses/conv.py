"""Convolutions with a kernel that is computed, shared or used by a module without a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from fastclip import ops
from fastclip.layers.folded import FoldedRecord
from fastclip.layers.operand import autocast_operand
from fastclip.layers.records import ConvRecord, KeptRecord, Record
from fastclip.uses.reductions import summed_to
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
_DEFAULTS = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "dilation": 1,
    "groups": 1,
}


@register_use(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
)
class ConvUse(UseRule):
    """F.conv2d, F.conv_transpose2d and those of one and three dimensions."""

    name = "conv"
    own_memory = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        transposed = "transpose" in name
        names = _TRANSPOSED if transposed else _CONV
        given = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
        if not {"input", "weight"} <= given.keys() <= {*_DEFAULTS, "input", "weight"}:
            return None
        return {**given, "transposed": transposed}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        x, weight = operands["input"], operands["weight"]
        if place is None or place.axis or "input" in private or x.dim() != weight.dim():
            return False
        if operands["transposed"]:
            dims = weight.dim() - 2
            steps = zip(
                _each(operands["output_padding"], dims),
                _each(operands["stride"], dims),
                strict=True,
            )
            return all(added < stride for added, stride in steps) and not out.is_complex()
        return not out.is_complex()

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        if "weight" not in private:
            return []
        operands["input"] = autocast_operand(operands["input"])
        return ["input"]

    def records(self, use: UseBackward) -> None:
        if use.wants("bias"):
            dims = use.g.dim() - 2
            shape = use.shape_of("bias")
            own = summed_to(use, use.g, shape, None, (1, shape.numel(), *[1] * dims))
            use.record("bias", KeptRecord(own))
        if use.wants("weight"):
            use.record("weight", self._weight(use))

    @staticmethod
    def _weight(use: UseBackward) -> Record:
        given, x, g = use.operands, use["input"], use.g
        shape = tuple(use.shape_of("weight"))
        dims = len(shape) - 2
        stride, dilation = _each(given["stride"], dims), _each(given["dilation"], dims)
        if given["transposed"]:  # the input's gradient of a convolution: the two change places
            x, g = g, x
            padding = _each(given["padding"], dims)
        else:
            x, padding = _padded(x, given["padding"], dilation, shape[2:])
        geometry = ops.ConvGeometry(shape, stride, padding, dilation, int(given["groups"]))
        record = ConvRecord(x, g, geometry, ghost=use.plan_conv(x, g, geometry).ghost)
        assert use.place is not None
        return record if use.place.plain else FoldedRecord(record, use.place, use.batch)


def _padded(
    x: Tensor, padding: Any, dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the zeros that are still to be added on either side."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    if padding != "same":
        return x, _each(padding, len(kernel))
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(n % 2 for n in total):
        sides = [side for n in reversed(total) for side in (n // 2, n - n // 2)]
        return F.pad(x, sides), (0,) * len(kernel)
    return x, tuple(n // 2 for n in total)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    given = tuple(int(v) for v in value)
    return given * dims if len(given) == 1 else given

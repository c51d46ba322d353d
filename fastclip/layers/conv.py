"""Conv1d, Conv2d, Conv3d: exact norms from the pixel Gram or from a grouped convolution.

On a GPU a convolution is linear maps (fastclip.ops.conv_matrices), whose kernels are the fastest and the
fewest: of its patches, where no pixel is in two of them, or of what the rows of its kernel see. Those
with groups, and of three dimensions, stay what they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.layers.kernel_rows import KernelRowsRecord
from fastclip.layers.linear import linear_record, record_of
from fastclip.layers.operand import autocast_operand
from fastclip.layers.records import (
    ConvRecord,
    InstantiatedRecord,
    KeptRecord,
    Record,
    ViewedRecord,
    kept_record,
)
from fastclip.layers.rule import LayerCall, LayerRule, Plans, register_rule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(LayerRule):
    """Cross-correlation with stride, padding, dilation and groups."""

    name = "conv"

    def axis(self, module: Any) -> int | None:
        return 0

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        x, _ = super().prepare(module, args, kwargs)
        x, padding = pad_explicitly(module, autocast_operand(x))
        return x, geometry_of(module, padding)

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        geo: ops.ConvGeometry = extra
        weight = autocast_operand(module.weight)
        conv = _CONV[len(geo.stride)]
        out = conv(x, weight, module.bias, geo.stride, geo.padding, geo.dilation, geo.groups)
        # The weight as it was multiplied, as torch's own layer saves it: it is cast once a step.
        return out, (x, weight if x.requires_grad else None)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, weight = call.saved
        geo: ops.ConvGeometry = call.extra
        g = call.g
        if call.wants("bias"):
            call.record("bias", KeptRecord(ops.wide_sum(g.flatten(2), 2)))
        if call.wants("weight"):
            laid = ops.conv_operands(x, g, geo)
            call.record("weight", conv_record(call, *laid, geo))
            if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
                g = laid[1]  # the library would copy it so for itself
        if not call.needs_input_grad:
            return None
        return torch.ops.aten.convolution_backward(
            g, _as(x, g), _as(weight, g), None, geo.stride, geo.padding, geo.dilation, False,
            [0] * len(geo.stride), geo.groups, [True, False, False],
        )[0]  # fmt: skip


def _as(x: Tensor, other: Tensor) -> Tensor:
    return x if x.dtype == other.dtype else x.to(other.dtype)


def conv_record(call: Plans, x: Tensor, g: Tensor, geometry: ops.ConvGeometry) -> Record:
    """The record that the planner prefers for a convolution over x [b, c, *space]."""
    kernels = not ops.computes_reference(x) and ops.has_kernel("scaled_sum")
    matrices = kernels and ops.by_matrices(geometry)
    if matrices and geometry.is_apart:
        patches, rows = ops.patches_apart(x, geometry), g.flatten(2).transpose(1, 2)
        shape = torch.Size(geometry.weight_shape)
        return ViewedRecord(linear_record(call, patches, rows), shape)
    choice = call.plan_conv(x, g, geometry)
    if matrices:
        seen, rows = ops.kernel_rows(x, g, geometry)
        return KernelRowsRecord([record_of(choice, call, a, rows) for a in seen], geometry)
    if not choice.keep or choice.of_units:
        return ConvRecord(x, g, geometry, ghost=choice.ghost, keep=choice.keep)
    if x.element_size() == 2 and not ops.computes_reference(x):
        # Products of 16-bit operands on tensor cores, and their norm in the same pass.
        return InstantiatedRecord(*ops.conv_norm(x, g, geometry, keep=True))
    return kept_record(*ops.kept_conv_gradients(x, g, geometry, call.last_input))


def zeros_around(module: Any) -> tuple[int, ...] | None:
    """How many zeros a layer puts on both sides of each axis; None where it pads in another way."""
    if module.padding_mode != "zeros":
        return None
    if module.padding == "valid":
        return (0,) * (module.weight.dim() - 2)
    if module.padding == "same":
        total = _same(module)
        return None if any(n % 2 for n in total) else tuple(n // 2 for n in total)
    return _tuple(module.padding)


def _same(module: Any) -> list[int]:
    """Of each axis, by how much the kernel makes it shorter."""
    return [d * (k - 1) for d, k in zip(module.dilation, module.weight.shape[2:], strict=True)]


def pad_explicitly(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Apply whatever padding is not a symmetric number of zeros; return the rest as numbers."""
    padding = zeros_around(module)
    if padding is not None:
        return x, padding
    dims = module.weight.dim() - 2
    if module.padding_mode != "zeros":
        mode = module.padding_mode
        return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * dims
    sides = [side for n in reversed(_same(module)) for side in (n // 2, n - n // 2)]
    return F.pad(x, sides), (0,) * dims


def geometry_of(module: Any, padding: tuple[int, ...]) -> ops.ConvGeometry:
    """Of a layer whose input has so many zeros around it."""
    shape, groups = tuple(module.weight.shape), int(module.groups)
    return _geometry(shape, _tuple(module.stride), padding, _tuple(module.dilation), groups)


_geometry = functools.lru_cache(maxsize=1024)(ops.ConvGeometry)
"""Every layer asks for its own in every step; of Python's integers: an equal one serves for them."""


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))

"""Clipped sums of convolutions, as layers compute them: what takes the place of the weight gradient, on
the layers of bench_conv_norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.kernels.bench_conv_norm import (
    AS_TRAINED,
    LAYERS,
    LAYOUTS,
    Layer,
    operands,
    operation_of,
    record,
)
from bench.kernels.case import Case
from bench.kernels.shapes import CONVOLUTIONS
from fastclip import ops


def case(layer: Layer, dtype: torch.dtype, layout: str) -> Case:
    model, b, c, o, k, stride, size, *_ = layer
    make_maps, geometry, out = operands(layer, dtype, layout)

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        scale = torch.rand(b, generator=generator, device=generator.device).to(device)
        return {**make_maps(device, generator), "scale": scale}

    def run(x: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        return record(x, g, geometry, "ghost").clipped_sum(scale)

    def weight_gradient(x: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        """The ordinary one: what training without privacy pays."""
        weight = x.new_empty(1).expand(geometry.weight_shape)
        return torch.ops.aten.convolution_backward(
            g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, [0, 0],
            geometry.groups, [False, True, False],
        )[1]  # fmt: skip

    def scaled_gradient(x: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        """Scales rounded into the operands' type."""
        return weight_gradient(x, g * scale.to(g.dtype)[:, None, None, None], scale)

    def reference(x: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        return ops.conv_sum.reference(x, g, scale, geometry)  # type: ignore[attr-defined]

    return Case(
        operation=operation_of("sum", geometry), model=model + layout, dtype=dtype, make=make, run=run,
        others={
            "float32 copies": reference,
            "scale, then the weight gradient": scaled_gradient,
            "weight gradient without scales": weight_gradient,
        },
        shape={
            "b": b, "c": c, "o": o, "k": k, "stride": stride, "size": size, "groups": geometry.groups,
        },
        flops=2.0 * b * out**2 * (c // geometry.groups) * o * k * k,
        nbytes=float(
            b * (c * size**2 + o * out**2) * dtype.itemsize
            + 4 * (b + o * (c // geometry.groups) * k * k)
        ),
        tolerance=1e-5 if dtype == torch.float32 else 1e-4,
    )  # fmt: skip


def cases() -> list[Case]:
    found = []
    for layer in LAYERS:
        layouts = [" channels-last"] if layer in AS_TRAINED else LAYOUTS
        found += [case(layer, torch.bfloat16, layout) for layout in layouts]
    floats = (LAYERS[0], LAYERS[4], CONVOLUTIONS[3])
    return found + [case(layer, torch.float32, "") for layer in floats]

"""Convolution norms, as layers compute them: of linear maps on a GPU, unless there are groups.

Layers of ResNet-18 on 32x32 and of ResNet-50 on 224x224 images; with groups of ResNeXt-50 and ConvNeXt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from opacus.grad_sample.conv import compute_conv_grad_sample
from torch import Tensor, nn

from bench.kernels.case import Case, Make, normal
from bench.kernels.shapes import CONVOLUTIONS
from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.planner import NormMethod
from fastclip.rules import Record
from fastclip.rules.conv import conv_record

GHOST_POSITIONS = 200  # up to which a Gram of the positions is worth a case
Layer = tuple[Any, ...]  # model, b, c, o, kernel, stride, size of the input, and groups if several
AS_TRAINED: list[Layer] = [  # channels-last alone
    *CONVOLUTIONS,
    ("ResNeXt-50", 64, 128, 128, 3, 1, 56, 32),
    ("ResNeXt-50", 64, 1024, 1024, 3, 2, 14, 32),
    ("ConvNeXt-T", 64, 96, 96, 7, 1, 56, 96),
]
LAYERS: list[Layer] = [
    ("ResNet-18 32", 16, 512, 512, 3, 1, 4),
    ("ResNet-18 32", 256, 3, 64, 3, 1, 32),
    ("ResNet-18 32", 256, 64, 64, 3, 1, 32),
    ("ResNet-18 32", 256, 64, 128, 3, 2, 32),
    ("ResNet-18 32", 256, 256, 256, 3, 1, 8),
    ("ResNet-18 32", 256, 512, 512, 3, 1, 4),
    *AS_TRAINED,
]
LAYOUTS = {"": torch.contiguous_format, " channels-last": torch.channels_last}


class Planned:
    """The choice of a planner, made beforehand."""

    def __init__(self, method: str) -> None:
        self.last_input, self._choice = ops.LastInput(), NormMethod(method, 0.0, 0)

    def plan_linear(self, *_: Any) -> NormMethod:
        return self._choice

    plan_conv = plan_linear

    def is_alone(self, name: str) -> bool:
        return True


def record(x: Tensor, g: Tensor, geometry: ConvGeometry, method: str) -> Record:
    """What a layer leaves for its norms and sums."""
    return conv_record(Planned(method), *ops.conv_operands(x, g, geometry), geometry)


def operation_of(work: str, geometry: ConvGeometry) -> str:
    """The operation that does the work on a GPU: "ghost" or "recompute" norms, or a "sum"."""
    if not ops.by_matrices(geometry):
        return {"ghost": "conv_ghost_norm", "recompute": "conv_norm", "sum": "conv_sum"}[work]
    names = {"ghost": "ghost_norm", "recompute": "instantiated_norm", "sum": "scaled_sum"}
    several = not geometry.is_apart and work != "recompute"
    return names[work] + "s" * several


def operands(layer: Layer, dtype: torch.dtype, layout: str) -> tuple[Make, ConvGeometry, int]:
    """What makes x and g of a layer, how it slides, and the size of its output."""
    _, b, c, o, k, stride, size, *groups = layer
    padding, memory_format = k // 2, LAYOUTS[layout]
    out = (size + 2 * padding - k) // stride + 1

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        x = normal((b, c, size, size), dtype, device, generator)
        g = normal((b, o, out, out), dtype, device, generator)
        return {
            "x": x.contiguous(memory_format=memory_format),
            "g": g.contiguous(memory_format=memory_format),
        }

    (several,) = groups or (1,)
    window = (stride,) * 2, (padding,) * 2, (1, 1)
    geometry = ConvGeometry((o, c // several, k, k), *window, several)
    return make, geometry, out


def case(method: str, layer: Layer, dtype: torch.dtype, layout: str = "") -> Case:
    model, b, c, o, k, stride, size, *_ = layer
    make, geometry, out = operands(layer, dtype, layout)
    padding, groups = k // 2, geometry.groups

    def run(x: Tensor, g: Tensor) -> Tensor:
        return record(x, g, geometry, method).norm_sq()

    def opacus(x: Tensor, g: Tensor) -> Tensor:
        layer = nn.Conv2d(c, o, k, stride, padding, 1, groups, bias=False, device="meta")
        x = x.contiguous()  # other strides give a wrong gradient, without a word
        gradients = compute_conv_grad_sample(layer, [x], g)[layer.weight]
        return gradients.flatten(1).float().square().sum(1)

    def vmapped(x: Tensor, g: Tensor) -> Tensor:
        def gradient(x: Tensor, g: Tensor) -> Tensor:
            of = x[None], geometry.weight_shape, g[None], stride, padding, 1, groups
            return torch.nn.grad.conv2d_weight(*of)

        gradients = torch.func.vmap(gradient)(x, g)
        return gradients.flatten(1).float().square().sum(1)

    def unfolded_grams(x: Tensor, g: Tensor) -> Tensor:
        patches = F.unfold(x, k, padding=padding, stride=stride)  # [b, c k k, positions]
        g = g.flatten(2)
        return ((patches.mT @ patches).float() * (g.mT @ g).float()).sum((1, 2))

    others: dict[str, Callable[..., Any]] = {"Opacus per-sample gradients": opacus}
    if method == "ghost":
        others["unfold and two Grams"] = unfolded_grams
        flops = b * out**4 * (c * k * k + o)  # half of the symmetric Grams
    else:
        others["vmap of the weight gradient"] = vmapped
        flops = 2 * b * out**2 * (c // groups) * o * k * k
    return Case(
        operation=operation_of(method, geometry), model=model + layout, dtype=dtype, make=make,
        run=run, others=others,
        shape={"b": b, "c": c, "o": o, "k": k, "stride": stride, "size": size, "groups": groups},
        flops=float(flops),
        nbytes=float(b * (c * size**2 + o * out**2) * dtype.itemsize),
    )  # fmt: skip


def cases() -> list[Case]:
    found = []
    for layer in LAYERS:
        stride, size, *groups = layer[5:]
        small = (size // stride) ** 2 <= GHOST_POSITIONS and not groups
        for method in ("recompute", *(["ghost"] if small else [])):
            layouts = [" channels-last"] if layer in AS_TRAINED else LAYOUTS
            found += [case(method, layer, torch.bfloat16, layout) for layout in layouts]
    floats = (LAYERS[0], LAYERS[4], CONVOLUTIONS[3])
    return found + [case("recompute", layer, torch.float32) for layer in floats]

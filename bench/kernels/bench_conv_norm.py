"""Convolution norms: layers of ResNet-18 on 32x32 and of ResNet-50 on 224x224 images."""

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

GHOST_POSITIONS = 200  # up to which a Gram of the positions is worth a case
LAYERS = [  # model, b, c, o, kernel, stride, size of the input
    ("ResNet-18 32", 16, 512, 512, 3, 1, 4),
    ("ResNet-18 32", 256, 3, 64, 3, 1, 32),
    ("ResNet-18 32", 256, 64, 64, 3, 1, 32),
    ("ResNet-18 32", 256, 64, 128, 3, 2, 32),
    ("ResNet-18 32", 256, 256, 256, 3, 1, 8),
    ("ResNet-18 32", 256, 512, 512, 3, 1, 4),
    *CONVOLUTIONS,
]
LAYOUTS = {"": torch.contiguous_format, " channels-last": torch.channels_last}


def operands(
    layer: tuple[str, int, int, int, int, int, int], dtype: torch.dtype, layout: str
) -> tuple[Make, ConvGeometry, int]:
    """What makes x and g of a layer, how it slides, and the size of its output."""
    _, b, c, o, k, stride, size = layer
    padding, memory_format = k // 2, LAYOUTS[layout]
    out = (size + 2 * padding - k) // stride + 1

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        x = normal((b, c, size, size), dtype, device, generator)
        g = normal((b, o, out, out), dtype, device, generator)
        return {
            "x": x.contiguous(memory_format=memory_format),
            "g": g.contiguous(memory_format=memory_format),
        }

    geometry = ConvGeometry((o, c, k, k), (stride,) * 2, (padding,) * 2, (1, 1), 1)
    return make, geometry, out


def case(
    operation: str, layer: tuple[str, int, int, int, int, int, int], dtype: torch.dtype,
    layout: str = "",
) -> Case:  # fmt: skip
    model, b, c, o, k, stride, size = layer
    make, geometry, out = operands(layer, dtype, layout)
    padding = k // 2

    def run(x: Tensor, g: Tensor) -> Tensor:
        return getattr(ops, operation)(x, g, geometry)

    def opacus(x: Tensor, g: Tensor) -> Tensor:
        layer = nn.Conv2d(c, o, k, stride, padding, bias=False, device="meta")
        x = x.contiguous()  # other strides give a wrong gradient, without a word
        gradients = compute_conv_grad_sample(layer, [x], g)[layer.weight]
        return gradients.flatten(1).float().square().sum(1)

    def vmapped(x: Tensor, g: Tensor) -> Tensor:
        def gradient(x: Tensor, g: Tensor) -> Tensor:
            shape = (o, c, k, k)
            return torch.nn.grad.conv2d_weight(x[None], shape, g[None], stride, padding)

        gradients = torch.func.vmap(gradient)(x, g)
        return gradients.flatten(1).float().square().sum(1)

    def unfolded_grams(x: Tensor, g: Tensor) -> Tensor:
        patches = F.unfold(x, k, padding=padding, stride=stride)  # [b, c k k, positions]
        g = g.flatten(2)
        return ((patches.mT @ patches).float() * (g.mT @ g).float()).sum((1, 2))

    others: dict[str, Callable[..., Any]] = {"Opacus per-sample gradients": opacus}
    if operation == "conv_ghost_norm":
        others["unfold and two Grams"] = unfolded_grams
        flops = b * out**4 * (c * k * k + o)  # half of the symmetric Grams
    else:
        others["vmap of the weight gradient"] = vmapped
        flops = 2 * b * out**2 * c * o * k * k
    return Case(
        operation=operation, model=model + layout, dtype=dtype, make=make, run=run, others=others,
        shape={"b": b, "c": c, "o": o, "k": k, "stride": stride, "size": size}, flops=float(flops),
        nbytes=float(b * (c * size**2 + o * out**2) * dtype.itemsize),
    )  # fmt: skip


def cases() -> list[Case]:
    found = []
    for layer in LAYERS:
        *_, stride, size = layer
        small = (size // stride) ** 2 <= GHOST_POSITIONS
        for operation in ("conv_norm", *(["conv_ghost_norm"] if small else [])):
            layouts = [" channels-last"] if layer in CONVOLUTIONS else LAYOUTS  # as it is trained
            found += [case(operation, layer, torch.bfloat16, layout) for layout in layouts]
    floats = (LAYERS[0], LAYERS[4], CONVOLUTIONS[3])
    return found + [case("conv_norm", layer, torch.float32) for layer in floats]

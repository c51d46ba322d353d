"""Ghost norms of linear layers: BERT, ViT, GPT-2 with its vocabulary, heads of ResNets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
from torch import Tensor, nn

from bench.kernels.case import Case, normal
from bench.kernels.shapes import LINEAR, VOCABULARY
from fastclip import ops

LAYERS = [  # model, b, t, d, p
    ("ClinicalBERT", 16, 128, 768, 768),
    ("ClinicalBERT", 64, 128, 768, 768),
    ("ClinicalBERT", 16, 512, 768, 768),
    ("ClinicalBERT head", 256, 1, 768, 768),
    ("ResNet-18 head", 256, 1, 512, 1000),
    ("ResNet-50 head", 256, 1, 2048, 1000),
    *LINEAR,
    VOCABULARY,
]


def operands(
    b: int, t: int, d: int, p: int, dtype: torch.dtype
) -> Callable[[torch.device, torch.Generator], Mapping[str, Any]]:
    """Makes a [b, t, d] and g [b, t, p]."""

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        return {
            "a": normal((b, t, d), dtype, device, generator),
            "g": normal((b, t, p), dtype, device, generator),
        }

    return make


def layer_of(a: Tensor, g: Tensor) -> nn.Linear:
    """What Opacus' samplers ask for."""
    return nn.Linear(a.shape[-1], g.shape[-1], bias=False, device="meta")


def opacus_gradients(a: Tensor, g: Tensor) -> Tensor:
    layer = layer_of(a, g)
    gradients: Tensor = compute_linear_grad_sample(layer, [a], g)[layer.weight]
    return gradients


def opacus_ghost(a: Tensor, g: Tensor) -> Tensor:
    layer = layer_of(a, g)
    flat = (a[:, 0], g[:, 0]) if a.shape[1] == 1 else (a, g)
    return compute_linear_norm_sample(layer, [flat[0]], flat[1])[layer.weight].square()


def opacus_instantiated(a: Tensor, g: Tensor) -> Tensor:
    return opacus_gradients(a, g).flatten(1).norm(dim=1).square()


def case(model: str, b: int, t: int, d: int, p: int, dtype: torch.dtype) -> Case:
    def run(a: Tensor, g: Tensor) -> Tensor:
        return ops.ghost_norm(a, g)

    flops = 2 * b * (d + p) if t == 1 else b * t * (t + 1) * (d + p)  # half of symmetric Grams
    # Of float32 the bound of the rounding, 2^-23 ||A||^2 ||G||^2, is a part of the result.
    tolerance = 1e-5 + 2.0**-22 * t if dtype == torch.float32 else 2e-3
    others = {"Opacus ghost": opacus_ghost, "Opacus per-sample gradients": opacus_instantiated}
    return Case(
        operation="ghost_norm", model=model, shape={"b": b, "t": t, "d": d, "p": p}, dtype=dtype,
        make=operands(b, t, d, p, dtype), run=run, others=others, flops=float(flops),
        nbytes=float(b * t * (d + p) * dtype.itemsize + 4 * b), tolerance=tolerance,
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*layer, torch.bfloat16) for layer in LAYERS]
    return found + [case(*LAYERS[i], torch.float32) for i in (1, 2, 3)]

"""Clipped sums of linear layers: the product that takes the place of the weight gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.kernels.bench_ghost_norm import opacus_gradients, operands
from bench.kernels.case import Case
from bench.kernels.shapes import LINEAR, VOCABULARY
from fastclip import ops

LAYERS = [  # model, b, t, d, p
    ("ClinicalBERT", 4, 128, 768, 768),
    ("ClinicalBERT", 64, 128, 768, 768),
    ("ClinicalBERT head", 256, 1, 768, 768),
    ("ResNet-18 head", 256, 1, 512, 1000),
    ("ResNet-50 head", 256, 1, 2048, 1000),
    *LINEAR,
    VOCABULARY,
]


def scaled_matmul(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    """Scales rounded into the operands' type: what Opacus' fast clipping comes to."""
    g = g * scale.to(g.dtype)[:, None, None]
    return g.flatten(0, 1).t() @ a.flatten(0, 1)


def unscaled_matmul(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    """The ordinary weight gradient: what training without privacy pays."""
    return g.flatten(0, 1).t() @ a.flatten(0, 1)


def opacus(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    gradients = opacus_gradients(a, g)
    return torch.einsum("i,i...->...", scale.to(gradients.dtype), gradients)


def case(model: str, b: int, t: int, d: int, p: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        scale = torch.rand(b, generator=generator, device=generator.device).to(device)
        return {**operands(b, t, d, p, dtype)(device, generator), "scale": scale}

    def run(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        return ops.scaled_sum(a, g, scale)

    return Case(
        operation="scaled_sum", model=model, shape={"b": b, "t": t, "d": d, "p": p}, dtype=dtype,
        make=make, run=run, flops=2.0 * b * t * d * p,
        others={
            "scale, then matmul": scaled_matmul,
            "matmul without scales": unscaled_matmul,
            "Opacus per-sample gradients": opacus,
        },
        nbytes=float(b * t * (d + p) * dtype.itemsize + 4 * (b + d * p)),
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )  # fmt: skip


def together(count: int, b: int, t: int, d: int, p: int, dtype: torch.dtype) -> Case:
    """Layers of one shape in one launch, beside a launch for each."""

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        scale = torch.rand(b, generator=generator, device=generator.device).to(device)
        pairs = [operands(b, t, d, p, dtype)(device, generator) for _ in range(count)]
        return {"pairs": [(pair["a"], pair["g"]) for pair in pairs], "scale": scale}

    def run(pairs: list[tuple[Tensor, Tensor]], scale: Tensor) -> list[Tensor]:
        return ops.scaled_sums(pairs, scale)

    def alone(pairs: list[tuple[Tensor, Tensor]], scale: Tensor) -> list[Tensor]:
        return [ops.scaled_sum(a, g, scale) for a, g in pairs]

    def rounded(pairs: list[tuple[Tensor, Tensor]], scale: Tensor) -> list[Tensor]:
        return [scaled_matmul(a, g, scale) for a, g in pairs]

    return Case(
        operation="scaled_sums", model="ClinicalBERT", dtype=dtype, make=make, run=run,
        shape={"layers": count, "b": b, "t": t, "d": d, "p": p}, flops=2.0 * count * b * t * d * p,
        others={"a launch each": alone, "scale, then matmul": rounded},
        nbytes=float(count * (b * t * (d + p) * dtype.itemsize + 4 * d * p) + 4 * b),
        tolerance=1e-2,
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*layer, torch.bfloat16) for layer in LAYERS]
    shapes = ((12, 64, 128, 768, 768), (12, 64, 128, 768, 3072), (2, 4, 128, 256, 256))
    found += [together(*shape, torch.bfloat16) for shape in shapes]
    return found + [case(*LAYERS[i], torch.float32) for i in (0, 1, 2)]

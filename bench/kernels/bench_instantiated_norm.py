"""Instantiated norms of linear layers, with and without keeping the per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.bench_ghost_norm import opacus_gradients, opacus_instantiated, operands
from bench.kernels.case import Case
from bench.kernels.shapes import LINEAR
from fastclip import ops

LAYERS = [  # model, b, t, d, p
    ("ClinicalBERT", 4, 128, 768, 768),
    ("ClinicalBERT", 64, 128, 768, 768),
    ("Swin-T", 64, 3136, 96, 384),
    ("LoRA rank 8", 64, 512, 768, 8),
    *LINEAR,
]
KEPT = (0, 1, 2)  # layers whose gradients are worth keeping, or nearly


def case(model: str, b: int, t: int, d: int, p: int, dtype: torch.dtype, keep: bool) -> Case:
    def run(a: Tensor, g: Tensor) -> Any:
        return ops.instantiated_norm(a, g, keep)

    def opacus_kept(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        gradients = opacus_gradients(a, g)
        return gradients.flatten(1).norm(dim=1).square(), gradients

    def bmm(a: Tensor, g: Tensor) -> Tensor:
        return (g.mT @ a).flatten(1).float().square().sum(1)

    others: dict[str, Callable[..., Any]] = {"Opacus per-sample gradients": opacus_kept}
    if not keep:
        others = {"Opacus per-sample gradients": opacus_instantiated, "bmm and its squares": bmm}
    kept = 4 * b * d * p if keep else 0
    return Case(
        operation="instantiated_norm", model=model, dtype=dtype, others=others,
        shape={"b": b, "t": t, "d": d, "p": p, "keep": int(keep)},
        make=operands(b, t, d, p, dtype), run=run, flops=2.0 * b * t * d * p,
        nbytes=float(b * t * (d + p) * dtype.itemsize + 4 * b + kept),
        tolerance=1e-5 if dtype == torch.float32 else 2e-3,
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*layer, torch.bfloat16, keep=False) for layer in LAYERS]
    found += [case(*LAYERS[i], torch.bfloat16, keep=True) for i in KEPT]
    return found + [case(*LAYERS[i], torch.float32, keep=False) for i in (0, 1)]

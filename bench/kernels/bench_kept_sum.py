"""Clipped sums of kept per-sample gradients: of layers whose planner keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import Case, normal
from fastclip import ops

SHAPES = (
    ("GPT-2 small", 16, (3072, 768)),
    ("ResNet-50", 128, (512, 512, 3, 3)),
    ("ResNet-50", 128, (64, 64, 1, 1)),
)


def case(model: str, b: int, shape: tuple[int, ...]) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        scale = torch.rand(b, generator=generator, device=generator.device).to(device)
        return {"gradients": normal((b, *shape), torch.float32, device, generator), "scale": scale}

    def run(gradients: Tensor, scale: Tensor) -> Tensor:
        return ops.kept_sum(gradients, scale)

    def product(gradients: Tensor, scale: Tensor) -> Tensor:
        """The library's, without a look at samples of scale 0."""
        return scale @ gradients.flatten(1)

    numel = torch.Size(shape).numel()
    return Case(
        operation="kept_sum", model=model, shape={"b": b, "n": numel}, dtype=torch.float32,
        make=make, run=run, others={"product": product},
        flops=2.0 * b * numel, nbytes=4.0 * (b + 1) * numel, tolerance=1e-6,
    )  # fmt: skip


def cases() -> list[Case]:
    return [case(*shape) for shape in SHAPES]

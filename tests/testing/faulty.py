"""A layer whose rule can be made wrong in every way that matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastclip.rules import KeptRecord, LayerRule, register_rule

FAULTS = (
    "output", "input gradient", "no input gradient", "one sample's gradient", "norm only", "sum only",
    "bias forgotten", "bias twice", "mean over positions", "rows swapped", "float32", "stride",
    "empty batch", "shared", "large scales",
)  # fmt: skip


class Affine(nn.Module):
    """y = weight * x + bias over the last dimension, with a fault of this name in its rule."""

    def __init__(self, features: int, fault: str = "", bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))
        self.bias = nn.Parameter(torch.linspace(-1, 1, features)) if bias else None
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return y if self.bias is None else y + self.bias


class FaultyRecord(KeptRecord):
    """Says one thing of the norm, another of the sum, a third of the gradients."""

    def __init__(self, gradients: Tensor, fault: str) -> None:
        super().__init__(gradients)
        self.fault = fault

    def merge(self, other: Any) -> None:
        return None

    def norm_sq(self) -> Tensor:
        return super().norm_sq() * (0.5 if self.fault == "norm only" else 1)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self.fault == "large scales":
            scale = scale.clamp(max=0.5)
        return super().clipped_sum(scale) * (1.1 if self.fault == "sum only" else 1)

    def per_sample(self) -> Tensor:
        return self.gradients * (0.5 if self.fault == "shared" else 1)


@register_rule(Affine)
class AffineRule(LayerRule):
    name = "affine"

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = module.weight * x
        if module.bias is not None:
            y = y + module.bias
        if module.fault == "output":
            y = y + 1e-3
        if module.fault == "stride" and not x.is_contiguous():
            x = x.flatten().sort().values.view(x.shape)
        return y, (x, module.weight)

    def backward(self, call: Any) -> Tensor | None:
        (x, weight), fault, g = call.saved, call.module.fault, call.g
        if call.wants("weight"):
            own = call.samples(g * x)
            if fault == "empty batch" and not len(own):
                own = own.new_ones(1, *own.shape[1:])
            flat = own.reshape(len(own), torch.Size(own.shape[1:-1]).numel(), own.shape[-1])
            sums = flat.mean(1) if fault == "mean over positions" else flat.sum(1)
            if fault == "one sample's gradient" and len(sums):
                sums = sums.clone()
                sums[0] *= 1.01
            if fault == "rows swapped":
                sums = sums.roll(1, 0)
            if fault == "float32":
                sums = sums.to(torch.bfloat16).to(sums.dtype)
            call.record("weight", FaultyRecord(sums, fault))
        if call.wants("bias") and fault != "bias forgotten":
            rows = call.samples(g)
            flat = rows.reshape(len(rows), torch.Size(rows.shape[1:-1]).numel(), rows.shape[-1])
            call.record("bias", KeptRecord(flat.sum(1) * (2 if fault == "bias twice" else 1)))
        if not call.needs_input_grad or fault == "no input gradient":
            return None
        return g * weight * (0.9 if fault == "input gradient" else 1)

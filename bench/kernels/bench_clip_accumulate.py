"""Clipping of materialised per-sample gradients, all parameters of a model together.

The ceiling is reading every gradient twice: a sample's scale needs its whole norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from torch import Tensor, nn

from bench.kernels.case import Case, normal
from fastclip import ops

Shapes = list[tuple[int, ...]]


def resnet18(classes: int = 10) -> Shapes:
    """ResNet-18 for small pictures, with GroupNorm: 62 parameter tensors, 11.2 million values."""
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for planes in (64, 64, 128, 128, 256, 256, 512, 512):
        shapes += [(planes, width, 3, 3), (planes,), (planes,)]
        shapes += [(planes, planes, 3, 3), (planes,), (planes,)]
        if planes != width:
            shapes += [(planes, width, 1, 1), (planes,), (planes,)]
        width = planes
    return [*shapes, (classes, width), (classes,)]


def bert(layers: int, d: int, vocabulary: int = 30522) -> Shapes:
    """Token and position embeddings, blocks of attention and a feed-forward layer 4 times as wide."""
    block = [*[(d, d), (d,)] * 4, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    embeddings: Shapes = [(vocabulary, d), (512, d), (2, d), (d,), (d,)]
    return [*embeddings, *block * layers, (d, d), (d,), (2, d), (2,)]


def mnist_cnn() -> Shapes:
    """The network of Opacus' MNIST example: 26,010 values."""
    return [(16, 1, 8, 8), (16,), (32, 16, 4, 4), (32,), (32, 512), (32,), (10, 32), (10,)]


MODELS = {
    "MNIST CNN": mnist_cnn(),
    "ResNet-18 32": resnet18(),
    "BERT 4 layers d=256": bert(4, 256),
    "BERT 2 layers d=128": bert(2, 128),
}
CASES = [  # model, b, per layer
    ("MNIST CNN", 32, False),
    ("MNIST CNN", 1024, False),
    ("ResNet-18 32", 16, False),
    ("ResNet-18 32", 64, False),
    ("ResNet-18 32", 64, True),
    ("BERT 4 layers d=256", 32, False),
    ("BERT 4 layers d=256", 64, False),
    ("BERT 2 layers d=128", 128, False),
]


@functools.cache
def opacus_optimizer(model: str, dtype: torch.dtype, per_layer: bool) -> DPOptimizer:
    """Opacus' optimizer of the model's parameters, which hold no memory: it clips what is hung on
    them."""
    parameters = [nn.Parameter(torch.empty(s, dtype=dtype, device="meta")) for s in MODELS[model]]
    kind = DPPerLayerOptimizer if per_layer else DPOptimizer
    return kind(
        torch.optim.SGD(parameters, 0.1), noise_multiplier=1.0, expected_batch_size=1,
        max_grad_norm=thresholds(model, per_layer),
    )  # fmt: skip


def thresholds(model: str, per_layer: bool) -> float | list[float]:
    """About half of the samples are clipped: gradients are standard normal."""
    sizes = [math.prod(shape) for shape in MODELS[model]]
    return [math.sqrt(size) for size in sizes] if per_layer else math.sqrt(sum(sizes))


def case(model: str, b: int, per_layer: bool, dtype: torch.dtype) -> Case:
    shapes, bounds = MODELS[model], thresholds(model, per_layer)

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        return {"grad_samples": [normal((b, *s), dtype, device, generator) for s in shapes]}

    def run(grad_samples: list[Tensor]) -> list[Tensor]:
        return ops.clip_accumulate(grad_samples, bounds)[0]

    def opacus(grad_samples: list[Tensor]) -> list[Tensor]:
        optimizer = opacus_optimizer(model, dtype, per_layer)
        for parameter, g in zip(optimizer.params, grad_samples, strict=True):
            parameter.grad_sample = g.view_as(g)  # Opacus marks the tensors that it has used
            parameter.summed_grad = None
        optimizer.clip_and_accumulate()
        for parameter in optimizer.params:
            parameter.grad_sample = None
        return [parameter.summed_grad for parameter in optimizer.params]

    values = sum(math.prod(shape) for shape in shapes)
    return Case(
        operation="clip_accumulate", model=model,
        shape={"b": b, "tensors": len(shapes), "values": values, "per_layer": int(per_layer)},
        dtype=dtype, make=make, run=run, others={"Opacus clip_and_accumulate": opacus},
        flops=4.0 * b * values, nbytes=float(values * (2 * b * dtype.itemsize + 4)),
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*shape, torch.float32) for shape in CASES]
    return found + [case(*CASES[i], torch.bfloat16) for i in (1, 3, 6)]

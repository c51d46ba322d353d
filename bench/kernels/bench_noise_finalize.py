"""Noise and division of one step, all parameters together: seeded, cryptographic, and none.

Two draws of noise differ, so what the harness compares with the float64 reference is exact only in the
cases without noise. In the others sum and noise have the same size, so that two right results are 1.0
apart (for a tensor of 768 values 1.0 +- 0.04), and the law is checked where the arguments are made:
mean, variance and fourth moment of (out * divisor - sum) / std, within 6 standard errors. They are
reported as not repeatable, as it should be. The reference of secure noise draws on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor
from transformers import BertConfig, BertModel

from bench.kernels.case import Case, normal
from bench.kernels.check import WrongResult
from fastclip import ops
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise

DIVISOR = 32.0
MOMENTS = ((1, 0, 1), (2, 1, 2), (4, 3, 96))
"""Power k, mean and variance of the k-th power of a standard normal."""


def bert_base() -> list[torch.Size]:
    """The parameters of BERT-base."""
    with torch.device("meta"):
        return [p.shape for p in BertModel(BertConfig()).parameters()]


def adapters() -> list[torch.Size]:
    """LoRA of rank 8 on queries and values of BERT-base: what a launch costs."""
    return [torch.Size(shape) for shape in [(8, 768), (768, 8)] * 24]


def run(
    summed: list[Tensor], like: list[Tensor], std: float, divisor: float, source: NoiseSource
) -> list[Tensor]:
    return ops.noise_finalize(summed, like, std, divisor, source)


def opacus(
    summed: list[Tensor], like: list[Tensor], std: float, divisor: float, source: NoiseSource
) -> list[Tensor]:
    """Opacus' add_noise and scale_grad; its secure mode guards, but draws from torch's generator."""
    gradients = []
    for total, parameter in zip(summed, like, strict=True):
        noise = _generate_noise(std, total, None, source.guarded)
        gradients.append((total + noise).to(parameter.dtype) / divisor)
    return gradients


def draws(
    summed: list[Tensor], like: list[Tensor], std: float, divisor: float, source: NoiseSource
) -> list[Tensor]:
    """The normals alone."""
    return [torch.randn_like(total) for total in summed]


def check_law(arguments: Mapping[str, Any]) -> None:
    """The noise of one call is standard normal, all tensors together.

    Raises:
        WrongResult: a moment is more than 6 standard errors off.
    """
    std, totals = arguments["std"], arguments["summed"]
    count = sum(x.numel() for x in totals)
    found = [0.0] * len(MOMENTS)
    for gradient, total in zip(run(**arguments), totals, strict=True):
        x = (gradient.double() * DIVISOR - total) / std
        for i, (power, _, _) in enumerate(MOMENTS):
            found[i] += float(x.pow(power).sum()) / count
    for (power, mean, variance), moment in zip(MOMENTS, found, strict=True):
        if not abs(moment - mean) <= 6 * math.sqrt(variance / count):
            raise WrongResult(f"moment {power} of the noise is {moment:.6f}, expected {mean}")


def case(model: str, shapes: list[torch.Size], noise: str, source: NoiseSource | None) -> Case:
    values = sum(map(math.prod, shapes))
    std = 0.0 if source is None else 1.0

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        arguments = {
            "summed": [normal(shape, torch.float32, device, generator) for shape in shapes],
            "like": [torch.empty(shape, device=device) for shape in shapes],
            "std": std,
            "divisor": DIVISOR,
            "source": source or SeededNoise(),
        }
        if std > 0:
            check_law(arguments)
        return arguments

    return Case(
        operation="noise_finalize", model=f"{model}, {noise}", dtype=torch.float32,
        shape={"tensors": len(shapes), "values": values}, make=make, run=run,
        flops=0.0, nbytes=8.0 * values, tolerance=1e-6 if source is None else 1.3,
        others={"Opacus": opacus, "torch.randn alone": draws} if std > 0 else {"Opacus": opacus},
    )  # fmt: skip


def cases() -> list[Case]:
    whole = bert_base()
    return [
        case("BERT-base", whole, "Philox", SeededNoise()),
        case("BERT-base", whole, "ChaCha20", SecureNoise(guarded=True)),
        case("BERT-base", whole, "ChaCha20 without guard", SecureNoise(guarded=False)),
        case("BERT-base", whole, "no noise", None),
        case("LoRA", adapters(), "Philox", SeededNoise()),
        case("LoRA", adapters(), "ChaCha20", SecureNoise(guarded=True)),
        case("LoRA", adapters(), "no noise", None),
    ]

"""Backward of normalisation layers: LayerNorm of BERT and GPT-2, RMSNorm, GroupNorm of ResNets.

Of channels-last GroupNorm the forward pass, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opacus.grad_sample.group_norm import compute_group_norm_grad_sample
from opacus.grad_sample.layer_norm import compute_layer_norm_grad_sample
from opacus.grad_sample.rms_norm import compute_rms_norm_grad_sample
from torch import Tensor, nn

from bench.kernels.case import Case, normal
from bench.kernels.shapes import GROUP_NORMS, LAYER_NORMS
from fastclip import ops
from fastclip.ops import norms

EPS = 1e-5
LAYERS = [  # model, b, t, c
    ("ClinicalBERT", 16, 128, 768),
    *LAYER_NORMS,
]
RMS = [("RMSNorm 2048", 16, 512, 2048), ("RMSNorm 4096", 8, 1024, 4096)]
GROUPS = [  # model, b, c, pixels, k
    ("ResNet-18 32", 64, 64, 32 * 32, 32),
    ("ResNet-18 32", 64, 512, 4 * 4, 32),
    *GROUP_NORMS,
    ("InstanceNorm 224", 64, 64, 56 * 56, 64),
]


def _case(
    kind: str, model: str, shape: Mapping[str, int], dtype: torch.dtype, make: Callable[..., Any],
    run: Callable[..., Any], others: Mapping[str, Callable[..., Any]],
) -> Case:  # fmt: skip
    numbers = shape["b"] * shape["t"] * shape["c"]
    affine = shape["b"] * shape["c"] * 4
    return Case(
        operation=f"{kind}_norm_backward", model=model, shape=shape, dtype=dtype, make=make,
        run=run, others=others, flops=12.0 * numbers, tolerance=1e-2,
        nbytes=float(3 * numbers * dtype.itemsize + (1 if kind == "rms" else 2) * affine),
    )  # fmt: skip


def layer_case(model: str, b: int, t: int, c: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        x = normal((b, t, c), dtype, device, generator)
        g = normal((b, t, c), dtype, device, generator)
        weight = normal((c,), torch.float32, device, generator).to(dtype)
        _, mean, rstd = torch.native_layer_norm(x, [c], weight, weight, EPS)
        return {"x": x, "g": g, "mean": mean[..., 0], "rstd": rstd[..., 0], "weight": weight}

    def run(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        return norms.layer_norm_backward(x, g, mean, rstd, weight, True)

    def backward(
        x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, mask: list[bool]
    ) -> tuple:
        statistics = mean.contiguous().unsqueeze(2), rstd.contiguous().unsqueeze(2)
        return torch.ops.aten.native_layer_norm_backward(
            g, x, [c], *statistics, weight, weight, mask
        )

    def opacus(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        layer = nn.LayerNorm(c, EPS, device="meta")
        grads = compute_layer_norm_grad_sample(layer, [x], g)
        dx = backward(x, g, mean, rstd, weight, [True, False, False])[0]
        return dx, grads[layer.weight], grads[layer.bias]

    def public(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        return backward(x, g, mean, rstd, weight, [True, True, True])

    others = {"Opacus sampler + PyTorch": opacus, "non-private backward": public}
    return _case("layer", model, {"b": b, "t": t, "c": c}, dtype, make, run, others)


def rms_case(model: str, b: int, t: int, c: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        x = normal((b, t, c), dtype, device, generator)
        g = normal((b, t, c), dtype, device, generator)
        rstd = (x.float().square().mean(2) + EPS).rsqrt()
        weight = normal((c,), torch.float32, device, generator).to(dtype)
        return {"x": x, "g": g, "rstd": rstd, "weight": weight}

    def run(x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        return norms.rms_norm_backward(x, g, rstd, weight, True)

    def opacus(x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        layer = nn.RMSNorm(c, EPS, device="meta")
        dw = compute_rms_norm_grad_sample(layer, [x], g)[layer.weight]
        x = x.detach().requires_grad_()
        out = torch.nn.functional.rms_norm(x, [c], weight, EPS)
        return torch.autograd.grad(out, x, g)[0], dw

    others = {"Opacus sampler + autograd": opacus}
    return _case("rms", model, {"b": b, "t": t, "c": c}, dtype, make, run, others)


def group_case(model: str, b: int, c: int, t: int, k: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        x = normal((b, c, t), dtype, device, generator)
        g = normal((b, c, t), dtype, device, generator)
        weight = normal((c,), torch.float32, device, generator).to(dtype)
        _, mean, rstd = torch.native_group_norm(x, weight, weight, b, c, t, k, EPS)
        return {"x": x, "g": g, "mean": mean, "rstd": rstd, "weight": weight}

    def run(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        return norms.group_norm_backward(x, g, mean, rstd, weight, True)

    def backward(
        x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, mask: list[bool]
    ) -> tuple:
        return torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, b, c, t, k, mask)

    def opacus(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        layer = nn.GroupNorm(k, c, EPS, device="meta")
        grads = compute_group_norm_grad_sample(layer, [x], g)
        dx = backward(x, g, mean, rstd, weight, [True, False, False])[0]
        return dx, grads[layer.weight], grads[layer.bias]

    def public(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        return backward(x, g, mean, rstd, weight, [True, True, True])

    shape = {"b": b, "c": c, "t": t, "k": k}
    others = {"Opacus sampler + PyTorch": opacus, "non-private backward": public}
    return _case("group", model, shape, dtype, make, run, others)


def _map(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Channels-last."""
    x = normal(shape, dtype, device, generator)
    return x.contiguous(memory_format=torch.channels_last)


def _last_case(
    name: str, model: str, shape: Mapping[str, int], dtype: torch.dtype, make: Callable[..., Any],
    run: Callable[..., Any], others: Mapping[str, Callable[..., Any]], passes: int,
) -> Case:  # fmt: skip
    """passes: maps read or written."""
    numbers = shape["b"] * shape["t"] * shape["c"]
    return Case(
        operation=name, model=f"{model} channels-last", shape=shape, dtype=dtype, make=make, run=run,
        others=others, flops=12.0 * numbers, tolerance=1e-2,
        nbytes=float(passes * numbers * dtype.itemsize),
    )  # fmt: skip


def last_cases(model: str, b: int, c: int, t: int, k: int, dtype: torch.dtype) -> list[Case]:
    """Forward and backward of channels-last maps, beside torch's with the copies that it needs there."""
    side = math.isqrt(t)

    def weights(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        own = normal((2, c), torch.float32, device, generator).to(dtype)
        return own[0], own[1]

    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        weight, bias = weights(device, generator)
        x = _map((b, c, side, side), dtype, device, generator)
        return {"x": x, "weight": weight, "bias": bias}

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple:
        return ops.group_norm(x, weight, bias, k, EPS, x.dtype)

    def public(x: Tensor, weight: Tensor, bias: Tensor) -> tuple:
        y, *statistics = torch.native_group_norm(x.contiguous(), weight, bias, b, c, t, k, EPS)
        return y.contiguous(memory_format=torch.channels_last), *statistics

    def make_backward(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        given = make(device, generator)
        x, weight = given["x"], given["weight"]
        g = _map((b, c, side, side), dtype, device, generator)
        _, mean, rstd = torch.native_group_norm(x.contiguous(), weight, weight, b, c, t, k, EPS)
        return {"x": x, "g": g, "mean": mean, "rstd": rstd, "weight": weight}

    def run_backward(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        maps = x.flatten(2), g.flatten(2)
        return norms.group_norm_backward(*maps, mean, rstd, weight, True)

    def through_copies(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        maps = x.contiguous().flatten(2), g.contiguous().flatten(2)
        dx, *own = norms.group_norm_backward(*maps, mean, rstd, weight, True)
        return dx.view(x.shape).contiguous(memory_format=torch.channels_last), *own

    def public_backward(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple:
        dx, *own = torch.ops.aten.native_group_norm_backward(
            g.contiguous(), x.contiguous(), mean, rstd, weight, b, c, t, k, [True, True, True]
        )
        return dx.contiguous(memory_format=torch.channels_last), *own

    shape = {"b": b, "c": c, "t": t, "k": k}
    backward = {"contiguous copies": through_copies, "non-private backward": public_backward}
    return [
        _last_case(
            "group_norm", model, shape, dtype, make, run, {"PyTorch, with copies": public}, 2
        ),
        _last_case(
            "group_norm_backward", model, shape, dtype, make_backward, run_backward, backward, 3
        ),
    ]


def cases() -> list[Case]:
    bfloat16 = torch.bfloat16
    found = [layer_case(*shape, bfloat16) for shape in LAYERS]
    found += [rms_case(*shape, bfloat16) for shape in RMS]
    found += [group_case(*shape, bfloat16) for shape in GROUPS]
    maps = (GROUPS[1], *GROUP_NORMS)
    found += [case for shape in maps for case in last_cases(*shape, bfloat16)]
    found += [layer_case(*shape, torch.float32) for shape in LAYERS[:2]]
    return found + [group_case(*shape, torch.float32) for shape in (GROUPS[0], GROUP_NORMS[2])]

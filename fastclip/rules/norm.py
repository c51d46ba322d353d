"""Normalization with affine parameters: the layers, and torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.rules.elementwise import aligned, summed_to
from fastclip.rules.protocol import LayerCall, LayerRule, register_rule
from fastclip.rules.records import KeptRecord
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


def _type_under_autocast(x: Tensor) -> torch.dtype:
    # torch's autocast runs these layers in float32, except on CPUs, where they keep the type of
    # their input; the kernels called here are below it.
    casts = x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)
    return torch.float32 if casts else x.dtype


class _NormRule(LayerRule):
    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        x, _ = super().prepare(module, args, kwargs)
        return x.to(_type_under_autocast(x)), None


@register_rule(nn.LayerNorm)
class LayerNormRule(_NormRule):
    """y = (x - mean) * rstd * w + b over the trailing dimensions."""

    name = "layer_norm"

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        shape, weight, bias = module.normalized_shape, module.weight, module.bias
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, module.eps)
        return out, (x, mean, rstd, weight, bias)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, mean, rstd, weight, bias = call.saved
        shape = call.module.normalized_shape
        if call.wants("weight") or call.wants("bias"):
            rows, features = call.samples(x), torch.Size(shape).numel()
            b = rows.shape[0]
            t = rows.numel() // (b * features) if b else 0
            fused = call.needs_input_grad and _same_rows(rows, x)
            grad, *grads = ops.layer_norm_backward(
                ops.shaped(rows, b, t, features), ops.shaped(call.samples(call.g), b, t, features),
                ops.shaped(call.samples(mean), b, t), ops.shaped(call.samples(rstd), b, t),
                None if weight is None else ops.shaped(weight, features), fused,
            )  # fmt: skip
            for name, own in zip(("weight", "bias"), grads, strict=True):
                if call.wants(name):
                    call.record(name, KeptRecord(ops.shaped(own, b, *shape)))
            if grad is not None:
                return ops.shaped(grad, *x.shape)
        if not call.needs_input_grad:
            return None
        return torch.ops.aten.native_layer_norm_backward(
            call.g, x, shape, mean, rstd, weight, bias, [True, False, False]
        )[0]


def _same_rows(rows: Tensor, x: Tensor) -> bool:
    """Whether the samples lie unchanged in x: the gradient of `rows` is then that of x."""
    return rows.shape == x.shape and rows.stride() == x.stride()


@register_rule(nn.RMSNorm)
class RMSNormRule(_NormRule):
    """y = x * rstd * w with rstd = (mean of x^2 + eps)^(-1/2) over the trailing dimensions."""

    name = "rms_norm"

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        shape, weight, eps = module.normalized_shape, module.weight, module.eps
        out = F.rms_norm(x, shape, weight, eps)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        dims = tuple(range(-len(shape), 0))
        rstd = torch.rsqrt(ops.widen(x).square().mean(dims) + eps)
        return out, (x, rstd, weight)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, rstd, weight = call.saved
        shape = call.module.normalized_shape
        if call.wants("weight"):
            rows, features = call.samples(x), torch.Size(shape).numel()
            b = rows.shape[0]
            t = rows.numel() // (b * features) if b else 0
            fused = call.needs_input_grad and _same_rows(rows, x)
            grad, own = ops.rms_norm_backward(
                ops.shaped(rows, b, t, features), ops.shaped(call.samples(call.g), b, t, features),
                ops.shaped(call.samples(rstd), b, t), ops.shaped(weight, features), fused,
            )  # fmt: skip
            call.record("weight", KeptRecord(ops.shaped(own, b, *shape)))
            if grad is not None:
                return ops.shaped(grad, *x.shape)
        if not call.needs_input_grad:
            return None
        dims = tuple(range(-len(shape), 0))
        scale = rstd.view(*rstd.shape, *[1] * len(shape))
        normalized = ops.widen(x) * scale
        weighted = ops.widen(call.g) * weight
        mean = (normalized * weighted).mean(dims, keepdim=True)
        return scale * (weighted - normalized * mean)


@register_rule(nn.GroupNorm)
class GroupNormRule(LayerRule):
    """GroupNorm over x [b, c, *space]."""

    name = "group_norm"

    def axis(self, module: Any) -> int | None:
        return 0

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        x, _ = super().prepare(module, args, kwargs)
        dtype = _type_under_autocast(x)
        extra = self.num_groups(module, x), dtype
        return x if self.keeps(x) else x.to(dtype).contiguous(), extra

    def keeps(self, x: Tensor) -> bool:
        """Whether x is passed unchanged: if a kernel takes its format, and in torch's on a CPU."""
        if ops.computes_reference(x):
            return x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)
        return ops.channels_last(x)

    def num_groups(self, module: Any, x: Tensor) -> int:
        return int(module.num_groups)

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        k, dtype = extra
        out, mean, rstd = ops.group_norm(x, module.weight, module.bias, k, module.eps, dtype)
        return out, (x, mean, rstd, module.weight)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, mean, rstd, weight = call.saved
        if not (call.needs_input_grad or call.wants("weight") or call.wants("bias")):
            return None
        shape = (*x.shape[:2], x.shape[2:].numel())
        grad, *grads = ops.group_norm_backward(
            ops.shaped(x, *shape), ops.shaped(call.g, *shape), mean, rstd, weight,
            call.needs_input_grad,
        )  # fmt: skip
        for name, own in zip(("weight", "bias"), grads, strict=True):
            if call.wants(name):
                call.record(name, KeptRecord(own))
        return None if grad is None else ops.shaped(grad, *x.shape)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(GroupNormRule):
    """InstanceNorm without running statistics: GroupNorm with one channel per group."""

    name = "instance_norm"

    def keeps(self, x: Tensor) -> bool:
        return not ops.computes_reference(x) and ops.channels_last(x)

    def num_groups(self, module: Any, x: Tensor) -> int:
        return x.shape[1]


# -------------------------------------------------------------------------------------------------
# Normalizations with a separate weight and bias: two reductions, as in the layers.


_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "instance_norm": (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
    ),
    "batch_norm": (
        "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
    ),
    "prelu": ("input", "weight"),
}  # fmt: skip
_DEFAULTS = {"weight": None, "bias": None, "momentum": 0.1, "use_input_stats": True}
_DEFAULT_EPS = {"rms_norm": None}
_FUNCTIONS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x["input"], x["normalized_shape"], eps=x["eps"]),
    "rms_norm": lambda x: F.rms_norm(x["input"], x["normalized_shape"], eps=x["eps"]),
    "group_norm": lambda x: F.group_norm(x["input"], x["num_groups"], eps=x["eps"]),
    "instance_norm": lambda x: F.instance_norm(x["input"], eps=x["eps"]),
    "batch_norm": lambda x: F.batch_norm(
        x["input"], x["running_mean"], x["running_var"], eps=x["eps"]
    ),
    "prelu": lambda x: x["input"].clamp_max(0),
}
"""The factor of the weight."""


@register_use(*_ARGUMENTS)
class NormUse(UseRule):
    """y = f(x) * w + b, w and b over the trailing dimensions or over channels."""

    name = "norm"

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        names = _ARGUMENTS[name]
        if len(args) > len(names):  # torch.layer_norm and torch.batch_norm take more
            return None
        given = {**_DEFAULTS, "eps": _DEFAULT_EPS.get(name, 1e-5)}
        given |= dict(zip(names, args, strict=False))
        given |= {"input" if n == "self" else n: v for n, v in kwargs.items()}
        known = set(names) | _DEFAULTS.keys() | {"eps"}
        if not given.keys() <= known or not isinstance(given.get("input"), Tensor):
            return None
        if given.get("training") or (name == "instance_norm" and not given["use_input_stats"]):
            return None  # batch statistics couple samples; or running ones of an instance
        return {**given, "function": name}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        if batch_axis is None or not set(private) <= {"weight", "bias"} or out.is_complex():
            return False
        if operands["function"] in ("group_norm", "instance_norm") and batch_axis.axis:
            return False
        own = _lies(operands["function"], operands[private[0]].shape, out.dim())
        return len(own) == out.dim() and own[batch_axis.axis] == 1

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        if "weight" not in private:
            return []
        statistics = ["running_mean", "running_var"] if operands["function"] == "batch_norm" else []
        return ["input", *statistics]

    def records(self, use: UseBackward) -> None:
        function = use.operands["function"]
        shapes = {n: use.shape_of(n) for n in ("weight", "bias") if use.wants(n)}
        if "weight" in shapes:
            tensors = {n: use[n] for n in use.tensors() if n not in use.private}
            with torch.no_grad():
                wide = {n: ops.widen(x) for n, x in tensors.items()}
                made = _FUNCTIONS[function]({**use.operands, **wide})
            lies = _lies(function, shapes["weight"], use.g.dim())
            own = summed_to(use, use.g, shapes["weight"], made, lies)
            use.record("weight", KeptRecord(own))
        if "bias" in shapes:
            lies = _lies(function, shapes["bias"], use.g.dim())
            use.record("bias", KeptRecord(summed_to(use, use.g, shapes["bias"], None, lies)))


def _lies(function: str, shape: torch.Size, dims: int) -> tuple[int, ...]:
    """Returns the weight's shape in the output: trailing dimensions, or channels along axis 1."""
    if function in ("layer_norm", "rms_norm") or shape.numel() == 1 or dims < 2:
        return aligned(shape, dims)
    return (1, shape.numel(), *[1] * (dims - 2))

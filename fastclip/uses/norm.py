"""Normalisations with a weight and a bias of their own: two reductions, as in the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import KeptRecord
from fastclip.uses.reductions import aligned, summed_to
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

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
"""What is multiplied by the weight."""


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
            return None  # statistics of the batch, which couple it; running ones of an instance
        return {**given, "function": name}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        if place is None or not set(private) <= {"weight", "bias"} or out.is_complex():
            return False
        if operands["function"] in ("group_norm", "instance_norm") and place.axis:
            return False
        own = _lies(operands["function"], operands[private[0]].shape, out.dim())
        return len(own) == out.dim() and own[place.axis] == 1

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
    """The weight's shape as it lies in the output: trailing dimensions, or channels along axis 1."""
    if function in ("layer_norm", "rms_norm") or shape.numel() == 1 or dims < 2:
        return aligned(shape, dims)
    return (1, shape.numel(), *[1] * (dims - 2))

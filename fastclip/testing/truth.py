"""The truth: every sample's own gradient, by ordinary autograd over a model that sees it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._torch import TorchDispatchMode, tree_leaves
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.model.compatible import clone
from fastclip.testing.batches import copied, sample
from fastclip.testing.randomness import own_randomness

Loss = Callable[[nn.Module, Any], Tensor]


class Truth:
    """One model and batch, one sample at a time.

    Args:
        model: without dropout; its parameters, gradients and buffers are used as scratch.
        batch: in the model's types.
        loss: (model, batch) -> the loss, a scalar.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, batch_first: bool) -> None:
        self.model, self.batch, self.loss, self.batch_first = model, batch, loss, batch_first
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def whole(self) -> float:
        """The loss of the batch, all samples together."""
        return float(self._run(self.batch, seed=0).detach())

    def gradient(self, i: int, seed: int = 0) -> tuple[float, dict[str, Tensor | None]]:
        """Sample i's loss, and its gradients; None for a parameter that it does not reach."""
        for parameter in self.parameters.values():
            parameter.grad = None
        value = self._run(sample(self.batch, i, self.batch_first), seed, differentiate=True)
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return float(value.detach()), found

    def precision(self) -> torch.dtype:
        """The coarsest type of real numbers that sample 0 meets on its way."""
        seen = _TypesSeen()
        try:
            with seen:
                self.gradient(0)
        except Exception:  # a model that is no plain sequence of operations (compiled)
            return min(torch.float32, self._own(), key=_bits)
        return min({self._own(), *seen.types}, key=_bits)

    def is_random(self) -> bool:
        """Whether sample 0's loss or gradient depends on a generator."""
        (first, one), (second, other) = self.gradient(0, seed=1), self.gradient(0, seed=2)
        slack = 1e3 * torch.finfo(self.precision()).eps
        if abs(first - second) > slack * abs(first):
            return True
        return any(
            (a is None) != (b is None) or (a is not None and b is not None and _differ(a, b, slack))
            for a, b in zip(one.values(), other.values(), strict=True)
        )

    def _own(self) -> torch.dtype:
        return min({p.dtype for p in self.parameters.values()}, key=_bits)

    def _run(self, batch: Any, seed: int, differentiate: bool = False) -> Tensor:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        with own_randomness(seed):
            value = scalar(self.loss(self.model, copied(batch)))
            if differentiate:
                value.backward()
        return value


def scalar(value: Any) -> Tensor:
    """The loss, if it is one.

    Raises:
        ArgumentError, ArgumentTypeError: naming what came.
    """
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"loss(model, batch) expects to return the loss as a tensor, got {type(value).__name__}"
        )
    if value.numel() != 1 or not value.requires_grad:
        raise ArgumentError(
            "loss(model, batch) expects to return one number that depends on trainable parameters, "
            f"got shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
        )
    return value


def in_double(model: nn.Module, batch: Any, loss: Loss) -> tuple[nn.Module, Any]:
    """The model and batch in float64, or copies as they are where it does not run in float64."""
    twin, wide = clone(model).double(), copied(batch, torch.float64)
    try:
        with own_randomness(0):
            loss(twin, copied(wide)).backward()
    except Exception:
        return clone(model), copied(batch)
    return clone(model).double(), wide


def _differ(a: Tensor, b: Tensor, slack: float) -> bool:
    return bool(torch.linalg.vector_norm(a - b) > slack * torch.linalg.vector_norm(a))


def _bits(dtype: torch.dtype) -> tuple[int, float]:
    return torch.finfo(dtype).bits, -torch.finfo(dtype).eps


class _TypesSeen(TorchDispatchMode):
    """The types of the real numbers that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim():
                if leaf.is_floating_point():
                    self.types.add(leaf.dtype)
                elif leaf.is_complex():
                    self.types.add(leaf.real.dtype)
        return out

"""Threshold policies: the value of C, and the bound of the whole gradient that it implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError

SMALLEST = 1e-12


class ThresholdPolicy(Protocol):
    """How C is set, and moved once a logical batch from noisy counts (never from raw ones)."""

    per_layer: bool
    """One threshold a parameter tensor instead of one for the whole gradient."""

    def initial(self, max_grad_norm: float | Sequence[float], parameters: int) -> Tensor:
        """C_0 from make_private's max_grad_norm, for a number of parameter tensors."""

    def bound(self, thresholds: Tensor) -> Tensor:
        """Norm of the largest whole gradient whose parts obey the thresholds, a scalar."""


@dataclass(frozen=True)
class Constant:
    """One threshold that never moves by itself: Abadi et al. 2016."""

    per_layer = False

    def initial(self, max_grad_norm: float | Sequence[float], parameters: int) -> Tensor:
        return torch.tensor(_threshold(max_grad_norm), dtype=torch.float64)

    def bound(self, thresholds: Tensor) -> Tensor:
        return thresholds


@dataclass(frozen=True)
class PerLayer:
    """One threshold a parameter tensor, S = sqrt(sum C_l^2): Opacus' "per_layer"."""

    per_layer = True

    def initial(self, max_grad_norm: float | Sequence[float], parameters: int) -> Tensor:
        if isinstance(max_grad_norm, (int, float)) or not isinstance(max_grad_norm, Sequence):
            raise ArgumentTypeError(
                f"clipping='per_layer' expects max_grad_norm as a list of {parameters} numbers, "
                f"one a trainable parameter tensor of the optimizer, got {max_grad_norm!r}"
            )
        if len(max_grad_norm) != parameters:
            raise ArgumentError(
                f"clipping='per_layer' expects {parameters} thresholds in max_grad_norm, one a "
                f"trainable parameter tensor of the optimizer, got {len(max_grad_norm)}"
            )
        values = [_threshold(value) for value in max_grad_norm]
        return torch.tensor(values, dtype=torch.float64)

    def bound(self, thresholds: Tensor) -> Tensor:
        return torch.linalg.vector_norm(thresholds)


def _threshold(value: object) -> float:
    threshold = positive("max_grad_norm", value)
    if threshold < SMALLEST:
        raise ArgumentError(
            f"max_grad_norm expects at least {SMALLEST} (squared norms near it underflow in "
            f"float32), got {value!r}; scale the loss up instead"
        )
    return threshold


def positive(name: str, value: object) -> float:
    """`value` as a positive finite float, or an error that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if isinstance(value, Tensor) and value.dim() == 0:
            return positive(name, value.item())
        raise ArgumentTypeError(
            f"{name} expects a positive number, got {value!r} ({type(value).__name__})"
        )
    if not 0 < float(value) < float("inf"):
        raise ArgumentError(f"{name} expects a positive finite number, got {value!r}")
    return float(value)

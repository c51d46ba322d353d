"""Scale functions s(n; C), by which a gradient of norm n is multiplied.

Every function obeys s(n; C) * n <= sensitivity(C) for all n >= 0, 0 included. `normalized=True`
divides the scales by the sensitivity, which becomes 1 (De et al. 2022). The best learning rate then no
longer depends on C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fastclip.clipping.policy import SMALLEST, threshold
from fastclip.core.checks import between, keep
from fastclip.core.numerics import lost_squares


class ScaleFunction(Protocol):
    """Protocol of s(n; C), a frozen value."""

    @property
    def normalized(self) -> bool:
        """Whether scales are divided by the sensitivity of the sum, which is then 1."""

    @property
    def cutoff(self) -> float | None:
        """Z of the global functions, which the threshold policy moves instead of C."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        """Return scales for norms n and thresholds C, broadcast against each other."""

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        """Return the largest s(n; C) * n for every threshold."""


class _Clip:
    """Functions whose sensitivity is the threshold itself."""

    cutoff: ClassVar[float | None] = None

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        return thresholds


@dataclass(frozen=True)
class Hard(_Clip):
    """min(1, C / n) (Abadi et al. 2016), or min(1 / C, 1 / n) if `normalized` (De et al. 2022)."""

    normalized: bool = False

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        # C / max(n, C) is min(1, C / n) without a division by zero. C = 0 raises an error on entry.
        return thresholds / norms.maximum(thresholds)


@dataclass(frozen=True)
class Tanh(_Clip):
    """tanh(C / (n + eps)), SoftAdaClip (Soleymani et al.), section 3.

    Larger gradients keep larger norms, below C. s * n < C holds because tanh(x) < x.
    """

    eps: float = 1e-6
    normalized: bool = False

    def __post_init__(self) -> None:
        keep(self, eps=between("eps", self.eps, SMALLEST / 2, math.inf))

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return torch.tanh(thresholds / (norms + self.eps))


def hidden_square(dtype: torch.dtype) -> float:
    """Return the largest part of a squared norm that underflow can hide, for 2^40 entries.

    No gradient has more entries.
    """
    return lost_squares(1 << 40, dtype)


@dataclass(frozen=True)
class Automatic(_Clip):
    """C / (n + gamma) (AUTO-S). With gamma = 0, C / n for n > 0 and 0 for n = 0 (AUTO-V).

    C only scales the step. Source: Automatic Clipping (Bu et al. 2022, at NeurIPS 2023).

    With gamma = 0 every nonzero gradient contributes with length C. The squares of a tiny gradient
    underflow, so its computed norm is too small and C over it is too large. n is therefore replaced by
    sqrt(n^2 + h), where h is the largest part of n^2 that underflow can hide (`hidden_square`): 1.3e-26
    in float32, 2.4e-296 in float64. A gradient shorter than about 1e-10 in float32 contributes less than
    C. A positive gamma is at least 5e-13 and exceeds the hidden part of any norm.

    Args:
        gamma: 0, or more than 5e-13.
        normalized: scales are divided by C.
    """

    gamma: float = 0.01
    normalized: bool = False

    def __post_init__(self) -> None:
        keep(self, gamma=between("gamma", self.gamma, SMALLEST / 2, math.inf, zero=True))

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        if self.gamma:
            return thresholds / (norms + self.gamma)
        # hypot: the square of a norm of 1e20 is too large for float32
        room = torch.full_like(norms, math.sqrt(hidden_square(norms.dtype)))
        return (thresholds / norms.hypot(room)).masked_fill(norms == 0, 0)


@dataclass(frozen=True)
class _Global:
    """Functions of a cutoff Z. The call returns s / C, whose sensitivity is 1."""

    cutoff: float
    normalized: bool = False

    def __post_init__(self) -> None:
        threshold(self.cutoff, "z")

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        return torch.ones_like(thresholds)


@dataclass(frozen=True)
class Global(_Global):
    """C / Z if n <= Z, else 0 (Bu et al. 2021). Gradients keep their proportions or are dropped.

    Args:
        cutoff: Z, the norm beyond which a sample is dropped. A policy may move it.
    """

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return (1 / thresholds).masked_fill(~(norms <= thresholds), 0)


@dataclass(frozen=True)
class GlobalAdapt(_Global):
    """C / Z if n <= Z, else C / n (DPSGD-Global-Adapt, Esipova et al. 2023).

    Args:
        cutoff: Z, the norm beyond which a sample is clipped. A policy may move it.
    """

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return 1 / norms.maximum(thresholds)

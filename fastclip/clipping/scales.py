"""Scale functions s(n; C): what a sample of norm n is multiplied by.

Every function obeys s(n; C) * n <= sensitivity(C) for all n >= 0, 0 included. `normalized=True`
divides the scales by the sensitivity, which becomes 1 (De et al. 2022): the learning rate no longer
moves with C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fastclip.checks import between, keep
from fastclip.clipping.policy import SMALLEST, threshold


class ScaleFunction(Protocol):
    """s(n; C), a frozen value."""

    @property
    def normalized(self) -> bool:
        """Scales are divided by the sensitivity of the sum, which is then 1."""

    @property
    def cutoff(self) -> float | None:
        """Z of the global functions, which the threshold policy moves in the place of C."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        """Scales for norms n and thresholds C, broadcast against each other."""

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        """The largest s(n; C) * n, for every threshold."""


class _Clip:
    """Functions whose sensitivity is the threshold itself."""

    cutoff: ClassVar[float | None] = None

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        return thresholds


@dataclass(frozen=True)
class Hard(_Clip):
    """min(1, C / n): Abadi et al. 2016; with `normalized`, min(1 / C, 1 / n): De et al. 2022."""

    normalized: bool = False

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        # C / max(n, C) is min(1, C / n) without a division by zero; C = 0 is refused on entry.
        return thresholds / norms.maximum(thresholds)


@dataclass(frozen=True)
class Tanh(_Clip):
    """tanh(C / (n + eps)): SoftAdaClip (Soleymani et al.), section 3.

    Larger gradients keep larger norms, below C. s * n < C because tanh(x) < x.
    """

    eps: float = 1e-6
    normalized: bool = False

    def __post_init__(self) -> None:
        keep(self, eps=between("eps", self.eps, SMALLEST / 2, math.inf))

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return torch.tanh(thresholds / (norms + self.eps))


@dataclass(frozen=True)
class Automatic(_Clip):
    """C / (n + gamma): AUTO-S, Bu et al. 2023. C only scales the step; gamma keeps n = 0 legal."""

    gamma: float = 0.01
    normalized: bool = False

    def __post_init__(self) -> None:
        keep(self, gamma=between("gamma", self.gamma, SMALLEST / 2, math.inf))

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return thresholds / (norms + self.gamma)


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
    """C / Z if n <= Z, else 0: Bu et al. 2021. Gradients keep their proportions or are dropped.

    Args:
        cutoff: Z, the norm beyond which a sample is dropped; a policy may move it.
    """

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return (1 / thresholds).masked_fill(~(norms <= thresholds), 0)


@dataclass(frozen=True)
class GlobalAdapt(_Global):
    """C / Z if n <= Z, else C / n: DPSGD-Global-Adapt, Esipova et al. 2023.

    Args:
        cutoff: Z, the norm beyond which a sample is clipped; a policy may move it.
    """

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return 1 / norms.maximum(thresholds)

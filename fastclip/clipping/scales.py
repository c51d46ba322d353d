"""Scale functions s(n; C): what a sample of norm n is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ScaleFunction(Protocol):
    """s(n; C) with s(n; C) * n <= sensitivity(C) for every n, 0 included."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        """Scales for norms n and thresholds C, broadcast against each other."""

    def sensitivity(self, threshold: Tensor) -> Tensor:
        """The largest s(n; C) * n."""


@dataclass(frozen=True)
class Hard:
    """min(1, C / n): Abadi et al. 2016."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        # C / max(n, C) is min(1, C / n) without a division by zero; C = 0 is refused on entry.
        return thresholds / norms.maximum(thresholds)

    def sensitivity(self, threshold: Tensor) -> Tensor:
        return threshold

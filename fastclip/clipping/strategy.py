"""A clipping strategy: what turns per-sample norms into scales, and says how sensitive the sum is.

A strategy is a frozen value of independent choices. It knows tensors of norms, not layers. All of
it stays on the device of the norms: nothing here may synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastclip.clipping.scales import Hard, ScaleFunction
from fastclip.clipping.thresholds import Constant, ThresholdPolicy


@dataclass(frozen=True)
class Clipping:
    """Scale function x threshold policy.

    Formal guarantee: for thresholds C held fixed over a logical batch, adding or removing one
    sample changes the sum of scale_i * g_i by at most `sensitivity(C)` in Euclidean norm, in the
    arithmetic in use (the scales carry a slack for rounding).
    """

    scale: ScaleFunction = field(default_factory=Hard)
    threshold: ThresholdPolicy = field(default_factory=Constant)

    def scales(self, norm_sq: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Scales of the samples.

        Args:
            norm_sq: squared norms of each parameter tensor's per-sample gradients, [l, b].
            thresholds: C, a scalar; [l] for a per-layer policy.

        Returns:
            Scales, [b], or [l, b] for a per-layer policy; and the raw norms [b] of the whole
            gradient. A sample whose norm is not finite gets scale 0 everywhere.
        """
        total = norm_sq.sum(0).sqrt()  # [b]
        norms = norm_sq.sqrt() if self.threshold.per_layer else total
        columns = thresholds[:, None] if self.threshold.per_layer else thresholds
        scales = self.scale(norms, columns.to(norms.dtype)) * (1 - slack(norms.dtype))
        return scales.masked_fill(~torch.isfinite(total), 0), total

    def sensitivity(self, thresholds: Tensor) -> Tensor:
        """L2 sensitivity S of the clipped sum for thresholds held fixed, a scalar tensor."""
        return self.scale.sensitivity(self.threshold.bound(thresholds))


def slack(dtype: torch.dtype) -> float:
    """Relative room left below the threshold for the rounding of norms, products and sums.

    float32 norms here err by about 1e-7 and a scaled gradient by one more rounding; 2^-20 covers
    both with room. Half-precision inputs are accumulated in float32, so it serves them too.
    """
    return 2.0**-40 if dtype == torch.float64 else 2.0**-20

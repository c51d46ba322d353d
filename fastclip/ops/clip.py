"""From squared norms to scales and counts, and from noisy counts to the next thresholds.

The arithmetic belongs to the strategy (fastclip.clipping), which is handed in; a kernel that knows
the strategy's parts does the same in one launch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastclip.ops.dispatch import operation


@operation
def clip_scale(
    norm_sq: Tensor, strategy: Any, state: Any, groups: Tensor | None = None,
    layers: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scales of a physical batch, and its raw norms; adds its raw counts.

    Args:
        norm_sq: squared norms of the parameters that took part, [l, b].
        strategy: a fastclip.clipping.Clipping. state: its Thresholds, on the same device.
        groups: int64 [b], -1 for a row that neither counts nor contributes.
        layers: rows of a per-layer state that `norm_sq` holds, int64 [l].
        counts: the logical batch's raw counts so far, float64; None counts nothing.

    Returns:
        Scales [b], or [l, b] for a per-layer policy, and norms [b], in the type of `norm_sq`.
    """
    norms = norm_sq.sum(0).sqrt()  # [b]
    layer_norms = norm_sq.sqrt() if strategy.threshold.per_layer else None
    scales = strategy.scales(norms, state, groups, layer_norms, layers)
    if counts is not None:
        counts += strategy.threshold.count(norms, state, groups)
    return scales, norms


@operation
def threshold_step(
    counts: Tensor, noise: Tensor | None, policy: Any, state: Any, batch_size: float, step: int
) -> tuple[Tensor, Any]:
    """Noisy counts and the next state, once per logical batch.

    Args:
        counts: raw counts, float64. noise: what is added to them, of the same shape, or None.
        policy: a fastclip.clipping.ThresholdPolicy. state: its Thresholds.
        batch_size: the public expected one, B. step: number of real steps before this one.
    """
    noisy = counts.clone() if noise is None else counts + noise
    return noisy, policy.move(state, noisy, batch_size, step)

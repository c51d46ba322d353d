"""Per-sample gradients of the affine parameters of normalisation layers, without x_hat in memory.

Each is two reductions, sum g*x and sum g, combined with the statistics saved by the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.ops.numerics import widen
from fastclip.ops.precision import in_full_float32


@in_full_float32
def layer_norm_grads(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias gradients of LayerNorm.

    Args:
        x: input, [b, t, c]. g: gradient of the output, [b, t, c].
        mean: [b, t]. rstd: [b, t], reciprocal standard deviation.

    Returns:
        Per-sample weight gradients [b, c] and bias gradients [b, c].
    """
    x, g, mean, rstd = widen(x), widen(g), widen(mean), widen(rstd)
    rows = torch.stack((mean * rstd, torch.ones_like(rstd)), dim=1)  # [b, 2, t]
    sums = torch.bmm(rows, g)  # [b, 2, c]
    scaled = torch.bmm(rstd[:, None], g * x)[:, 0]  # [b, c]
    return scaled - sums[:, 0], sums[:, 1]


@in_full_float32
def rms_norm_grads(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    """Weight gradient of RMSNorm for x, g [b, t, c] and rstd [b, t]: [b, c]."""
    return torch.bmm(widen(rstd)[:, None], widen(g) * widen(x))[:, 0]


@in_full_float32
def group_norm_grads(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias gradients of GroupNorm (InstanceNorm: one channel a group).

    Args:
        x: input, [b, c, t]. g: gradient of the output, [b, c, t].
        mean: [b, k]. rstd: [b, k], of the k groups of channels.

    Returns:
        Per-sample weight gradients [b, c] and bias gradients [b, c].
    """
    x, g = widen(x), widen(g)
    bias = g.sum(2)
    b, c, t = x.shape
    # Dot products as a batched product: g * x is never in memory.
    product = torch.bmm(g.reshape(b * c, 1, t), x.reshape(b * c, t, 1)).view(b, c)
    groups = (b, mean.shape[1], c // mean.shape[1])
    centred = product.view(groups) - widen(mean)[:, :, None] * bias.view(groups)
    return (centred * widen(rstd)[:, :, None]).view(b, c), bias

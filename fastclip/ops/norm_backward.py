"""Backward of normalisation layers: gradient of the input, and per-sample affine gradients.

Index letters: b sample, t position (pixel), c channel or feature, k group of channels. A kernel
gives all results from one read of x and g, as PyTorch's own backward of GroupNorm does for float32 and
float64 statistics; else that is asked for the input's gradient only, beside the per-sample reductions
of norm_affine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.ops.dispatch import operation
from fastclip.ops.norm_affine import group_norm_grads, layer_norm_grads, rms_norm_grads
from fastclip.ops.numerics import widen


@operation
def layer_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """LayerNorm: y = (x - mean) * rstd * w + b over c.

    Args:
        x: input, [b, t, c]. g: gradient of the output, [b, t, c].
        mean: [b, t]. rstd: [b, t], reciprocal standard deviation.
        weight: [c], or None for ones.
        need_input: whether the gradient of x is wanted.

    Returns:
        The gradient of x in x's type, or None; per-sample weight gradients [b, c]; per-sample bias
        gradients [b, c].
    """
    dw, db = layer_norm_grads(x, g, mean, rstd)
    if not need_input:
        return None, dw, db
    # PyTorch's kernels read statistics and weight as if they were contiguous.
    mean, rstd = mean.contiguous().unsqueeze(2), rstd.contiguous().unsqueeze(2)
    dx = torch.ops.aten.native_layer_norm_backward(
        g, x, [x.shape[2]], mean, rstd, weight, None, [True, False, False]
    )[0]
    return dx, dw, db


@operation
def rms_norm_backward(
    x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor]:
    """RMSNorm: y = x * rstd * w over c, with rstd = (mean of x^2 + eps)^(-1/2), [b, t].

    Arguments as for `layer_norm_backward`.

    Returns:
        The gradient of x in x's type, or None; per-sample weight gradients [b, c].
    """
    dw = rms_norm_grads(x, g, rstd)
    if not need_input:
        return None, dw
    scale = widen(rstd).unsqueeze(2)
    normalized = widen(x) * scale
    weighted = widen(g) if weight is None else widen(g) * weight
    mean = (normalized * weighted).mean(2, keepdim=True)
    return (scale * (weighted - normalized * mean)).to(x.dtype), dw


@operation
def group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """GroupNorm: y = (x - mean) * rstd * w + b, statistics over the c/k channels of a group.

    Args:
        x: input, [b, c, t]. g: gradient of the output, [b, c, t], which may have another type.
        mean: [b, k]. rstd: [b, k]; InstanceNorm has one channel a group.
        weight: [c], or None for ones.
        need_input: whether the gradient of x is wanted.

    Returns:
        As `layer_norm_backward`.
    """
    dtype = x.dtype
    mixed = x.device.type == "cpu" and weight is not None and weight.dtype == mean.dtype
    if g.dtype != dtype or (mean.dtype != dtype and not mixed):  # PyTorch's kernels want one type
        x, g, mean, rstd = widen(x), widen(g), widen(mean), widen(rstd)
        weight = None if weight is None else widen(weight)
    # PyTorch's kernels read everything as if it were contiguous.
    x, g, mean, rstd = x.contiguous(), g.contiguous(), mean.contiguous(), rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    b, c, t = x.shape
    if need_input and x.numel() and mean.dtype == widen(mean).dtype:
        # The samples' channels as channels of one sample: sums over samples have one term each.
        ones = mean.new_ones(c) if weight is None else weight
        dx, dw, db = torch.ops.aten.native_group_norm_backward(
            g.view(1, b * c, t), x.view(1, b * c, t), mean.view(1, -1), rstd.view(1, -1),
            ones.repeat(b), 1, b * c, t, mean.numel(), [True, True, True],
        )  # fmt: skip
        return dx.view(b, c, t).to(dtype), dw.view(b, c), db.view(b, c)
    dw, db = group_norm_grads(x, g, mean, rstd)
    if not need_input:
        return None, dw, db
    dx = torch.ops.aten.native_group_norm_backward(
        g, x, mean, rstd, weight, b, c, t, mean.shape[1], [True, False, False]
    )[0]
    return dx.to(dtype), dw, db

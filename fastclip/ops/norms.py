"""Normalization layers: forward, backward, and per-sample gradients of their affine parameters.

Each is two reductions, sum g*x and sum g, combined with the statistics saved by the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.core.numerics import in_full_float32, widen
from fastclip.ops.dispatch import operation


@in_full_float32
def layer_norm_grads(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight and bias gradients of LayerNorm.

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
    """Returns weight gradients of RMSNorm for x, g [b, t, c] and rstd [b, t]: [b, c]."""
    return torch.bmm(widen(rstd)[:, None], widen(g) * widen(x))[:, 0]


@in_full_float32
def group_norm_grads(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight and bias gradients of GroupNorm (InstanceNorm: one channel per group).

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
    centered = product.view(groups) - widen(mean)[:, :, None] * bias.view(groups)
    return (centered * widen(rstd)[:, :, None]).view(b, c), bias


# -------------------------------------------------------------------------------------------------
# Forward of GroupNorm: the one normalization whose memory format PyTorch changes on a GPU.


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> bool:
    """Whether the channels of x [b, c, *space], and only they, are adjacent in memory."""
    form = _LAST.get(x.dim())
    return form is not None and x.is_contiguous(memory_format=form) and not x.is_contiguous()


@operation
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, k: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w + b, statistics over the c/k channels of a group and all positions.

    Args:
        x: input, [b, c, *space]. weight, bias: [c], or None for ones, zeros.
        k: groups of channels; InstanceNorm has one channel per group. eps: added to the variance.
        dtype: of y. x is cast to it first, without a copy if a kernel is used.

    Returns:
        y like x, channels-last if a kernel was used; mean [b, k]; rstd [b, k], the reciprocal
        standard deviation.
    """
    x = x.to(dtype)
    if x.device.type != "cpu" or not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # PyTorch's kernels read all others as if they were
    b, c = x.shape[:2]
    size = x.shape[2:].numel()
    return torch.native_group_norm(x, weight, bias, b, c, size, k, eps)


# -------------------------------------------------------------------------------------------------
# Backward of normalization layers: gradient of the input, and per-sample affine gradients.
#
# Index letters: b sample, t position (pixel), c channel or feature, k group of channels. A kernel
# gives all results from one read of x and g, as PyTorch's own backward of GroupNorm does for
# float32 and float64 statistics. Otherwise PyTorch computes only the input's gradient, in addition
# to the per-sample reductions.


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
        mean: [b, k]. rstd: [b, k]; InstanceNorm has one channel per group.
        weight: [c], or None for ones.
        need_input: whether the gradient of x is wanted.

    Returns:
        As `layer_norm_backward`.
    """
    dtype = x.dtype
    mixed = x.device.type == "cpu" and weight is not None and weight.dtype == mean.dtype
    if g.dtype != dtype or (mean.dtype != dtype and not mixed):  # PyTorch's kernels need one type
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

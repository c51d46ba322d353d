"""Forward of GroupNorm: the one normalisation whose memory format PyTorch changes on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.ops.dispatch import operation

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> bool:
    """Whether the channels of x [b, c, *space] lie side by side in memory, and only they."""
    form = _LAST.get(x.dim())
    return form is not None and x.is_contiguous(memory_format=form) and not x.is_contiguous()


@operation
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, k: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w + b, statistics over the c/k channels of a group and all positions.

    Args:
        x: input, [b, c, *space]. weight, bias: [c], or None for ones, zeros.
        k: groups of channels; InstanceNorm has one channel a group. eps: added to the variance.
        dtype: of y: what x is cast to first, without a copy where a kernel serves.

    Returns:
        y like x, channels-last where a kernel served; mean [b, k]; rstd [b, k], the reciprocal
        standard deviation.
    """
    x = x.to(dtype)
    if x.device.type != "cpu" or not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # PyTorch's kernels read all others as if they were
    b, c = x.shape[:2]
    size = x.shape[2:].numel()
    return torch.native_group_norm(x, weight, bias, b, c, size, k, eps)

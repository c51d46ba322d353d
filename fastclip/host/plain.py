"""Tensors that a loop for the CPU may write to, or read beside those."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.memory import lies_on_host


def is_written_to(out: Tensor) -> bool:
    """float32 in memory, one number behind the other, whose graph nobody asks for."""
    floats = type(out) is Tensor and out.dtype == torch.float32 and out.numel() > 0
    ours = floats and lies_on_host(out) and out.is_contiguous()
    return ours and not (out.is_inference() or out.requires_grad)


def lies_alike(out: Tensor, total: Tensor | None) -> bool:
    """A loop can read this total beside what it writes."""
    if total is None:
        return False
    same = total.dtype == torch.float32 and total.shape == out.shape
    return same and lies_on_host(total) and total.is_contiguous()

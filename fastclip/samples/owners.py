"""Gradients in which those of sample i are scaled by a power of two of its own.

A backward pass is linear, and a power of two scales without rounding. So where two passes start from the
same gradients, once as they are and once scaled, every entry that follows from sample i alone comes out
exactly so many times as large; an entry that follows from two samples does not. An entry without a
gradient belongs to nobody, and contributes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1


def coded_by(gradient: Tensor, axis: int, digits: Tensor) -> Tensor:
    """`gradient` with entry i of the axis times 2^digits[i]; digits is [size of the axis]."""
    shape = [1] * gradient.dim()
    shape[axis] = -1
    factor = torch.exp2(digits.to(torch.float32)).to(gradient.device, gradient.dtype)
    return gradient * factor.view(shape)

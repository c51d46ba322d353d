"""Whether values of two runs agree but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far values of one row may differ, relative to the largest of the tensor: a kernel may add up in
another order where another row is longer."""
OTHER_BATCH = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The same in batches of another size, or at another place: parts of a float64 model may compute in
float32."""
_MASKS, _BELOW = 1e4, 1e3
"""A mask writes numbers as large as that, beside which all others are so many times smaller."""


def close(first: Tensor, second: Tensor, allowed: dict[torch.dtype, float]) -> bool:
    if torch.equal(first, second):  # most are
        return True
    if not first.is_floating_point() and not first.is_complex():
        return False
    # 16-bit roundings of sums that differ in their last bit: influence sees what is smaller
    dtype = first.dtype.to_real()
    tolerance = allowed.get(dtype, 4 * torch.finfo(dtype).eps)
    known = torch.isfinite(first)
    if not torch.equal(known, torch.isfinite(second)):
        return False
    one, other = _unmasked(first[known], second[known])
    return not one.numel() or bool(
        (one - other).abs().max() <= tolerance * torch.maximum(one.abs().max(), other.abs().max())
    )


def _unmasked(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Without what a mask has written, which is so large that nothing else would show beside it."""
    sizes = one.abs()
    largest = sizes.amax() if len(one) else 0.0
    if largest < _MASKS:
        return one, other
    rest = (sizes < largest) | (one != other)
    apart = bool((torch.maximum(sizes, other.abs())[rest] <= largest / _BELOW).all())
    return (one[rest], other[rest]) if apart else (one, other)

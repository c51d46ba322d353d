"""Whether values of two runs agree but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.samples.place import Place
from fastclip.samples.taint import DOUBLE, SINGLE

VALUES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far values of one row may differ, relative to the largest of the tensor: a kernel may add up in
another order where another row is longer."""
OTHER_BATCH = {torch.float64: 1e-5, torch.float32: 1e-3}
"""The same in batches of another size, or at another place: parts of a float64 model may compute in
float32."""
_IN_DOUBLE = {torch.float64: 1e-11}
"""The same, where none does."""

_MASKS, _BELOW = 1e4, 1e3
"""A mask writes numbers as large as that, beside which all others are so many times smaller."""


def tolerances(rounding: float, in_single: dict[torch.dtype, float]) -> dict[torch.dtype, float]:
    """By what kernels of other sizes differ, where the coarsest type in use rounds so."""
    if rounding > SINGLE:
        return dict.fromkeys(in_single, 4 * rounding)
    return _IN_DOUBLE if rounding == DOUBLE else in_single


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


def agree(
    one: Tensor, other: Tensor, kept: list[int], place: Place, sizes: tuple[int, int],
    allowed: dict[torch.dtype, float],
) -> bool:  # fmt: skip
    """Whether the kept rows of both, which hold so many each, are the same, as far as both are long."""
    if one.dim() != other.dim() or not (place.fits(one, sizes[0]) and place.fits(other, sizes[1])):
        return True
    one, other = place.rows(one, sizes[0]), place.rows(other, sizes[1])
    # Another row may be longer and pad this one: what both have must agree.
    common = [slice(min(n, m)) for n, m in zip(one.shape, other.shape, strict=True)]
    common[0] = slice(None)
    index = torch.tensor(kept, dtype=torch.int64, device=one.device)
    first, second = (x[tuple(common)].index_select(0, index) for x in (one, other))
    return close(first, second, allowed)

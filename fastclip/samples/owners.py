"""Whose an entry is, read from gradients: those of sample i are scaled by a power of two of its own.

A backward pass is linear, and a power of two scales without rounding. So where two passes start from the
same gradients, once as they are and once with those of sample i times 2^(i - k), every entry that
follows from sample i alone comes out exactly so many times as large; an entry that follows from two
samples does not. An entry without a gradient belongs to nobody, and contributes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastclip.samples.place import Place

NOBODY, MIXED = -1, -2

_EXACT = {
    torch.float64: 1e-13, torch.complex128: 1e-13, torch.float32: 1e-6, torch.complex64: 1e-6,
}  # fmt: skip
"""What of a gradient, relative to the largest, may be rounding: a maximum that is subtracted for
safety leaves some."""
_COARSE = 1e-4
_AT_ONCE, _AT_ONCE_ON_A_GPU = 2**16, 2**22
"""Entries that are looked at together: each takes some 60 bytes meanwhile, and each part a dozen
launches, of which a GPT-2's logits would need ten thousand of the first size."""


def coded_by(gradient: Tensor, axis: int, digits: Tensor) -> Tensor:
    """`gradient` with entry i of the axis times 2^digits[i]; digits is [size of the axis]."""
    shape = [1] * gradient.dim()
    shape[axis] = -1
    factor = torch.exp2(digits.to(torch.float32)).to(gradient.device, gradient.dtype)
    return gradient * factor.view(shape)


def owners(plain: Tensor, scaled: Tensor, samples: int, *, coarse: bool = False) -> Tensor:
    """The sample of every entry, int8 in the tensor's shape; NOBODY; MIXED: of several.

    Args:
        plain, scaled: gradients of the two passes: as they are, and with those of sample i times
            2^(i - samples // 2). samples: how many there are, at most 16. coarse: some of what they
            went through was float16, whose small numbers do not scale exactly.
    """
    tolerance = _COARSE if coarse else _EXACT.get(plain.dtype, _COARSE)
    pairs = list(zip(_parts(plain), _parts(scaled), strict=True))
    if not pairs:
        return torch.empty(plain.shape, dtype=torch.int8, device=plain.device)
    largest = torch.stack([_wide(part).abs().amax() for _, part in pairs]).amax()
    # smaller numbers than the type's normal ones are rounded when they are scaled
    room = (tolerance * largest).clamp_min(torch.finfo(plain.dtype).tiny)
    found = [_owners(_wide(x), _wide(y), samples, room) for x, y in pairs]
    return torch.cat(found).view(plain.shape)


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    size = _AT_ONCE if x.device.type == "cpu" else _AT_ONCE_ON_A_GPU
    return x.detach().reshape(-1).split(size) if x.numel() else ()


def _wide(x: Tensor) -> Tensor:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return x.to(wide).nan_to_num(0.0, 0.0, 0.0)


def _owners(plain: Tensor, scaled: Tensor, samples: int, room: Tensor) -> Tensor:
    """`owners` of some entries, where `room` is what rounding may have left."""
    middle = samples // 2
    digit = (scaled / plain).abs().log2().nan_to_num(0.0, 0.0, 0.0).round() + middle
    inside = (digit >= 0) & (digit < samples)
    digit = digit.clamp(0, samples - 1)
    agrees = (scaled - plain * (digit - middle).exp2()).abs() <= room
    # what rounding alone may have left is nobody's, whatever its ratio
    silent = (scaled.abs() <= room) & (plain.abs() <= room)
    found = torch.where(inside & agrees, digit.to(torch.int8), MIXED)
    return found.masked_fill(silent, NOBODY)


def agrees(place: Place, owner: Tensor, samples: int) -> bool:
    """Whether the samples may be at `place`, as far as a map of owners knows."""
    if not place.fits(owner, samples):
        return False
    wanted = place.owners(owner.shape[place.axis], samples, owner.device)
    view = [1] * owner.dim()
    view[place.axis] = -1
    return bool(((owner == wanted.view(view)) | (owner == NOBODY)).all())

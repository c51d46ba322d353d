"""Random bits to normal variables: Box and Muller (1958), safe at the edges, guarded if asked.

A pair of normals is r cos(pi t), r sin(pi t) with r = sqrt(-2 log u), u in (0, 1] and t in [-1, 1],
each made of a whole word, so that u is never 0 and the largest value is that of the smallest u.
csrc/cuda/normal.cuh makes the same normals of the same words, up to rounding; it says more of edges.

| word | smallest u | largest normal |
|---|---|---|
| 32 bits, float32 | 2^-33 | 6.76 |
| 64 bits, float64 | 2^-65 | 9.49 |

The guard (Holohan and Braghin 2021, section 5.1, as Opacus has it) makes each value half the sum of four
independent normals: one floating-point normal takes few of the numbers near it, and which ones are
missing can tell the sum it was added to (Mironov 2012, Jin et al. 2022).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 65_536
"""Values at a time: words, radii and angles stay in the cache."""
GUARD = 4


class Bits(Protocol):
    """A source of uniform words."""

    def fill(self, words: Tensor) -> None:
        """Overwrite a contiguous CPU tensor with random bits."""


def fill_normal(out: Tensor, std: float, bits: Bits, *, guarded: bool) -> None:
    """Fill a contiguous CPU tensor, float32 or float64, with N(0, std^2).

    Args:
        out: filled in place. std: of every value. bits: where the words come from.
        guarded: every value is half the sum of four normals, of four pairs.
    """
    if not out.numel():
        return
    terms = GUARD if guarded else 1
    parts = out.view(-1).split(CHUNK // terms)
    pairs = _Pairs(terms * _half(parts[0]), out.dtype, bits)
    try:
        for part in parts:
            half = _half(part)
            normals = pairs.draw(terms * half).view(2, terms, half)  # cosines, sines
            values = normals.sum(1) if guarded else normals
            torch.mul(values.reshape(-1)[: len(part)], std / math.sqrt(terms), out=part)
            if guarded:
                values.zero_()
    finally:
        pairs.erase()


def _half(part: Tensor) -> int:
    return (len(part) + 1) // 2


class _Pairs:
    """Buffers for at most `size` pairs, used again and again."""

    def __init__(self, size: int, dtype: torch.dtype, bits: Bits) -> None:
        self.bits = bits
        wide = dtype == torch.float64
        self.words = torch.empty(2 * size, dtype=torch.int64 if wide else torch.int32, device="cpu")
        self.unsigned = torch.uint64 if wide else torch.uint32
        self.unit = 2.0**-63 if wide else 2.0**-31  # of a signed word
        self.buffers = torch.empty(4, size, dtype=dtype, device="cpu")

    def draw(self, count: int) -> Tensor:
        """The next `count` pairs, [2, count]: cosines and sines; the next call overwrites them."""
        words = self.words[: 2 * count]
        self.bits.fill(words)
        radius, angle = self.buffers[2, :count], self.buffers[3, :count]
        # The largest words round to u = 1, where log u = 0; the smallest u is half a unit.
        radius.copy_(words[:count].view(self.unsigned)).add_(0.5).mul_(self.unit / 2)
        radius.log_().mul_(-2).sqrt_()
        angle.copy_(words[count:]).add_(0.5).mul_(math.pi * self.unit)
        values = self.buffers.view(-1)[: 2 * count].view(2, count)
        torch.cos(angle, out=values[0])
        torch.sin(angle, out=values[1])
        return values.mul_(radius)

    def erase(self) -> None:
        """Whoever reads this memory later must not find the noise."""
        self.words.zero_()
        self.buffers.zero_()

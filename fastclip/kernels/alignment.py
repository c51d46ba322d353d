"""Copies of operands whose rows do not lie as wide loads need them.

A row of a vocabulary's gradient (p = 50257) begins at any even address, so that its bfloat16 values are
loaded 2 bytes at a time, which tensor cores wait for: asynchronous copies have at least 4, and pay
with 16. Where an operand is read again and again, one copy with the features filled up with zeros is
less than that. Zeros change no norm and no product, and bounds for more features hold for fewer.

What Triton knows of a number is whether 16 divides it, so that is what is asked of strides and sizes.
Index letters: b sample, t position, n feature.
"""

from __future__ import annotations

from torch import Tensor

WIDE = 16
"""Divides the strides, sizes and addresses that 16-byte loads need."""
READS = 4
"""Loads of an operand from which a copy, which reads it once and writes it once, is worth it."""
LEAST = 1 << 20
"""Bytes below which an operand stays in the cache, and a launch costs more than its loads."""
ROOM = 1 << 28
"""Bytes of copies at a time."""


def is_wide(x: Tensor) -> bool:
    """Whether 16 bytes of x [b, t, n] can be loaded at once, along n or along t."""
    (_, t, n), (b_stride, t_stride, n_stride) = x.shape, x.stride()
    along_n = n_stride == 1 and not (n % WIDE or t_stride % WIDE)
    along_t = t_stride == 1 and not (t % WIDE or n_stride % WIDE)
    return (along_n or along_t) and not (b_stride % WIDE or x.data_ptr() % WIDE)


def to_copy(x: Tensor, reads: int) -> int:
    """Bytes of `aligned(x)` if x [b, t, n], which is loaded `reads` times, is worth a copy, or 0.

    float32 operands are not: their exact products take longer than their loads.
    """
    size = x.numel() * x.element_size()
    return 0 if x.element_size() != 2 or reads < READS or size < LEAST or is_wide(x) else size


def aligned(x: Tensor) -> Tensor:
    """A copy of x [b, t, n] with zeros up to the next n that `WIDE` divides, [b, t, n']."""
    b, t, n = x.shape
    copy = x.new_empty(b, t, -(-n // WIDE) * WIDE)
    copy[..., :n] = x
    copy[..., n:] = 0
    return copy


def stretches(n: int, size: int, step: int = 1) -> list[slice]:
    """0 to n in parts of about `ROOM` of `size` bytes, cut where `step` divides.

    >>> stretches(5, 2 * ROOM)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    parts = max(1, -(-size // ROOM))
    length = -(-n // (parts * step)) * step
    return [slice(start, min(n, start + length)) for start in range(0, n, length)]

"""How products are multiplied on tensor cores, and what of a norm that can hide."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastclip.ops.numerics import GRAM_ERROR_FACTOR, lost_squares, slack
from fastclip.ops.precision import user_allows_tf32

UNIT = 2.0**-24
"""u of float32, in which everything accumulates."""
STEP = 32
"""Terms of an exact float32 product between two additions to its accumulator."""
TILE_SUM = 16
"""Error of one sign, in u, of a tile's own sum: a thread adds up to 64 terms."""
CHUNK = 4096
"""Features after which a tile starts a new sum (vocabularies), so that its error stays small."""


def product_mode(x: Tensor, y: Tensor) -> str:
    """How x and y are multiplied: "native" (16-bit tensor cores), "ieee" or "tf32x3".

    tf32 rounds by up to 2^-11, which neither a useful bound nor the slack of the scales (2^-18)
    covers; where the user allows it, three tf32 products that together keep 21 bits take its place.
    """
    if x.dtype == y.dtype and x.dtype != torch.float32:
        return "native"
    return "tf32x3" if by_tf32(x, y) else "ieee"


def by_tf32(x: Tensor, y: Tensor) -> bool:
    """All that `product_mode` of x, y and themselves depends on, but for their types."""
    return torch.float32 in (x.dtype, y.dtype) and user_allows_tf32()


def one_sided(n: int, mode: str) -> tuple[float, float]:
    """(m, w): largest error of one sign, in u, of an accumulated sum of n products.

    m: where the products have one sign, relative to their sum. w: where they cancel, relative to n
    and to the norms of the factors. A model of the A100 (8 products a step, one guard bit) loses up
    to 0.22 n and 0.02 n, of the H100 less; float32 products are rounded, `STEP` at a time.
    """
    if mode == "native":
        return n / 4, 1 / 32
    if mode == "tf32x3":  # 4 products a step, and 2^-21 that no product holds
        return n / 2 + 8, 1 / 16
    return (min(n, STEP) + n / STEP) / 4, 0.0


def summed(t: int) -> float:
    """How far a clipped sum of t positions of one sign can come out high, in u of its squared norm.

    Of float32 products, which tensor cores truncate; beyond half of the room that scales leave, which
    covers up to 3,072 positions.
    """
    room = slack(torch.float32) / UNIT / 2
    return 2 * max(0.0, one_sided(t, "ieee")[0] - room)


@functools.lru_cache(maxsize=1024)
def gram_coefficients(
    t: int, sizes: tuple[int, ...], modes: tuple[frozenset[str], ...]
) -> tuple[float, ...]:
    """The bounds of a product of Grams, in the order of ghost_norm's `_raised`.

    Args:
        t: positions. sizes: d and p. modes: in which inputs, and gradients, are multiplied.
    """
    errors = []
    for n, kinds in zip(sizes, modes, strict=True):
        length = min(n, CHUNK)
        m, w = (max(one_sided(length, mode)[k] for mode in kinds) for k in (0, 1))
        errors.append((m + n / CHUNK, w * length))
    (m_k, w_k), (m_h, w_h) = errors
    alike = m_k + m_h + TILE_SUM + summed(t)
    rounding = [UNIT * x for x in (GRAM_ERROR_FACTOR, alike, w_k, w_h)]
    return (*rounding, *(lost_squares(t * n, torch.float32) for n in (*sizes, t)))

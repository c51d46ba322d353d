"""Accumulation type, rounding bounds and masks shared by the reference operations.

Index letters: b sample, t position, d input feature, p output feature.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fastclip._torch import base_of, followed

_ROW_CHUNK = 1024
_ALIVE: ContextVar[Tensor | None] = ContextVar("alive", default=None)
"""Scales of which none is 0."""
GRAM_ERROR_FACTOR = 2.0
"""c of a Gram norm's rounding bound c * u * ||A||^2 * ||G||^2, where little cancels."""
CANCELLED_ERROR_FACTOR = 6.0
"""The same where nearly all cancels: 3.98 is the most that was measured, at two nearly parallel
positions of 64 features (256: 1.5, 2048: 2.3)."""
CANCELLATION = 30.0
"""||A||^2 ||G||^2 over t times the squared norm, at which c is halfway between the two. Of t unrelated
positions it is about 1, and a bound of c = 6 would raise their norms by 3 u t for nothing."""
PRODUCT_ERROR_FACTOR = 1.0
"""c of a product's rounding bound c * u * ||A|| * ||G|| (0.006 is the most that was measured)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 and complex numbers stay as they are; everything else accumulates in float32."""
    return dtype if dtype == torch.float64 or dtype.is_complex else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in its accumulation type: itself, where it is already."""
    dtype = x.dtype
    return x if dtype is torch.float32 else x.to(accumulation_dtype(dtype))


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim` in the accumulation type, without a copy of `x` in it."""
    return x.sum(dim, dtype=accumulation_dtype(x.dtype))


def shaped(x: Tensor, *shape: int) -> Tensor:
    """`x` in this shape; most are in it, and a view takes longer than a look."""
    return x if x.shape == shape else x.reshape(shape)


def laid_out_as(x: Tensor, parameter: Tensor) -> Tensor:
    """`x` with the strides of a parameter of its shape, as autograd lays out gradients.

    Fused optimizers walk through the memory of a parameter and of its gradient side by side. Of a
    parameter whose elements share memory, or leave gaps in it, autograd's gradient is dense, and so is
    this.

    Returns:
        `x` itself where it has these strides.
    """
    if x.stride() == parameter.stride():
        return x
    out = torch.empty_like(parameter.detach(), dtype=x.dtype, device=x.device)
    return out.copy_(x)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff u of the accumulation type of `dtype`."""
    return torch.finfo(accumulation_dtype(dtype)).eps / 2


def slack(dtype: torch.dtype) -> float:
    """Relative room left below the threshold for the rounding of norms, products and sums.

    float32 norms err by about 1e-7 on ordinary data; where all terms are equal, roundings agree in
    sign and a norm came out low by up to 3.4e-6 (measured at t = 64, d = p = 768), which 2^-18
    covers. Half-precision inputs are accumulated in float32, so it serves them too.
    """
    return 2.0**-40 if dtype == torch.float64 else 2.0**-18


def lost_squares(entries: int, dtype: torch.dtype) -> float:
    """The most that squares (and products) which underflow can hide of a sum of `entries` terms.

    A sample of tiny inputs and huge output gradients would otherwise have a norm of 0.
    """
    return entries * torch.finfo(accumulation_dtype(dtype)).tiny


@functools.lru_cache(maxsize=1024)
def _chunk(length: int) -> int:
    """Into which a row is cut: without a rest, if it can be."""
    divisors = (n for n in range(_ROW_CHUNK, _ROW_CHUNK // 8, -1) if length % n == 0)
    return next(divisors, _ROW_CHUNK)


def samples_at_once(entries: int, device: torch.device) -> int:
    """Of how many samples gradients of so many entries are computed at a time, if not kept."""
    scratch = (8 if device.type == "cpu" else 128) << 18
    return max(1, scratch // max(1, entries))


def row_norm_sq(x: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, ||x_b||^2, for x [b, ...]; returns [b].

    Long rows are reduced in chunks: a plain float32 reduction over millions of entries errs by
    1e-4 to 1e-3, this one by 1e-7. Entries that do not lie side by side would be added one after the
    other: 1,024 that are equal come out low by 2^-17, which is more than `slack`.
    """
    x = widen(x).reshape(x.shape[0], -1) if x.numel() else widen(x).reshape(x.shape[0], 0)
    length = x.shape[1]
    if length > 1 and x.stride(1) != 1:
        x = x.contiguous()
    if length <= _ROW_CHUNK:
        return torch.linalg.vector_norm(x, dim=1).square()
    chunk = _chunk(length)
    whole = length - length % chunk
    chunks = x[:, :whole].unflatten(1, (-1, chunk))
    total = torch.linalg.vector_norm(chunks, dim=2).square().sum(1)
    if whole < length:
        total = total + torch.linalg.vector_norm(x[:, whole:], dim=1).square()
    return total


def drop_zeroed(scale: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Zero the rows [b, ...] of `operands` whose scale is 0, so that 0 * inf cannot become NaN.

    On the CPU the pass over the operands is skipped when no scale is 0; on other devices it is
    always made, because looking would synchronise.
    """
    if not may_be_zero(scale):
        return operands
    dead = scale == 0
    return tuple(x.masked_fill(dead.view(-1, *[1] * (x.dim() - 1)), 0) for x in operands)


def may_be_zero(scale: Tensor) -> bool:
    """Whether one of these scales may be 0; on devices but the CPU, and in a graph, nobody looks."""
    alive = _ALIVE.get()
    if alive is not None and (scale is alive or base_of(scale) is alive):
        return False
    return scale.device.type != "cpu" or followed() or bool((scale == 0).any())


@contextmanager
def looked_at(scales: Tensor) -> Iterator[None]:
    """Inside, `drop_zeroed` need not look at these scales, or at rows of them, again.

    Only on the CPU: elsewhere it never looks.
    """
    looks = scales.device.type == "cpu" and not followed()
    alive = looks and not bool((scales == 0).any())
    before = _ALIVE.set(scales if alive else None)
    try:
        yield
    finally:
        _ALIVE.reset(before)

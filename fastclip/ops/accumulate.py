"""Clipping of materialised per-sample gradients: norms, scales and clipped sums of all parameters.

    n_b = ||(g_1b, ..., g_Lb)||    s_b = min(1, C / n_b)    S_l = sum_b s_b g_lb

and per layer the same with n_lb, s_lb and C_l. The scales are Hard's of fastclip.clipping, which the
engine's strategies build on; this module lies below them and has the formula itself.

Index letters: b sample, l parameter tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from fastclip.errors import ArgumentError
from fastclip.ops.dispatch import operation
from fastclip.ops.numerics import accumulation_dtype, row_norm_sq, slack, widen
from fastclip.ops.precision import in_full_float32

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SCRATCH = 1 << 20  # numbers of a piece that must be copied: widened, or made contiguous
_SAFE = (1e-20, 1e36)  # squared norms in which no square of float32 can have been lost


@operation
@in_full_float32
def clip_accumulate(
    grad_samples: Sequence[Tensor], thresholds: float | Tensor | Sequence[float]
) -> tuple[list[Tensor], Tensor]:
    """Clip per-sample gradients and sum them over the samples, for all parameters together.

    Formal guarantee: adding or removing one sample changes the sums, taken as one vector, by at most
    C in Euclidean norm (per layer: the l-th by at most C_l): its own contribution, as computed in
    the arithmetic in use, has at most that norm. What a sum in float32 rounds away of the others is
    not part of the guarantee.

    Args:
        grad_samples: of each parameter tensor, [b, ...]; float32, float64, float16 or bfloat16, of
            any strides.
        thresholds: C, a positive number or a scalar tensor, clips the whole gradient; C_l, a list
            of l numbers or a tensor [l], clips per layer. Tensors are not looked at.

    Returns:
        The clipped sums, one of shape [...] a parameter, float32 for 16-bit inputs and of the
        input's type for the others; and the norms, [b] or [l, b], float32, or float64 where an input
        is. A sample of which any norm is not finite contributes 0 everywhere.

    Raises:
        ArgumentError: for tensors of different batch sizes or devices, of a type that is not a
            gradient's, or thresholds that do not fit them.
    """
    if reason := mismatch(grad_samples, thresholds):
        raise ArgumentError(reason)
    b, device = len(grad_samples[0]), grad_samples[0].device
    norm_sq = torch.stack([_square_norms(g) for g in grad_samples])  # [l, b], float64
    flat = not is_per_layer(thresholds)
    if flat:
        norm_sq = norm_sq.sum(0, keepdim=True)
    norms = norm_sq.sqrt().to(norm_dtype(grad_samples))  # [l, b] or [1, b]
    if not isinstance(thresholds, Tensor):
        thresholds = torch.tensor(thresholds, dtype=torch.float64, device="cpu")
    bounds = thresholds.to(device, torch.float64, non_blocking=True)
    scales = hard_scales(norms, bounds, room(grad_samples))
    sums = [
        _weighted_sum(g, scale)
        for g, scale in zip(grad_samples, scales.expand(len(grad_samples), b), strict=True)
    ]
    return sums, norms[0] if flat else norms


def mismatch(
    grad_samples: Sequence[Tensor], thresholds: float | Tensor | Sequence[float]
) -> str | None:
    """What is wrong with the arguments of `clip_accumulate`, in one sentence, or None."""
    if not len(grad_samples):
        return "clip_accumulate expects per-sample gradients of at least one parameter, got none"
    first = grad_samples[0]
    for i, g in enumerate(grad_samples):
        if g.dtype not in TYPES:
            return f"grad_samples[{i}] expects float32, float64, float16 or bfloat16, got {g.dtype}"
        if not g.dim():
            return f"grad_samples[{i}] expects a shape [b, ...], got a scalar"
        if g.device != first.device:
            return f"grad_samples[{i}] is on {g.device}, but grad_samples[0] on {first.device}"
        if len(g) != len(first):
            return f"grad_samples[{i}] holds {len(g)} samples, but grad_samples[0] {len(first)}"
    expected = f"one threshold, or one for each of the {len(grad_samples)} parameter tensors"
    if isinstance(thresholds, Tensor):
        fits = thresholds.dim() == 0 or thresholds.shape == (len(grad_samples),)
        return None if fits else f"expected {expected}, got a tensor {list(thresholds.shape)}"
    values = numbers_of(thresholds)
    if is_per_layer(thresholds) and len(values) != len(grad_samples):
        return f"expected {expected}, got {len(values)}"
    for value in values:
        if not _number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            return f"a threshold expects a positive number, got {value!r}"
    return None


def is_per_layer(thresholds: float | Tensor | Sequence[float]) -> bool:
    """Whether there is one threshold a parameter tensor."""
    return thresholds.dim() > 0 if isinstance(thresholds, Tensor) else not _number(thresholds)


def numbers_of(thresholds: float | Sequence[float]) -> list[float]:
    """The thresholds that are there: of the whole gradient, or of each parameter tensor."""
    return [thresholds] if isinstance(thresholds, Real) else list(thresholds)  # type: ignore[arg-type, list-item]


def norm_dtype(grad_samples: Sequence[Tensor]) -> torch.dtype:
    """Of the norms: float64 where an input is, else float32."""
    wide = any(g.dtype == torch.float64 for g in grad_samples)
    return torch.float64 if wide else torch.float32


def room(grad_samples: Sequence[Tensor]) -> tuple[float, float]:
    """What bounds the scales for the coarsest arithmetic in use.

    Returns:
        1 - slack, left below the threshold for rounding (`slack`); and the
        smallest scale that is used. A subnormal one may be rounded up by more than the slack, which
        would break the bound: it counts as 0.
    """
    wide = all(g.dtype == torch.float64 for g in grad_samples)
    dtype = torch.float64 if wide else torch.float32
    return 1 - slack(dtype), torch.finfo(dtype).tiny


def hard_scales(norms: Tensor, thresholds: Tensor, bounds: tuple[float, float]) -> Tensor:
    """min(1, C (1 - slack) / n), 0 for a sample of which any norm is not finite.

    Args:
        norms: [l, b]. thresholds: [l] or a scalar. bounds: see `room`.
    """
    limit = (thresholds * bounds[0]).to(norms.dtype)
    limit = limit[:, None] if limit.dim() else limit
    scales = limit / norms.maximum(limit)
    dead = ~torch.isfinite(norms).all(0)  # [b]
    return scales.masked_fill(dead | (scales < bounds[1]), 0)


def _number(value: object) -> bool:
    return isinstance(value, Real)


def _pieces(g: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """`g` [b, ...] as matrices in its accumulation type, of bounded memory where they are copies.

    Yields:
        Rows and columns of [b, n], and that part of it. One piece for float32 and float64 where the
        strides allow a view, columns of 16-bit numbers, else a few samples at a time.
    """
    b, n = len(g), g[0].numel() if len(g) else 0
    if not b * n:
        return
    everything = slice(None)
    try:
        matrix = g.view(b, n)
    except RuntimeError:  # no view: copy a few samples, at least one, at a time
        rows = max(1, _SCRATCH // n)
        for i in range(0, b, rows):
            yield slice(i, i + rows), everything, widen(g[i : i + rows]).reshape(-1, n)
        return
    if matrix.dtype == accumulation_dtype(matrix.dtype):
        yield everything, everything, matrix
        return
    columns = max(1024, _SCRATCH // b)
    for i in range(0, n, columns):
        yield everything, slice(i, i + columns), widen(matrix[:, i : i + columns])


def _square_norms(g: Tensor) -> Tensor:
    """||g_b||^2 for g [b, ...]: float64 [b]."""
    total = g.new_zeros(len(g), dtype=torch.float64)
    for rows, _, x in _pieces(g):
        total[rows] += _row_norm_sq(x)
    return total


def _row_norm_sq(x: Tensor) -> Tensor:
    """Squared norms of the rows of x [b, n], float64, from float32 where that loses nothing.

    On the CPU, rows whose squares leave the range of float32 are done again in float64. Elsewhere
    that would synchronise: a norm beyond 1e18 may there be inf, which drops the sample, and one
    below 1e-10, where thresholds never are, may come out too small.
    """
    total = row_norm_sq(x).double()
    if x.device.type == "cpu" and x.dtype == torch.float32:
        lost = ~((total > _SAFE[0]) & (total < _SAFE[1]))
        for i in lost.nonzero().flatten().tolist():
            parts = [part.double().square().sum() for part in x[i].split(_SCRATCH // 16)]
            total[i] = torch.stack(parts).sum()
    return total


def _weighted_sum(g: Tensor, scale: Tensor) -> Tensor:
    """sum_b scale_b g_b for g [b, ...] and scale [b], in the accumulation type; samples of scale 0
    contribute 0 even where they are not finite."""
    dtype = accumulation_dtype(g.dtype)
    total = g.new_zeros(g.shape[1:], dtype=dtype)
    flat, scale = total.view(-1), scale.to(dtype)
    for rows, columns, x in _pieces(g):
        for part, weights, live in _without_zeroed(x, scale[rows]):
            flat[columns][part].addmv_(live.t(), weights)
    return total


def _without_zeroed(x: Tensor, scale: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Parts of x [b, n] that together have every sample of scale other than 0: 0 * inf is NaN.

    On the CPU the stretches of samples between those of scale 0, without a copy; elsewhere, where
    looking would synchronise, a few columns at a time with the rows of scale 0 zeroed.

    Yields:
        Columns, scales and numbers of the part.
    """
    dead = scale == 0
    if x.device.type == "cpu":
        stops = [-1, *dead.nonzero().flatten().tolist(), len(x)]
        for before, after in pairwise(stops):
            if after - before > 1:
                live = slice(before + 1, after)
                yield slice(None), scale[live], x[live]
        return
    columns = max(1024, 16 * _SCRATCH // len(x))
    for i in range(0, x.shape[1], columns):
        part = slice(i, i + columns)
        yield part, scale, x[:, part].masked_fill(dead[:, None], 0)

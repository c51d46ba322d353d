"""From norms to scales and counts, clipping of per-sample gradients, and the noisy mean.

The strategy (fastclip.clipping) is an argument and defines the arithmetic. A kernel that knows the
strategy's parts does the same in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastclip.core.numerics import accumulation_dtype, in_full_float32, margin, row_norm_sq, widen
from fastclip.core.torch_names import foreach_add_
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.dispatch import host_operation, operation


@operation
def clip_scale(
    norm_sq: Tensor, strategy: Any, state: Any, groups: Tensor | None = None,
    layers: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns scales of a physical batch and its raw norms, and adds its raw counts.

    Args:
        norm_sq: squared norms of the parameters that took part, [l, b].
        strategy: a fastclip.clipping.Clipping. state: its Thresholds, on the same device.
        groups: int64 [b], -1 for a sample that neither counts nor contributes.
        layers: rows of a per-layer state that `norm_sq` holds, int64 [l].
        counts: the logical batch's raw counts so far, float64; None counts nothing.

    Returns:
        Scales [b], or [l, b] for a per-layer policy, and norms [b], in the type of `norm_sq`.
    """
    norms = norm_sq.sum(0).sqrt()  # [b]
    layer_norms = norm_sq.sqrt() if strategy.threshold.per_layer else None
    scales = strategy.scales(norms, state, groups, layer_norms, layers)
    if counts is not None:
        counts += strategy.threshold.count(norms, state, groups)
    return scales, norms


@operation
def threshold_step(
    counts: Tensor, noise: Tensor | None, policy: Any, state: Any, batch_size: float, step: int
) -> tuple[Tensor, Any]:
    """Returns noisy counts and the next state, once per logical batch.

    Args:
        counts: raw counts, float64. noise: added to them, of the same shape, or None.
        policy: a fastclip.clipping.ThresholdPolicy. state: its Thresholds.
        batch_size: the public expected one, B. step: number of real steps before this one.
    """
    noisy = counts.clone() if noise is None else counts + noise
    return noisy, policy.move(state, noisy, batch_size, step)


# -------------------------------------------------------------------------------------------------
# Clipping of materialized per-sample gradients: norms, scales and clipped sums of all parameters.
#
#     n_b = ||(g_1b, ..., g_Lb)||    s_b = min(1, C / n_b)    S_l = sum_b s_b g_lb
#
# and per layer the same with n_lb, s_lb and C_l. The scales are Hard's of fastclip.clipping, which
# the engine's strategies build on; this module lies below them and has the formula itself.
#
# Index letters: b sample, l parameter tensor.


TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SCRATCH = 1 << 20  # numbers of a piece that must be copied: widened, or made contiguous
_SAFE = (1e-20, 1e36)  # squared norms in which no square of float32 can have been lost


@operation
@in_full_float32
def clip_accumulate(
    grad_samples: Sequence[Tensor], thresholds: float | Tensor | Sequence[float]
) -> tuple[list[Tensor], Tensor]:
    """Clips per-sample gradients and sums them over the samples, for all parameters together.

    Formal guarantee: adding or removing one sample changes the sums, taken as one vector, by at most
    C in Euclidean norm (per layer: the l-th by at most C_l). Its own contribution, as computed in the
    arithmetic in use, has at most that norm. The guarantee does not cover what a float32 sum rounds
    away of the other samples.

    Args:
        grad_samples: of each parameter tensor, [b, ...]; float32, float64, float16 or bfloat16, of
            any strides.
        thresholds: C, a positive number or a scalar tensor, clips the whole gradient; C_l, a list
            of l numbers or a tensor [l], clips per layer. Values of tensors are not read.

    Returns:
        The clipped sums, one of shape [...] per parameter: float32 for 16-bit inputs, else of the
        input's type. And the norms, [b] or [l, b]: float64 if an input is, else float32. A sample
        with any norm that is not finite contributes 0 everywhere.

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
    """Returns what is wrong with the arguments of `clip_accumulate`, in one sentence, or None."""
    if not len(grad_samples):
        return "clip_accumulate expects per-sample gradients of at least one parameter, got none."
    first = grad_samples[0]
    for i, g in enumerate(grad_samples):
        if g.dtype not in TYPES:
            return (
                f"grad_samples[{i}] expects float32, float64, float16 or bfloat16, got {g.dtype}."
            )
        if not g.dim():
            return f"grad_samples[{i}] expects a shape [b, ...], got a scalar."
        if g.device != first.device:
            return f"grad_samples[{i}] expects {first.device} as grad_samples[0], got {g.device}."
        if len(g) != len(first):
            return (
                f"grad_samples[{i}] expects {len(first)} samples as grad_samples[0], got {len(g)}."
            )
    expected = f"one threshold, or one for each of the {len(grad_samples)} parameter tensors"
    if isinstance(thresholds, Tensor):
        fits = thresholds.dim() == 0 or thresholds.shape == (len(grad_samples),)
        return (
            None
            if fits
            else f"thresholds expects {expected}, got a tensor {list(thresholds.shape)}."
        )
    values = numbers_of(thresholds)
    if is_per_layer(thresholds) and len(values) != len(grad_samples):
        return f"thresholds expects {expected}, got {len(values)}."
    for value in values:
        if not _number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            return f"thresholds expects positive finite numbers, got {value!r}."
    return None


def is_per_layer(thresholds: float | Tensor | Sequence[float]) -> bool:
    """Whether there is one threshold per parameter tensor."""
    return thresholds.dim() > 0 if isinstance(thresholds, Tensor) else not _number(thresholds)


def numbers_of(thresholds: float | Sequence[float]) -> list[float]:
    """Returns the thresholds as a list: one for the whole gradient, or one per parameter tensor."""
    return [thresholds] if isinstance(thresholds, Real) else list(thresholds)  # type: ignore[arg-type, list-item]


def norm_dtype(grad_samples: Sequence[Tensor]) -> torch.dtype:
    """Returns the dtype of norms: float64 if an input is, else float32."""
    wide = any(g.dtype == torch.float64 for g in grad_samples)
    return torch.float64 if wide else torch.float32


def room(grad_samples: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the bounds of scales for the coarsest arithmetic in use.

    Returns:
        1 - margin, a factor of the threshold that leaves room for rounding (`margin`). And the
        smallest scale that is used. A subnormal scale may be rounded up by more than the margin and
        break the bound, so it counts as 0.
    """
    wide = all(g.dtype == torch.float64 for g in grad_samples)
    dtype = torch.float64 if wide else torch.float32
    return 1 - margin(dtype), torch.finfo(dtype).tiny


def hard_scales(norms: Tensor, thresholds: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Returns min(1, C (1 - margin) / n), 0 for a sample with any norm that is not finite.

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
    """Yields `g` [b, ...] as matrices in its accumulation type; copies have bounded memory.

    Yields:
        Rows and columns of [b, n], and that part of it. It is one piece for float32 and float64 if
        the strides allow a view, columns for 16-bit numbers, else a few samples at a time.
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
    """Returns ||g_b||^2 for g [b, ...]: float64 [b]."""
    total = g.new_zeros(len(g), dtype=torch.float64)
    for rows, _, x in _pieces(g):
        total[rows] += _row_norm_sq(x)
    return total


def _row_norm_sq(x: Tensor) -> Tensor:
    """Returns squared norms of the rows of x [b, n], float64, from float32 where that loses nothing.

    On the CPU, rows whose squares leave the range of float32 are computed again in float64.
    Elsewhere that would synchronize. There a norm beyond 1e18 may be inf, which drops the sample. A
    norm below 1e-10 (thresholds never are) may be too small.
    """
    total = row_norm_sq(x).double()
    if x.device.type == "cpu" and x.dtype == torch.float32:
        lost = ~((total > _SAFE[0]) & (total < _SAFE[1]))
        for i in lost.nonzero().flatten().tolist():
            parts = [part.double().square().sum() for part in x[i].split(_SCRATCH // 16)]
            total[i] = torch.stack(parts).sum()
    return total


def _weighted_sum(g: Tensor, scale: Tensor) -> Tensor:
    """Returns sum_b scale_b g_b for g [b, ...] and scale [b], in the accumulation type. Samples of scale
    0 contribute 0 even if they are not finite."""
    dtype = accumulation_dtype(g.dtype)
    total = g.new_zeros(g.shape[1:], dtype=dtype)
    flat, scale = total.view(-1), scale.to(dtype)
    for rows, columns, x in _pieces(g):
        for part, weights, live in _without_zeroed(x, scale[rows]):
            flat[columns][part].addmv_(live.t(), weights)
    return total


def _without_zeroed(x: Tensor, scale: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields parts of x [b, n] that cover all samples of nonzero scale: 0 * inf is NaN.

    On the CPU these are stretches of samples between those of scale 0, without a copy. Elsewhere
    reading the scales would synchronize: a few columns at a time have the rows of scale 0 zeroed.

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


# -------------------------------------------------------------------------------------------------
# From clipped sums to the gradient that the optimizer sees.
#
# A source of noise is a fastclip.ops.noise.NoiseSource. Kernels read its `secure`, `guarded` and
# `generator`, the reference calls its `normal_`.


def check_std(std: float) -> float:
    """Checks a standard deviation. A negative one, or NaN, would silently mean no noise.

    Raises:
        ArgumentError: unless it is a finite number >= 0.
    """
    if not 0 <= std < math.inf:
        raise ArgumentError(
            f"The standard deviation of the noise expects a finite number >= 0, got {std}. Check "
            "noise_multiplier, max_grad_norm and what schedulers make of them.",
            doc="noise",
        )
    return std


def check_floating(out: Tensor) -> None:
    """Checks that noise is real.

    Raises:
        ArgumentTypeError: for integers and complex numbers.
    """
    if not out.is_floating_point():
        raise ArgumentTypeError(f"noise expects a real floating-point tensor, got {out.dtype}.")


@operation
def noise_finalize(
    summed: list[Tensor | None], like: list[Tensor], std: float | Tensor, divisor: float,
    source: Any,
) -> list[Tensor]:  # fmt: skip
    """Returns (summed + N(0, std^2)) / divisor per parameter, in float32, cast to its own type last.

    Args:
        summed: clipped sums; None if no sample used the parameter (it still gets noise).
        like: the parameters, for shape, device and destination type.
        std: standard deviation of the noise on the sum. A number (0 draws nothing), or a scalar
        tensor on the device, whose value is never read.
        divisor: public denominator.
        source: where the noise comes from.

    Returns:
        New tensors, one per parameter.

    Raises:
        ArgumentError, ArgumentTypeError: std is not a finite number >= 0, or parameters are not
            real.
    """
    if not isinstance(std, Tensor):
        check_std(std)
    for parameter in () if all(map(Tensor.is_floating_point, like)) else like:
        check_floating(parameter)
    gradients = [
        torch.empty(
            parameter.shape, device=parameter.device,
            dtype=torch.float64 if parameter.dtype == torch.float64 else torch.float32,
        )
        for parameter in like
    ]  # fmt: skip
    if isinstance(std, Tensor):
        draw_normals(gradients, 1.0, source)
        for gradient in gradients:
            gradient.mul_(std.to(gradient.device, non_blocking=True) / divisor)
        add_totals(gradients, summed, 1 / divisor)
    elif std > 0:
        draw_normals(gradients, std / divisor, source, summed, 1 / divisor)
    else:
        for gradient in gradients:
            gradient.zero_()
        add_totals(gradients, summed, 1 / divisor)
    pairs = zip(gradients, like, strict=True)
    return [g if g.dtype == p.dtype else g.to(p.dtype) for g, p in pairs]


@host_operation
def draw_normals(
    outs: list[Tensor], std: float, source: Any, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Fills `outs`, one after the other, with N(0, std^2) of a source of noise, and adds `totals`.

    Args:
        totals: one for each of `outs`, or None instead; or no totals at all. factor: multiplies
            them.
    """
    for out in outs:
        source.normal_(out, std)
    if totals:
        add_totals(outs, totals, factor)


def add_totals(outs: Sequence[Tensor], totals: Sequence[Tensor | None], factor: float) -> None:
    """Adds `factor` times its total to each of `outs` that has one."""
    touched = [pair for pair in zip(outs, totals, strict=True) if pair[1] is not None]
    if touched:
        foreach_add_(*map(list, zip(*touched, strict=True)), alpha=factor)


@operation
def fill_normal(out: Tensor, std: float, source: Any) -> None:
    """Fills `out` with N(0, std^2) of a source of noise."""
    check_floating(out)
    source.normal_(out, check_std(std))

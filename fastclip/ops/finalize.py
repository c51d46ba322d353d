"""From clipped sums to the gradient that the optimizer sees.

A source of noise is a fastclip.noise.NoiseSource; kernels look at its `secure`, `guarded` and
`generator`, the reference calls its `normal_`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import foreach_add_
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.dispatch import host_operation, operation


def check_std(std: float) -> float:
    """A standard deviation that can be drawn: less, or NaN, would mean no noise without a word.

    Raises:
        ArgumentError: unless it is a finite number >= 0.
    """
    if not 0 <= std < math.inf:
        raise ArgumentError(
            f"the standard deviation of noise expects a finite number >= 0, got {std}: look at "
            "noise_multiplier and max_grad_norm, and at what schedulers make of them"
        )
    return std


def check_floating(out: Tensor) -> None:
    """Noise is real.

    Raises:
        ArgumentTypeError: for integers and complex numbers.
    """
    if not out.is_floating_point():
        raise ArgumentTypeError(f"noise expects a real floating-point tensor, got {out.dtype}")


@operation
def noise_finalize(
    summed: list[Tensor | None], like: list[Tensor], std: float | Tensor, divisor: float,
    source: Any,
) -> list[Tensor]:  # fmt: skip
    """(summed + N(0, std^2)) / divisor for every parameter, in float32, cast to its own type last.

    Args:
        summed: clipped sums; None where no sample touched the parameter (it still gets noise).
        like: the parameters, for shape, device and destination type.
        std: standard deviation of the noise on the sum: a number, of which 0 draws nothing, or a
            scalar tensor on the device, which is never looked at.
        divisor: public denominator.
        source: where the noise comes from.

    Returns:
        New tensors, one a parameter.

    Raises:
        ArgumentError, ArgumentTypeError: for a std that is no finite number >= 0, or parameters that
            are not real.
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
    """Fill `outs`, one after the other, with N(0, std^2) of a source of noise, and add `totals`.

    Args:
        totals: one for each of `outs`, or None in its place; or no totals at all. factor: what they
            are multiplied by.
    """
    for out in outs:
        source.normal_(out, std)
    if totals:
        add_totals(outs, totals, factor)


def add_totals(outs: Sequence[Tensor], totals: Sequence[Tensor | None], factor: float) -> None:
    """Add `factor` times its total to each of `outs` that has one."""
    touched = [pair for pair in zip(outs, totals, strict=True) if pair[1] is not None]
    if touched:
        foreach_add_(*map(list, zip(*touched, strict=True)), alpha=factor)


@operation
def fill_normal(out: Tensor, std: float, source: Any) -> None:
    """Fill `out` with N(0, std^2) of a source of noise."""
    check_floating(out)
    source.normal_(out, check_std(std))

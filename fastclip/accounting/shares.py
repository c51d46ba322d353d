"""How one step's noise multiplier is shared between the gradients and the counts of a strategy.

A step that releases a noisy sum of gradients and noisy counts of the same Poisson sample is one
Gaussian mechanism of a composed multiplier, which is what the accountant sees.

Source: Lemma 3.1 and Theorem 3.2 of Zhao et al. 2025 (bounded adaptive clipping). Every multiplier
is in units of its own query's L2 sensitivity; 0 stands for no noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastclip.checks import positive
from fastclip.errors import ArgumentError, StepError


class NoiseLevels(NamedTuple):
    """Noise multipliers of one step; `counts` is None where nothing is counted."""

    total: float
    gradients: float
    counts: float | None


def compose(*sigmas: float) -> float:
    """Multiplier of the one Gaussian mechanism that equals several on the same sample.

    Formal guarantee: queries of L2 sensitivity 1 answered with noise N(0, sigma_i^2) have exactly
    the privacy profile of one such query with (sum_i sigma_i^-2)^(-1/2) (Lemma 3.1), also after
    Poisson sampling when all of them see the same sample (Theorem 3.2).

    Args:
        sigmas: at least one noise multiplier, each positive, or 0 for no noise.

    Returns:
        The composed multiplier: 0 if any is 0.

    Raises:
        ArgumentError: if none is given, or one is negative or not finite.
    """
    if not sigmas:
        raise ArgumentError("compose expects at least one noise multiplier, got none")
    levels = [multiplier("sigma", sigma) for sigma in sigmas]
    least = min(levels)
    if least == 0:
        return 0.0
    return least / math.sqrt(sum((least / level) ** 2 for level in levels))


def split(sigma: float, count_noise_ratio: float | None) -> NoiseLevels:
    """Shares of a step's total multiplier when counts get `count_noise_ratio` times more noise.

    Formal guarantee: compose(gradients, counts) = sigma, so epsilon is that of sigma alone.

    Args:
        sigma: total noise multiplier, or 0.
        count_noise_ratio: r = sigma_count / sigma_grad; None where nothing is counted.

    Returns:
        sigma_grad = sigma * sqrt(1 + 1/r^2) and sigma_count = r * sigma_grad.

    Raises:
        ArgumentError: for a negative sigma or a ratio that is not positive.
    """
    total = multiplier("sigma", sigma)
    if count_noise_ratio is None:
        return NoiseLevels(total, total, None)
    ratio = positive("count_noise_ratio", count_noise_ratio)
    gradients = total * math.hypot(1, 1 / ratio)
    return NoiseLevels(total, gradients, ratio * gradients)


def remaining(sigma: float, sigma_count: float) -> float:
    """Multiplier left for the gradients once the counts were released at `sigma_count`.

    Formal guarantee: compose(remaining(sigma, sigma_count), sigma_count) = sigma.

    Args:
        sigma: total noise multiplier of the step, or 0.
        sigma_count: multiplier the counts were released with.

    Returns:
        (sigma^-2 - sigma_count^-2)^(-1/2); 0 for a step without noise.

    Raises:
        StepError: if the counts alone have already spent the step's share.
    """
    total, counts = multiplier("sigma", sigma), multiplier("sigma_count", sigma_count)
    if total == 0:
        return 0.0
    if counts <= total:
        raise StepError(
            f"the counts were released with noise multiplier {counts:g}, which leaves nothing of "
            f"the step's {total:g} for the gradients: raise count_noise_ratio, or change "
            "noise_multiplier before the counts of a step are released"
        )
    return total / math.sqrt((counts - total) / counts * (1 + total / counts))


def multiplier(name: str, value: object) -> float:
    """`value` as a noise multiplier: a positive finite float, or 0 for no noise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0:
        return 0.0
    return positive(name, value)

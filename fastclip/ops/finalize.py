"""From clipped sums to the gradient that the optimizer sees."""

from __future__ import annotations

import torch
from torch import Tensor


def noise_finalize(
    summed: list[Tensor | None], like: list[Tensor], std: float | Tensor, divisor: float,
    generator: torch.Generator | None, secure: bool = False,
) -> list[Tensor]:  # fmt: skip
    """(summed + N(0, std^2)) / divisor for every parameter, in float32, cast to its own type last.

    Args:
        summed: clipped sums; None where no sample touched the parameter (it still gets noise).
        like: the parameters, for shape, device and destination type.
        std: standard deviation of the noise on the sum: a number, of which 0 draws nothing, or a
            scalar tensor on the device, which is never looked at.
        divisor: public denominator.
        generator: source of the noise, or None for torch's global one.
        secure: guard against floating-point attacks: one draw is thrown away and each value is half
            the sum of four (Holohan and Braghin 2021, section 5.1, as in Opacus).

    Returns:
        New tensors, one a parameter.
    """
    gradients = []
    for total, parameter in zip(summed, like, strict=True):
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        gradient = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        if isinstance(std, Tensor):
            fill_normal(gradient, 1.0, generator, secure)
            gradient.mul_(std.to(gradient.device, non_blocking=True) / divisor)
        elif std > 0:
            fill_normal(gradient, std / divisor, generator, secure)
        else:
            gradient.zero_()
        if total is not None:
            gradient.add_(total, alpha=1 / divisor)
        gradients.append(gradient.to(parameter.dtype))
    return gradients


def fill_normal(
    out: Tensor, std: float, generator: torch.Generator | None = None, secure: bool = False
) -> None:
    """Fill `out` with N(0, std^2); `secure` as for `noise_finalize`."""
    if not secure:
        out.normal_(0.0, std, generator=generator)
        return
    out.new_empty(1).normal_(generator=generator)
    out.zero_()
    for _ in range(4):
        out.add_(torch.empty_like(out).normal_(0.0, std, generator=generator))
    out.div_(2)

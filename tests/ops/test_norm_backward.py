"""GroupNorm's backward on the CPU: one pass for all samples against each sample alone, by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops

SHAPES = {
    "plain": (3, 6, 7, 2), "one sample": (1, 6, 7, 3), "one channel": (4, 1, 5, 1),
    "one pixel": (3, 6, 1, 2), "instance": (3, 6, 9, 6), "long": (2, 8, 513, 4),
}  # fmt: skip
"""b, c, t and groups."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def alone(x: Tensor, g: Tensor, groups: int, weight: Tensor | None) -> list[Tensor]:
    """Gradients of the input, and of each sample's weight and bias, one sample at a time."""
    found = []
    for row, gradient in zip(x.double(), g.double(), strict=True):
        one = row[None].clone().requires_grad_()
        scale = torch.ones(len(row), dtype=torch.float64) if weight is None else weight.double()
        scale = scale.clone().requires_grad_()
        shift = torch.zeros_like(scale, requires_grad=True)
        F.group_norm(one, groups, scale, shift).backward(gradient[None])
        found.append((one.grad[0], scale.grad, shift.grad))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def statistics(x: Tensor, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = x.double().reshape(len(x), groups, -1)
    rstd = (rows.var(2, unbiased=False) + 1e-5).rsqrt()
    return rows.mean(2).to(dtype), rstd.to(dtype)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_sample_alone(
    shape: tuple[int, ...], dtype: torch.dtype, weighted: bool, strided: bool
) -> None:
    """16-bit inputs have float32 statistics and weights, as under autocast."""
    torch.manual_seed(0)
    b, c, t, groups = shape
    x, g = (torch.randn(b, c, t).to(dtype) for _ in range(2))
    if strided:
        x, g = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, g))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    mean, rstd = statistics(x, groups, wide)
    weight = torch.randn(c, dtype=wide) if weighted else None
    found = ops.group_norm_backward(x, g, mean, rstd, weight, True)
    without = ops.group_norm_backward(x, g, mean, rstd, weight, False)
    exact = alone(x, g, groups, weight)
    assert found[0].dtype == dtype
    assert found[0].shape == x.shape
    assert without[0] is None
    tolerances = [TOLERANCE[dtype], *[1e-12 if dtype == torch.float64 else 2e-6] * 2]
    for one, expected, tolerance in zip(found, exact, tolerances, strict=True):
        error = (one.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= tolerance or expected.norm() < 1e-9 * g.double().norm()
    for one, other in zip(found[1:], without[1:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 4, 0, 2)])
def test_nothing(shape: tuple[int, ...]) -> None:
    b, c, t, groups = shape
    x = torch.zeros(b, c, t)
    statistic = torch.ones(b, groups)
    dx, dw, db = ops.group_norm_backward(x, x, statistic, statistic, torch.ones(c), True)
    assert dx.shape == x.shape
    assert dw.shape == db.shape == (b, c)
    assert not dw.any()
    assert not db.any()

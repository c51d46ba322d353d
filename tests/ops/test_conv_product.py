"""Clipped sums of convolutions as one product: where there are more weights than patches, on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops import conv as conv_gradients

DTYPES = [torch.float32, torch.float64]
MANY_WEIGHTS = {  # geometry, input's space
    "1x1": (ConvGeometry((12, 20, 1, 1), (1, 1), (0, 0), (1, 1), 1), (2, 1)),
    "1x1, every other pixel": (ConvGeometry((12, 20, 1, 1), (2, 2), (0, 0), (1, 1), 1), (3, 4)),
    "1x1, padded": (ConvGeometry((90, 80, 1, 1), (1, 1), (1, 0), (1, 1), 1), (1, 2)),
    "3x3": (ConvGeometry((90, 12, 3, 3), (1, 1), (1, 1), (1, 1), 1), (2, 2)),
    "3x2, strides": (ConvGeometry((99, 16, 3, 2), (2, 1), (1, 0), (1, 2), 1), (4, 4)),
    "one dimension": (ConvGeometry((12, 20, 1), (1,), (0,), (1,), 1), (3,)),
    "three dimensions": (ConvGeometry((12, 20, 1, 1, 1), (1, 2, 1), (0, 0, 0), (1, 1, 1), 1), (1, 3, 1)),
}  # fmt: skip
FEW_WEIGHTS = {
    "few channels": (ConvGeometry((12, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1), (2, 1)),
    "large images": (ConvGeometry((20, 13, 3, 3), (1, 1), (1, 1), (1, 1), 1), (9, 9)),
    "groups": (ConvGeometry((24, 10, 1, 1), (1, 1), (0, 0), (1, 1), 2), (2, 1)),
    "patches of one dimension": (ConvGeometry((90, 12, 9), (1,), (4,), (1,), 1), (2,)),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few channels are enough."""
    monkeypatch.setattr(conv_gradients, "_LARGE", 200)


def operands(geometry: ConvGeometry, space: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x, g and each sample's weight gradient alone, by autograd; in float64."""
    torch.manual_seed(0)
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    x = torch.randn(3, geometry.weight_shape[1] * geometry.groups, *space).double()
    weight = torch.randn(geometry.weight_shape, dtype=torch.float64, requires_grad=True)
    hyper = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    g = torch.randn_like(conv(x, weight, None, *hyper))
    rows = [
        torch.autograd.grad(conv(x[i : i + 1], weight, None, *hyper), weight, g[i : i + 1])[0]
        for i in range(3)
    ]
    return x, g, torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*MANY_WEIGHTS, *FEW_WEIGHTS])
def test_each_sample_alone(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the way is the one that is named; a sample of scale 0 may hold anything."""
    own, served = conv_gradients._multiplied, []
    monkeypatch.setattr(conv_gradients, "_multiplied", lambda *a: served.append(1) or own(*a))
    geometry, space = {**MANY_WEIGHTS, **FEW_WEIGHTS}[case]
    x, g, exact = operands(geometry, space)
    scale = torch.tensor([0.3, 0.0, 1.7], dtype=torch.float64)
    x[1], g[1] = torch.inf, torch.nan
    expected = torch.einsum("b,b...->...", scale[[0, 2]], exact[[0, 2]])
    room = 1e-12 if dtype == torch.float64 else 2e-6
    for order in (torch.contiguous_format, torch.channels_last):
        if order is torch.channels_last and x.dim() != 4:
            continue
        laid = (y.to(dtype, memory_format=order) for y in (x, g))
        found = ops.conv_sum(*laid, scale.to(dtype), geometry)
        assert found.shape == geometry.weight_shape
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= room * expected.norm()
    assert bool(served) is (case in MANY_WEIGHTS)


@pytest.mark.parametrize("case", ["1x1", "3x3"])
def test_where_a_cpu_would_round(case: str) -> None:
    """Its flag of products is raised, too."""
    geometry, space = MANY_WEIGHTS[case]
    x, g, exact = operands(geometry, space)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = ops.conv_sum(x.float(), g.float(), torch.tensor([1.0, 0.0, 0.0]), geometry)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (found.double() - exact[0]).norm() <= 2e-6 * exact[0].norm()


def test_no_samples() -> None:
    geometry, space = MANY_WEIGHTS["3x3"]
    x, g, _ = operands(geometry, space)
    assert not ops.conv_sum(x[:0], g[:0], torch.zeros(0).double(), geometry).any()

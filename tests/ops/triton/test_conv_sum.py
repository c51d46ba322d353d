"""conv_sum against one sample at a time in float64; no contribution beyond its sensitivity."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fastclip import ops
from fastclip.core.numerics import margin
from fastclip.ops import ConvGeometry, dispatch
from fastclip.ops.triton.conv import conv_sum
from fastclip.ops.triton.runtime import INTERPRETED
from fastclip.rules.records import ConvRecord, UnitConvRecord
from tests.ops.triton.oracle import DEVICE, DTYPES, SUM_TOLERANCE, normal, relative_error, strided
from tests.ops.triton.test_conv_norm import CASES, operands

module = import_module("fastclip.ops.triton.conv")  # the package exports the function
MAPS = {  # few positions, where a tile holds many samples; then a sample at a time, in 1 and 2 tiles
    "few": (3, ConvGeometry((20, 17, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "one tile": (5, ConvGeometry((20, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "two tiles": (9, ConvGeometry((7, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
}


def scales(b: int, seed: int = 0) -> Tensor:
    return torch.rand(b, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exact(x: Tensor, g: Tensor, scale: Tensor, geometry: ConvGeometry) -> Tensor:
    """In float64, of the samples whose scale is not 0, by autograd one sample at a time."""
    conv = F.conv1d if len(geometry.kernel) == 1 else F.conv2d
    hyper = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    total = torch.zeros(geometry.weight_shape, dtype=torch.float64, device="cpu")
    for x_b, g_b, s in zip(x.cpu().double(), g.cpu().double(), scale.tolist(), strict=True):
        if s:
            weight = torch.zeros_like(total, requires_grad=True)
            out = conv(x_b[None], weight, None, *hyper)
            total += s * torch.autograd.grad(out, weight, g_b[None])[0]
    return total


def check(x: Tensor, g: Tensor, scale: Tensor, geometry: ConvGeometry) -> None:
    found, true = conv_sum(x, g, scale, geometry), exact(x, g, scale, geometry)
    assert found.dtype == torch.float32
    assert found.shape == true.shape
    assert found.is_contiguous()
    assert relative_error(found, true) <= SUM_TOLERANCE[torch.float32]


def of_map(
    name: str, dtype: torch.dtype, b: int = 5
) -> tuple[Tensor, Tensor, Tensor, ConvGeometry]:
    side, geometry = MAPS[name]
    return *operands((side, side), geometry, dtype, b), scales(b), geometry


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [name for name in CASES if name != "depthwise"])
def test_geometries(case: str, dtype: torch.dtype) -> None:
    space, geometry = CASES[case]
    check(*operands(space, geometry, dtype, 3), scales(3), geometry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["3x3", "pointwise", "1d"])
def test_any_strides(case: str, dtype: torch.dtype) -> None:
    """Channels last, gaps between pixels, a map inside a larger one, expanded operands."""
    space, geometry = CASES[case]
    (x, g), scale = operands(space, geometry, dtype), scales(2)
    last = [y.transpose(1, -1).contiguous().transpose(1, -1) for y in (x, g)]
    check(*last, strided(scale), geometry)
    check(strided(x), strided(g), scale[:1].expand(2), geometry)
    inner = (..., *[slice(2, -1)] * len(space))
    check(F.pad(x, [2, 1] * len(space))[inner], g, scale, geometry)
    check(x[:1].expand_as(x), g[:, :, :1].expand_as(g), scale, geometry)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
@pytest.mark.one_in(24)
def test_any_split(
    splits: int, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches that begin and end inside a sample, and some without any position."""
    monkeypatch.setattr(module, "splits_of", lambda *_: splits)
    check(*of_map(name, dtype))


def test_sums_of_many_steps() -> None:
    geometry = ConvGeometry((5, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    check(*operands((17, 20), geometry, torch.bfloat16), scales(2), geometry)


def test_operands_of_two_types() -> None:
    x, g, scale, geometry = of_map("one tile", torch.float32)
    check(x.bfloat16(), g, scale, geometry)
    check(x.bfloat16(), g.half(), scale, geometry)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.one_in(12)
def test_dead_samples(value: float, dtype: torch.dtype, name: str) -> None:
    """Scale 0 means exactly 0, whatever the operands hold."""
    x, g, scale, geometry = of_map(name, dtype)
    scale[[1, 3, 4]] = 0
    x[1, -1, 2, 0], g[3, 0, 1, 2] = value, value
    x[4], g[4] = value, value
    check(x, g, scale, geometry)
    assert not conv_sum(x, g, torch.zeros_like(scale), geometry).any()


@pytest.mark.parametrize("side", [3, 5, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.one_in(4)
def test_no_contribution_beyond_its_sensitivity(dtype: torch.dtype, side: int) -> None:
    """A sample scaled to norm 1, less the margin of the scales, stays within 1.

    Entries are equal, so that their roundings add up instead of canceling.
    """
    geometry = ConvGeometry((20, 17, 3, 3), (1, 1), (0, 0), (1, 1), 1)
    one, worst = torch.ones(1), 0.0
    for value in (0.9, 1.1, 1.3, 1.5, 1.7):
        x = torch.full((1, 17, side, side), value).to(DEVICE, dtype)
        g = torch.full((1, 20, side - 2, side - 2), 1.3).to(DEVICE, dtype)
        size = exact(x, g, one, geometry).norm()
        scale = ((1 - margin(torch.float32)) / size).to(DEVICE, torch.float32)
        assert conv_sum(x, g, scale[None], geometry).double().norm() <= 1
        worst = max(worst, exact(x, (g * scale).bfloat16(), one, geometry).norm().item())
    assert worst > 1 + 1e-4  # what scaling before a 16-bit product would contribute


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_repeatable(dtype: torch.dtype, name: str) -> None:
    call = of_map(name, dtype)
    assert torch.equal(conv_sum(*call), conv_sum(*call))


@pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [3, 4, 9, 12])
@pytest.mark.one_in(8)
def test_every_configuration(
    side: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = ConvGeometry((130, 34, 3, 2), (1, 1), (1, 1), (1, 1), 1)
    x, g = operands((side, side), geometry, dtype)
    found: list[triton.Config] = []
    usable = module._sum_tiles.usable
    monkeypatch.setattr(
        module._sum_tiles, "usable", lambda *launch: found.extend(usable(*launch)) or found
    )
    conv_sum(x, g, scales(2), geometry)
    assert found
    for config in {str(c.kwargs): c for c in found}.values():
        monkeypatch.setattr(module._sum_tiles, "usable", lambda *_, config=config: [config])
        check(x, g, scales(2), geometry)


def test_what_is_left_to_the_reference() -> None:
    x, g, scale, geometry = of_map("few", torch.float32)
    assert conv_sum(x.double(), g.double(), scale, geometry) is NotImplemented
    assert conv_sum(x, g, scale.double(), geometry) is NotImplemented
    solid = ConvGeometry((2, 3, 1, 1, 1), (1,) * 3, (0,) * 3, (1,) * 3, 1)
    x, g = normal(5, 3, 2, 2, 2), normal(5, 2, 2, 2, 2)
    assert conv_sum(x, g, scale, solid) is NotImplemented
    space, depthwise = CASES["depthwise"]
    assert (
        conv_sum(*operands(space, depthwise, torch.float32), scale[:2], depthwise) is NotImplemented
    )


@pytest.mark.parametrize("b", [0, 2])
def test_nothing_to_sum(b: int) -> None:
    geometry = ConvGeometry((2, 0 if b else 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = normal(b, geometry.weight_shape[1], 4, 4), normal(b, 2, 4, 4)
    found = conv_sum(x, g, scales(b), geometry)
    assert torch.equal(found, torch.zeros(geometry.weight_shape, device=DEVICE))


def test_agrees_with_the_reference() -> None:
    x, g, scale, geometry = of_map("two tiles", torch.float32)
    reference = ops.conv_sum(x.cpu(), g.cpu(), scale.cpu(), geometry)
    assert relative_error(conv_sum(x, g, scale, geometry), reference) <= 1e-6


def test_serves_the_records_of_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and units of several rows, of 16 bits: no copy in float32 is made."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("triton"))
    x, g, scale, geometry = of_map("one tile", torch.bfloat16, b=6)
    expected = exact(x, g, scale, geometry)
    found = ConvRecord(x, g, geometry, ghost=True).clipped_sum(scale)
    assert relative_error(found, expected) <= SUM_TOLERANCE[torch.float32]
    x, g = x.unflatten(0, (3, 2)), g.unflatten(0, (3, 2))
    expected = exact(x.flatten(0, 1), g.flatten(0, 1), scale[:3].repeat_interleave(2), geometry)
    found = UnitConvRecord(x, g, geometry, ghost=True).clipped_sum(scale[:3])
    assert relative_error(found, expected) <= SUM_TOLERANCE[torch.float32]
    assert "triton conv_sum" in dispatch._STATE.proven

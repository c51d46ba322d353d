"""conv_norm and conv_ghost_norm against float64, over geometries, layouts and canceling inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.triton.conv import MAX_GHOST, conv_ghost_norm, conv_norm
from tests.ops.triton.oracle import DEVICE, DTYPES, NORM_TOLERANCE, normal, relative_error, strided

KERNELS = {"tiles": conv_norm, "pairs": conv_ghost_norm}
U = 2.0**-24
CASES = {  # space; weight, stride, padding, dilation, groups
    "3x3": ((7, 9), ConvGeometry((5, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "stem": ((11, 10), ConvGeometry((7, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1)),
    "strided": ((8, 8), ConvGeometry((6, 17, 3, 3), (2, 2), (1, 1), (1, 1), 1)),
    "pointwise": ((9, 7), ConvGeometry((65, 31, 1, 1), (1, 1), (0, 0), (1, 1), 1)),
    "pointwise-strided": ((9, 8), ConvGeometry((31, 17, 1, 1), (2, 2), (0, 0), (1, 1), 1)),
    "pointwise-padded": ((4, 4), ConvGeometry((3, 16, 1, 1), (1, 1), (1, 1), (1, 1), 1)),
    "uneven": ((11, 12), ConvGeometry((8, 2, 3, 2), (2, 1), (2, 0), (2, 3), 4)),
    "depthwise": ((6, 6), ConvGeometry((3, 1, 3, 3), (1, 1), (1, 1), (1, 1), 3)),
    "one-pixel": ((1, 1), ConvGeometry((7, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "wide": ((3, 3), ConvGeometry((130, 34, 3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "1d": ((31,), ConvGeometry((6, 5, 3), (2,), (1,), (2,), 1)),
    "1d-groups": ((40,), ConvGeometry((32, 16, 3), (1,), (1,), (1,), 2)),
}


def operands(
    space: tuple[int, ...], geometry: ConvGeometry, dtype: torch.dtype, b: int = 2
) -> tuple[Tensor, Tensor]:
    o, c, *kernel = geometry.weight_shape
    window = zip(space, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in window]
    x = normal(b, c * geometry.groups, *space, dtype=dtype, seed=1)
    return x, normal(b, o, *out, dtype=dtype, seed=2)


def exact(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    gradients = ops.conv_per_sample_gradients(x.double().cpu(), g.double().cpu(), geometry)
    return gradients.flatten(1).square().sum(1)


def sizes(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """||patches||^2 ||g||^2 or more, [b], in float64."""
    taps = torch.Size(geometry.kernel).numel()
    return taps * (x.double().flatten(1).norm(dim=1) * g.double().flatten(1).norm(dim=1)).square()


def check(name: str, x: Tensor, g: Tensor, geometry: ConvGeometry) -> None:
    """Never below the exact norm, and above it by the tolerance and a Gram's own bound at most."""
    found, expected = KERNELS[name](x, g, geometry), exact(x, g, geometry)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    found = found.double().cpu()
    gram = 40 * U * sizes(x, g, geometry).cpu() if name == "pairs" else 0.0
    assert (found >= expected * (1 - 1e-7)).all()
    assert (found <= expected * (1 + NORM_TOLERANCE[x.dtype]) + gram).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(9)
def test_geometries(case: str, name: str, dtype: torch.dtype) -> None:
    space, geometry = CASES[case]
    check(name, *operands(space, geometry, dtype), geometry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", [0, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(12)
def test_kept(case: str, b: int, dtype: torch.dtype) -> None:
    """The norm is the same to the bit; the reference keeps the same."""
    space, geometry = CASES[case]
    x, g = operands(space, geometry, dtype, b)
    norms, kept = conv_norm(x, g, geometry, keep=True)
    assert torch.equal(norms, conv_norm(x, g, geometry))
    true = ops.conv_per_sample_gradients(x.double().cpu(), g.double().cpu(), geometry)
    assert kept.shape == true.shape
    assert relative_error(kept, true) < 1e-5
    raised, other = ops.conv_norm(x.cpu(), g.cpu(), geometry, keep=True)
    assert relative_error(other, true) < 1e-5
    assert relative_error(norms, raised) < NORM_TOLERANCE[dtype]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", ["3x3", "pointwise", "1d"])
def test_strides(case: str, name: str) -> None:
    """Channels last, gaps between pixels, a map inside a larger one, an expanded gradient."""
    space, geometry = CASES[case]
    x, g = operands(space, geometry, torch.float32)
    last = [y.transpose(1, -1).contiguous().transpose(1, -1) for y in (x, g)]
    check(name, *last, geometry)
    check(name, strided(x), strided(g), geometry)
    inner = (..., *[slice(2, -1)] * len(space))
    check(name, F.pad(x, [2, 1] * len(space))[inner], g, geometry)
    check(name, x, g[:, :, :1].expand_as(g), geometry)


def test_several_tiles_of_positions() -> None:
    geometry = ConvGeometry((20, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    for name in KERNELS:
        check(name, *operands((13, 11), geometry, torch.bfloat16, b=1), geometry)


def test_operands_of_two_types() -> None:
    space, geometry = CASES["3x3"]
    x, g = operands(space, geometry, torch.float32)
    for name in KERNELS:
        check(name, x, g.bfloat16().float(), geometry)
        found = KERNELS[name](x, g.bfloat16(), geometry)
        assert relative_error(found, exact(x, g.bfloat16(), geometry)) < 3e-5


def nearly_constant(channels: int, size: int) -> Tensor:
    """[1, c, size, size]: one large vector at every pixel, plus small differences."""
    return 1e3 * normal(1, channels, 1, 1) + 1e-2 * normal(1, channels, size, size, seed=1)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("channels", "out", "size"), [(64, 4, 8), (4, 64, 6), (16, 16, 9)])
def test_never_too_small(channels: int, out: int, size: int, padding: int, name: str) -> None:
    """A nearly constant image under an output gradient that alternates from pixel to pixel."""
    geometry = ConvGeometry((out, channels, 3, 3), (1, 1), (padding,) * 2, (1, 1), 1)
    x, side = nearly_constant(channels, size), size + 2 * padding - 2
    checkerboard = 1.0 - 2.0 * (torch.arange(side)[:, None] + torch.arange(side)).remainder(2)
    g = 1e2 * normal(1, out, 1, 1, seed=2) * checkerboard.to(DEVICE)
    expected = exact(x, g, geometry)
    assert (expected.cpu() < 0.1 * sizes(x, g, geometry).cpu()).all()  # it does cancel
    assert (KERNELS[name](x, g, geometry).double().cpu() >= expected).all()


def test_underflow() -> None:
    """A tiny image under huge gradients: the squares underflow, the norm does not."""
    geometry = ConvGeometry((4, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = operands((5, 5), geometry, torch.float32)
    x, g = 1e-25 * x, 1e15 * g
    for kernel in KERNELS.values():
        assert (kernel(x, g, geometry).double().cpu() >= exact(x, g, geometry)).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("case", ["3x3", "depthwise", "pointwise"])
def test_not_finite(case: str, value: float, name: str) -> None:
    """In the image or in the gradient: that sample's norm only."""
    space, geometry = CASES[case]
    x, g = operands(space, geometry, torch.float32, b=3)
    expected = exact(x, g, geometry)
    x[0, -1, 1, 2], g[2, 2, -1, -1] = value, value
    found = KERNELS[name](x, g, geometry)
    assert found.isfinite().tolist() == [False, True, False]
    assert relative_error(found[1], expected[1]) < 3e-5


def test_pixel_in_no_patch() -> None:
    """conv_norm sees it, as the reference does, where it is not finite."""
    space, geometry = CASES["pointwise-strided"]
    x, g = operands(space, geometry, torch.float32)
    x[1, 0, 1, 1] = float("inf")
    assert conv_norm(x, g, geometry).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("name", KERNELS)
def test_nothing(name: str) -> None:
    space, geometry = CASES["3x3"]
    found = KERNELS[name](*operands(space, geometry, torch.float32, b=0), geometry)
    assert found.shape == (0,)


@pytest.mark.parametrize("name", KERNELS)
def test_repeatable(name: str) -> None:
    space, geometry = CASES["stem"]
    x, g = operands(space, geometry, torch.bfloat16)
    assert torch.equal(KERNELS[name](x, g, geometry), KERNELS[name](x, g, geometry))


def test_out_of_reach() -> None:
    space, geometry = CASES["3x3"]
    x, g = operands(space, geometry, torch.float64)
    solid = ConvGeometry((2, 3, 1, 1, 1), (1,) * 3, (0,) * 3, (1,) * 3, 1)
    for kernel in KERNELS.values():
        assert kernel(x, g, geometry) is NotImplemented
        assert kernel(normal(1, 3, 2, 2, 2), normal(1, 2, 2, 2, 2), solid) is NotImplemented
    long = ConvGeometry((1, 1, 1), (1,), (0,), (1,), 1)
    x = normal(1, 1, MAX_GHOST + 1)
    assert conv_ghost_norm(x, x, long) is NotImplemented

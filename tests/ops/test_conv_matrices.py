"""Convolutions as linear maps: torch's own gradients, each sample's from its own numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops

CONV = {1: F.conv1d, 2: F.conv2d}


def drawn(seed: int, dtype: torch.dtype) -> tuple[ops.ConvGeometry, Tensor, Tensor, Tensor]:
    """A convolution of odd sizes, x, g, and every sample's weight gradient in float64."""
    random.seed(seed)
    torch.manual_seed(seed)
    dims = random.choice([1, 2])
    kernel, stride, padding, dilation = (
        tuple(random.randint(low, high) for _ in range(dims))
        for low, high in ((1, 5), (1, 4), (0, 4), (1, 3))
    )
    reach = [(k - 1) * d + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    space = [random.randint(max(1, n), max(1, n) + 9) for n in reach]
    b, c, o = random.randint(1, 3), random.choice([1, 3, 17]), random.randint(1, 5)
    x = torch.randn(b, c, *space).to(dtype)
    if dims == 2 and random.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(o, c, *kernel, dtype=torch.float64, requires_grad=True)
    out = CONV[dims](x.double(), weight, None, stride, padding, dilation)
    g = torch.randn(out.shape).to(dtype)
    exact = [
        torch.autograd.grad((y * z.double()).sum(), weight, retain_graph=True)[0]
        for y, z in zip(out, g, strict=True)
    ]
    geometry = ops.ConvGeometry(tuple(weight.shape), stride, padding, dilation, 1)
    return geometry, x, g, torch.stack(exact)


def by_rows(x: Tensor, g: Tensor, geometry: ops.ConvGeometry) -> Tensor:
    seen, rows = ops.kernel_rows(x, g, geometry)
    blocks = [rows.double().mT @ a.double() for a in seen]
    return ops.of_kernel_rows(blocks, geometry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(40))
def test_rows_of_a_kernel(seed: int, dtype: torch.dtype) -> None:
    geometry, x, g, exact = drawn(seed, dtype)
    found = by_rows(x, g, geometry)
    assert found.shape == exact.shape
    assert found.is_contiguous()
    assert torch.allclose(found, exact, rtol=1e-9, atol=1e-9)
    if geometry.is_apart:
        whole = g.flatten(2).double() @ ops.patches_apart(x, geometry).double()
        assert torch.allclose(whole.view(exact.shape), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_no_view_reaches_another_sample(seed: int, dtype: torch.dtype) -> None:
    """0 times NaN is NaN: where the gradient is filled up with zeros, the map is the sample's own."""
    geometry, x, g, exact = drawn(seed, dtype)
    x, g = (torch.cat([y, torch.full_like(y[:1], torch.nan), y]) for y in (x, g))
    n = len(exact)
    found = by_rows(x, g, geometry)
    for rows in (found[:n], found[n + 1 :]):
        assert torch.allclose(rows, exact, rtol=1e-9, atol=1e-9)


def test_rows_of_16_bits_begin_where_wide_loads_can() -> None:
    geometry = ops.ConvGeometry((8, 3, 3, 3), (2, 2), (1, 1), (1, 1), 1)
    x, g = torch.randn(2, 3, 9, 9, dtype=torch.bfloat16), torch.randn(2, 8, 5, 5)
    seen, _ = ops.kernel_rows(x, g, geometry)
    assert len(seen) == 3
    for a in seen:
        assert a.shape == (2, 4 * 6 + 5, 3 * 16)
        assert not any(stride % 16 for stride in a.stride()[:2])
        assert a.stride(2) == 1
        assert not a.storage_offset() % 16
    assert len({a.untyped_storage().data_ptr() for a in seen}) == 1


def test_pointwise_patches_are_a_view() -> None:
    geometry = ops.ConvGeometry((8, 4, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    for x in (
        torch.randn(2, 4, 5, 5),
        torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last),
    ):
        patches = ops.patches_apart(x, geometry)
        assert patches.data_ptr() == x.data_ptr()
        assert torch.equal(patches, x.flatten(2).mT)


def test_which_are_linear_maps() -> None:
    def geometry(kernel: int, stride: int, padding: int = 0, dilation: int = 1, groups: int = 1):
        return ops.ConvGeometry((8, 4, kernel), (stride,), (padding,), (dilation,), groups)

    assert geometry(1, 1).is_apart
    assert geometry(2, 2).is_apart
    assert geometry(2, 3).is_apart
    assert geometry(1, 2, dilation=3).is_apart
    assert not geometry(2, 1).is_apart
    assert not geometry(2, 2, padding=1).is_apart
    assert not geometry(2, 2, dilation=2).is_apart
    assert not geometry(1, 1, groups=2).is_apart
    assert ops.by_matrices(geometry(3, 1, 1))
    assert not ops.by_matrices(geometry(3, 1, groups=2))
    assert not ops.by_matrices(ops.ConvGeometry((8, 4, 3, 3, 3), (1,) * 3, (0,) * 3, (1,) * 3, 1))

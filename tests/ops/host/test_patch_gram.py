"""The inner product of patch Grams on a CPU: against the patches themselves, and PyTorch's reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.dispatch import backend_of, use_backend

pytest.importorskip("fastclip._host", reason="fastclip._host is not built")
host = pytest.importorskip("fastclip.ops.host")

CASES = {  # space, kernel, stride, padding, dilation
    "2d": ((6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "wide": ((16, 20), (3, 3), (1, 1), (1, 1), (1, 1)),
    "strides": ((9, 8), (3, 2), (2, 3), (1, 0), (1, 1)),
    "dilation": ((9, 9), (2, 3), (1, 2), (2, 2), (3, 2)),
    "no padding": ((7, 4), (3, 4), (1, 1), (0, 0), (1, 1)),
    "mostly padding": ((2, 1), (5, 3), (1, 1), (4, 2), (1, 1)),
    "1d": ((23,), (5,), (2,), (3,), (1,)),
    "3d": ((4, 3, 5), (2, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 2)),
}


def grams(case: str, n: int, dtype: torch.dtype) -> tuple:
    """Both Grams, the sizes, and the patches [n, out, taps * channels] of the same pixels."""
    space, kernel, stride, padding, dilation = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(n, 3, *space, dtype=torch.float64)
    geometry = ConvGeometry((4, 3, *kernel), stride, padding, dilation, 1)
    taps = torch.eye(3 * torch.Size(kernel).numel(), dtype=torch.float64).view(-1, 3, *kernel)
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    patches = conv(x, taps, None, stride, padding, dilation)
    out = tuple(patches.shape[2:])
    patches = patches.flatten(2).transpose(1, 2)
    g = torch.randn(n, patches.shape[1], 4, dtype=torch.float64)
    pixels = ops.half_gram(x.flatten(2).transpose(1, 2)).to(dtype)
    return (pixels, ops.half_gram(g).to(dtype), space, out, geometry), patches, g


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_against_the_patches(case: str, dtype: torch.dtype, threads: int) -> None:
    arguments, patches, g = grams(case, 4, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product, trace, sizes = host.patch_products(*arguments)
    finally:
        torch.set_num_threads(before)
    exact = torch.einsum("btp,btd->bpd", g, patches).flatten(1).square().sum(1)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert product.dtype == trace.dtype == dtype
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=0)
    size = patches.flatten(1).square().sum(1)
    torch.testing.assert_close(trace.double(), size, rtol=tolerance, atol=0)
    pixels, outputs = (gram.double().flatten(1).norm(dim=1) for gram in arguments[:2])
    torch.testing.assert_close(sizes, pixels * outputs, rtol=tolerance, atol=0)


def test_few_samples() -> None:
    arguments, _, _ = grams("strides", 1, torch.float64)
    found, expected = host.patch_products(*arguments), ops.patch_products.reference(*arguments)
    torch.testing.assert_close(found, expected)
    assert host.patch_products(*grams("strides", 0, torch.float64)[0]) is NotImplemented


def test_strange_memory() -> None:
    """Grams that are not contiguous; types that it does not take."""
    (pixels, outputs, *rest), _, _ = grams("2d", 4, torch.float64)
    expected = ops.patch_products.reference(pixels[::2], outputs[::2], *rest)
    torch.testing.assert_close(host.patch_products(pixels[::2], outputs[::2], *rest), expected)
    assert host.patch_products(pixels.float(), outputs, *rest) is NotImplemented
    for given in ((pixels[:2], outputs), (pixels, outputs[:1]), (pixels[:, :, :-1], outputs)):
        assert host.patch_products(*given, *rest) is NotImplemented
    larger = tuple(10 * size for size in rest[0])
    assert host.patch_products(pixels, outputs, larger, *rest[1:]) is NotImplemented
    assert host.patch_products(pixels.to("meta"), outputs.to("meta"), *rest) is NotImplemented


def test_infinite_samples_stay_alone() -> None:
    (pixels, outputs, *rest), _, _ = grams("2d", 3, torch.float32)
    pixels[1, 2, 3] = torch.nan
    outputs[2, 0, 1] = torch.inf
    product, *_ = host.patch_products(pixels, outputs, *rest)
    assert product.isfinite().tolist() == [True, False, False]


def test_convolutions_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; and the reference does not."""
    called = []
    real = host.patch_products

    def spy(*args: Tensor) -> object:
        called.append(args)
        return real(*args)

    from fastclip.ops import dispatch

    assert backend_of("patch_products", torch.device("cpu"))[0] == "host"
    monkeypatch.setitem(dispatch._load("host"), "patch_products", spy)
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 6, 6), torch.randn(2, 4, 6, 6)
    geometry = ConvGeometry((4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    norm = ops.conv_ghost_norm(x, g, geometry)
    assert len(called) == 1
    with use_backend("reference"):
        torch.testing.assert_close(ops.conv_ghost_norm(x, g, geometry), norm, rtol=1e-5, atol=0)
    assert len(called) == 1

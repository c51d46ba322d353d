"""Convolutions: every argument in one, two and three dimensions, and every size of map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fastclip.rules.conv import _geometry
from tests.oracle import DTYPES, check_exact

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
ARGUMENTS = {
    "plain": {},
    "no-bias": {"bias": False},
    "pointwise": {"kernel_size": 1},
    "even-kernel": {"kernel_size": 2},
    "stride": {"stride": 2},
    "stride-beyond-kernel": {"stride": 3, "kernel_size": 2},
    "padding": {"padding": 1},
    "wide-padding": {"padding": 2, "stride": 2},
    "same": {"padding": "same"},
    "same-even-kernel": {"padding": "same", "kernel_size": 2},
    "same-dilated": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 1, "padding_mode": "replicate", "stride": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "circular-same": {"padding": "same", "padding_mode": "circular", "kernel_size": 2},
    "dilation": {"dilation": 2},
    "dilation-stride-padding": {"dilation": 2, "stride": 2, "padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "depthwise-stride": {"groups": 4, "padding": 2, "stride": 3, "dilation": 2},
    "groups-stride": {"groups": 2, "stride": 2, "padding": 1, "bias": False},
}


def conv(ndim: int, **arguments: object) -> nn.Module:
    """Four channels to eight, kernel 3, unless the arguments say otherwise."""
    return CONV[ndim](4, 8, **{"kernel_size": 3, **arguments})


def after_a_layer(ndim: int, layer: nn.Module) -> nn.Module:
    """Behind a pointwise convolution of 3 channels, so that the input's gradient matters."""
    return nn.Sequential(CONV[ndim](3, 4, 1), nn.Tanh(), layer, nn.Tanh())


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("ndim", CONV)
def test_arguments(ndim: int, arguments: str, dtype: torch.dtype) -> None:
    model = after_a_layer(ndim, conv(ndim, **ARGUMENTS[arguments]))
    size = (9, 8, 7)[:ndim] if ndim > 1 else (17,)
    check_exact(model, torch.randn(3, 3, *size), dtype=dtype)


INTEGERS = {
    "unsigned bytes": np.uint8,
    "unsigned": np.uint64,
    "signed bytes": np.int8,
    "tensors": lambda value: torch.tensor(value),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ndim", CONV)
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_other_kinds(kind: str, ndim: int) -> None:
    """Of which torch takes all: unsigned ones have no -1, and a tensor's value may change."""
    _geometry.cache_clear()
    made = INTEGERS[kind]
    sizes = 5, 6, 7
    x = torch.randn(3, 4, *sizes[:ndim])
    layer = conv(ndim, padding=1, stride=2)
    for name, value in (("padding", 1), ("stride", 2), ("dilation", 1)):
        setattr(layer, name, (made(value),) * ndim)
    check_exact(layer, x, dtype=torch.float64)
    check_exact(
        conv(ndim, padding=1, stride=2), x, dtype=torch.float64
    )  # of the same geometry, and of equal numbers
    layer.padding = tuple(made(2) for _ in range(ndim))
    check_exact(layer, x, dtype=torch.float64)
    if kind == "tensors":
        layer.padding[0].fill_(1)
        check_exact(layer, x, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("ndim", CONV)
def test_alone(ndim: int, loss_reduction: str, dtype: torch.dtype) -> None:
    """The input needs no gradient."""
    x = torch.randn(4, 4, *(6,) * ndim)
    check_exact(conv(ndim, padding=1), x, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": (3, 5), "padding": (1, 2)},
        {"kernel_size": (1, 3), "stride": (2, 1)},
        {"kernel_size": (3, 2), "stride": (1, 2), "dilation": (2, 1), "padding": (0, 1)},
        {"kernel_size": (3, 2), "padding": (2, 1), "padding_mode": "circular"},
    ],
    ids=str,
)
def test_oblong(arguments: dict, dtype: torch.dtype) -> None:
    check_exact(after_a_layer(2, conv(2, **arguments)), torch.randn(3, 3, 8, 9), dtype=dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": 1},
        {"padding": 1, "stride": 2},
        {"groups": 2, "dilation": 2},
        {"padding": "same"},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [5, 8, 16, 32])
def test_sizes(size: int, arguments: dict, dtype: torch.dtype) -> None:
    """Small maps through Grams, large ones through per-sample gradients."""
    check_exact(after_a_layer(2, conv(2, **arguments)), torch.randn(3, 3, size, size), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "size"), [(64, 4), (48, 8), (16, 16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_wide(channels: int, size: int, stride: int, dtype: torch.dtype) -> None:
    """Channel counts at which a kept per-sample gradient costs more than a Gram."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
    )
    # what rounding can hide of a Gram norm that is made of one of pixels: 1.7e-5, of units 2.5e-5
    tol = 3e-5 if dtype == torch.float32 else None
    check_exact(model, torch.randn(3, 3, size, size), dtype=dtype, tol=tol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ndim", "length"), [(1, 200), (3, 10)])
def test_large_maps_in_other_dimensions(ndim: int, length: int, dtype: torch.dtype) -> None:
    check_exact(
        after_a_layer(ndim, conv(ndim, padding=1)),
        torch.randn(2, 3, *(length,) * ndim),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [3, 5, (5, 4)])
def test_the_kernel_covers_the_map(kernel: int | tuple, dtype: torch.dtype) -> None:
    model = after_a_layer(2, conv(2, kernel_size=kernel, padding=1))
    check_exact(model, torch.randn(3, 3, 3, 3), dtype=dtype)


class Permuted(nn.Module):
    """Images [b, h, w, c] seen as [b, c, h, w] without a copy, and back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [6, 20])
def test_permuted(size: int, stride: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Permuted(conv(2, stride=stride, padding=1)))
    check_exact(model, torch.randn(3, size, size, 4), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 20])
def test_channels_last(size: int, dtype: torch.dtype) -> None:
    model = after_a_layer(2, conv(2, stride=2, padding=1)).to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, size, size).to(memory_format=torch.channels_last)
    check_exact(model, x, dtype=dtype)
    check_exact(conv(2), x.repeat(1, 2, 1, 1)[:, :4, 1:], dtype=dtype)  # and a slice of a view

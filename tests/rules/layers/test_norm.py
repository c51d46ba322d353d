"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm, between layers that need their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import DTYPES, check_exact

LAST = {
    "layer": lambda: nn.LayerNorm(6),
    "layer-no-bias": lambda: nn.LayerNorm(6, bias=False),
    "layer-no-parameters": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "layer-two-dimensions": lambda: nn.LayerNorm((4, 6)),
    "layer-large-eps": lambda: nn.LayerNorm(6, eps=0.5),
    "rms": lambda: nn.RMSNorm(6),
    "rms-eps": lambda: nn.RMSNorm(6, eps=0.5),
    "rms-two-dimensions": lambda: nn.RMSNorm((4, 6)),
}
CHANNEL = {
    "group": lambda ndim: nn.GroupNorm(2, 6),
    "group-one": lambda ndim: nn.GroupNorm(1, 6, eps=0.1),
    "group-each": lambda ndim: nn.GroupNorm(6, 6),
    "instance": lambda ndim: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[ndim - 1](
        6, affine=True
    ),
}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def randomized(layer: nn.Module) -> nn.Module:
    """Weights of one and biases of zero would hide a rule that forgets them."""
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 3, 4, 6)])
@pytest.mark.parametrize("layer", LAST)
def test_last_dimensions(layer: str, shape: tuple, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), randomized(LAST[layer]()), nn.Tanh(), nn.Linear(6, 3))
    check_exact(model, torch.randn(shape), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("layer", ["layer", "layer-no-bias", "rms"])
def test_alone_over_rows(layer: str, loss_reduction: str, dtype: torch.dtype) -> None:
    """[b, d]: no position between the sample and its features; the input needs no gradient."""
    model = randomized(LAST[layer]())
    check_exact(model, torch.randn(5, 6), dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ndim", CONV)
@pytest.mark.parametrize("layer", CHANNEL)
def test_channels(layer: str, ndim: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(
        CONV[ndim](3, 6, 1), randomized(CHANNEL[layer](ndim)), nn.Tanh(), CONV[ndim](6, 2, 1)
    )
    check_exact(model, torch.randn(4, 3, *(5, 4, 3)[:ndim]), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", ["group", "instance"])
def test_alone_over_channels(layer: str, dtype: torch.dtype) -> None:
    check_exact(randomized(CHANNEL[layer](2)), torch.randn(4, 6, 5, 5), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_over_rows(dtype: torch.dtype) -> None:
    """[b, c] without a map."""
    model = nn.Sequential(nn.Linear(4, 6), randomized(nn.GroupNorm(2, 6)), nn.Linear(6, 2))
    check_exact(model, torch.randn(5, 4), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", ["group", "instance"])
def test_channels_last(layer: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), randomized(CHANNEL[layer](2)), nn.Conv2d(6, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last)
    check_exact(model, x, dtype=dtype)
    check_exact(model, x[:1], dtype=dtype, C=1.0)  # torch's own InstanceNorm is wrong here


class Transposed(nn.Module):
    """Normalizes over d of [b, d, t], through a view."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", ["layer", "rms"])
def test_transposed(layer: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 1), Transposed(randomized(LAST[layer]())))
    check_exact(model, torch.randn(4, 3, 7), dtype=dtype)

"""Linear and transformers' Conv1D: inputs of any rank, with and without upstream layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.oracle import DTYPES, check_exact

SHAPES = {2: (5, 6), 3: (5, 7, 6), 4: (5, 3, 4, 6)}
LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "linear-no-bias": lambda: nn.Linear(6, 4, bias=False),
    "transformers-conv1d": lambda: Conv1D(4, 6),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_alone(layer: str, rank: int, loss_reduction: str, dtype: torch.dtype) -> None:
    """The input of the first layer needs no gradient."""
    x = torch.randn(SHAPES[rank])
    check_exact(LAYERS[layer](), x, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_passes_the_gradient_on(layer: str, rank: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), LAYERS[layer](), nn.Tanh(), nn.Linear(4, 3))
    check_exact(model, torch.randn(SHAPES[rank]), dtype=dtype)


class Transposed(nn.Module):
    """Gives its layer [b, t, d] as a view of [b, d, t]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)  # the gradient is a view, too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", ["linear", "linear-no-bias"])  # Conv1D's own view() fails
def test_non_contiguous(layer: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), Transposed(LAYERS[layer]()))
    check_exact(model, torch.randn(5, 6, 7), dtype=dtype)


class Mean(nn.Module):
    """[b, t, d] -> [b, d]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_expanded_gradient(layer: str, dtype: torch.dtype) -> None:
    """Pooling gives an output gradient of stride zero."""
    model = nn.Sequential(LAYERS[layer](), Mean(), nn.Linear(4, 3))
    check_exact(model, torch.randn(5, 7, 6), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "d", "p"),
    [(1, 40, 30), (2, 64, 64), (64, 3, 5), (256, 48, 8), (128, 96, 160), (512, 16, 16)],
)
def test_every_norm_method(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    """Long, short, wide and narrow: whichever rule the planner picks for the shape."""
    model = nn.Sequential(nn.Linear(d, p), nn.Tanh(), nn.Linear(p, 4))
    check_exact(model, torch.randn(3, t, d), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_one(dtype: torch.dtype) -> None:
    check_exact(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(1, 3, 6), dtype=dtype)
    check_exact(nn.Linear(6, 4), torch.randn(1, 6), dtype=dtype, C=0.1)


@pytest.mark.parametrize("C", [1e-3, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_clipped_or_none(dtype: torch.dtype, C: float) -> None:
    check_exact(nn.Linear(6, 4), torch.randn(5, 3, 6), dtype=dtype, C=C)

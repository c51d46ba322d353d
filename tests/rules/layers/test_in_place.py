"""In-place operations on a layer's output: autograd must not meet a view of a custom function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.oracle import DTYPES, check_exact

LAYERS = {
    "linear": (lambda: nn.Linear(6, 6), (4, 6)),
    "linear-positions": (lambda: nn.Linear(6, 6), (4, 5, 6)),
    "linear-no-bias": (lambda: nn.Linear(6, 6, bias=False), (4, 5, 6)),
    "linear-rank-4": (lambda: nn.Linear(6, 6), (4, 3, 5, 6)),
    "transformers-conv1d": (lambda: Conv1D(6, 6), (4, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 6, 3), (4, 6, 8)),
    "conv2d": (lambda: nn.Conv2d(6, 6, 3), (4, 6, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(6, 6, 2), (4, 6, 4, 4, 4)),
    "layer-norm": (lambda: nn.LayerNorm(6), (4, 5, 6)),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 5, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (4, 6, 8)),
    "instance-norm": (lambda: nn.InstanceNorm2d(6, affine=True), (4, 6, 5, 5)),
    "prelu": (lambda: nn.PReLU(6), (4, 6, 5)),
}
TABLES = {"embedding": lambda: nn.Embedding(7, 6), "bag": lambda: nn.EmbeddingBag(7, 6)}


class Residual(nn.Module):
    """Adds in place and scales in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y += 1.0
        y *= 0.5
        return y


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_after_a_layer(layer: str, last: bool, dtype: torch.dtype) -> None:
    """Inside the model, and on its output, which opens the pass."""
    make, shape = LAYERS[layer]
    model = nn.Sequential(Residual(make()), nn.ReLU(inplace=True))
    if not last:
        model.append(nn.Linear(shape[-1] if layer in LAST else output_width(layer), 3))
    check_exact(model, torch.randn(shape), dtype=dtype)


LAST = ("linear", "linear-positions", "linear-no-bias", "linear-rank-4", "transformers-conv1d",
        "layer-norm", "rms-norm", "group-norm", "instance-norm", "prelu")  # fmt: skip


def output_width(layer: str) -> int:
    """Last dimension of a convolution's output."""
    return {"conv1d": 6, "conv2d": 6, "conv3d": 3}[layer]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", TABLES)
def test_after_a_table(table: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(Residual(TABLES[table]()), nn.ReLU(inplace=True), nn.Linear(6, 3))
    check_exact(model, torch.randint(7, (4, 5)), dtype=dtype)

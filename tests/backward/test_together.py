"""Small parameters of one size are clipped together: exactly, whatever becomes of single samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastclip.clipping import per_layer
from tests.oracle import (
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)

B, D = 5, 6


class Small(nn.Module):
    """Biases and norms of one size, and of another; a table; one bias used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.layers[0](x))
        x = self.norms[1](torch.tanh(self.layers[1](torch.tanh(self.layers[1](x)))))
        return self.head(torch.tanh(self.layers[2](x)).mean(1))


def test_exact() -> None:
    check_exact(Small(), torch.randn(B, 4, D), dtype=torch.float64)


def test_a_sample_that_is_not_finite() -> None:
    """Its scale is 0: the others are summed as if it were not there."""
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(B, 4, D, dtype=torch.float64)
    expected = clipped_sum(per_sample_gradients(model, x[1:]), 0.5)
    x[0, 1, 2] = torch.nan
    _, private, _, _ = make_private(model, max_grad_norm=0.5)
    backward(private, x)
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)


def test_per_layer() -> None:
    """Each at a threshold of its own, in the order of the parameters."""
    torch.manual_seed(0)
    model, x = Small().double(), torch.randn(B, 4, D, dtype=torch.float64)
    grads = per_sample_gradients(model, x)
    thresholds = [0.1 + 0.01 * i for i in range(len(grads))]
    expected = {
        name: clipped_sum({name: g}, c)[name]
        for (name, g), c in zip(grads.items(), thresholds, strict=True)
    }
    _, private, _, _ = make_private(model, clipping=per_layer(), max_grad_norm=thresholds)
    backward(private, x)
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)

"""Whose an entry is, read from gradients: of many entries, and of numbers too small to scale exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastclip.samples import owners as module
from fastclip.samples.owners import MIXED, NOBODY, coded_by, owners
from tests.oracle import check_exact


@pytest.mark.parametrize("at_once", [1, 5, 2**20])
def test_some_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples along the first axis; one entry of all of them; one of nobody."""
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    torch.manual_seed(0)
    gradient = torch.randn(4, 7)
    gradient[2, 3] = 0
    scaled = coded_by(gradient, 0, torch.arange(4) - 2)
    scaled[1, 1] = 2 ** torch.arange(-2.0, 2.0) @ gradient[:, 1]
    gradient[1, 1] = gradient[:, 1].sum()
    found = owners(gradient, scaled, 4)
    expected = torch.arange(4, dtype=torch.int8)[:, None].repeat(1, 7)
    expected[2, 3], expected[1, 1] = NOBODY, MIXED
    assert torch.equal(found, expected)
    assert owners(gradient[:0], scaled[:0], 4).shape == (0, 7)


class Deep(nn.Module):
    """Many layers, each of which takes half of the gradient, beside one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(depth) for m in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 2)
        )
        self.beside = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.beside(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("depth", [150, 200])
def test_gradients_that_vanish(depth: int) -> None:
    """Below the normal numbers a power of two rounds: these are nobody's, and the model is exact."""
    torch.manual_seed(0)
    check_exact(Deep(depth), torch.randn(3, 4), dtype=torch.float32)

"""The small network that most traps are set in."""

from __future__ import annotations

import torch
from torch import nn


def mlp(out: int = 3) -> nn.Sequential:
    """Two layers, float64."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, out)).double()


def rows(b: int = 5) -> torch.Tensor:
    """Inputs of `mlp`."""
    return torch.randn(b, 6, dtype=torch.float64)

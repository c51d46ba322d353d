"""The private training that cases of load run, at their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

FEATURES, CLASSES = 16, 4


def classifier(hidden: int = 32) -> nn.Module:
    """A small model of FEATURES numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def rows(number: int) -> TensorDataset:
    """Random rows with labels."""
    torch.manual_seed(1)
    return TensorDataset(torch.randn(number, FEATURES), torch.randint(CLASSES, (number,)))


class Training:
    """A model that was made private.

    Args:
        model: gives scores of classes. loader: of its rows. options: of make_private.
    """

    def __init__(self, model: nn.Module, loader: DataLoader[Any], **options: Any) -> None:
        self.engine = FastPrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **options,
        )  # fmt: skip

    def step(self, x: Tensor, y: Tensor) -> None:
        """On one batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

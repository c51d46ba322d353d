"""A clipping function of one's own, checked before it is trusted; one that lies is refused."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.clipping import Clipping
from fastclip.testing import check_strategy


@dataclass(frozen=True)
class Smooth:
    """C / sqrt(n^2 + C^2)."""

    normalized: bool = False
    cutoff: ClassVar[float | None] = None

    def __call__(self, norms, thresholds):
        return thresholds / (norms.square() + thresholds.square()).sqrt()

    def sensitivity(self, thresholds):
        return thresholds


class TooSmall(Smooth):
    """Says half of what a row can contribute."""

    def sensitivity(self, thresholds):
        return thresholds / 2


def private(strategy):
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    engine = FastPrivacyEngine()
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
        clipping=strategy,
    )  # fmt: skip


check_strategy(Clipping(Smooth())).raise_if_wrong()
engine, model, optimizer, loader = private(Clipping(Smooth()))
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
try:
    private(Clipping(TooSmall()))
except ValueError as error:
    refused = str(error)
assert "sensitivity" in refused
print(f"done: epsilon {engine.get_epsilon(1e-3):.2f}")

"""No memory while a model is looked at whose rows look at each other: it must not pass as another."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bench.faults.injected import AtOperator, no_memory, out_of_memory
from bench.faults.outcomes import ERROR, Outcome, expect
from fastclip import FastPrivacyEngine
from fastclip.errors import BatchSizeError

WAYS = ("rows less their mean", "a gradient of the mean alone", "the mean, in large batches only")
LARGE = 5
"""Rows of a batch that is not large yet: in such a one the rows of the last way do not meet."""
EVERY = 3
"""Of the operators of a look."""
OPERATORS = 360
"""Of a look, about: it ends where the model is refused."""
RUNS = len(WAYS) * OPERATORS // EVERY


class Coupled(nn.Module):
    """Two layers, between which the rows of a batch meet in one of `WAYS`."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.inside, self.out, self.way = nn.Linear(6, 5), nn.Linear(5, 3), way

    def forward(self, x: Tensor) -> Tensor:  # [b, d] -> [b, p]
        hidden = torch.tanh(self.inside(x))
        mean = hidden.mean(0, keepdim=True)
        if self.way == 0:
            hidden = hidden - mean
        elif self.way == 1:
            hidden = hidden + (mean - mean.detach())
        elif len(x) > LARGE:
            hidden = hidden * (1 + mean)
        return self.out(hidden)


def coupled(seed: int, folder: Path) -> Outcome:
    """`seed` says how the rows are coupled, and which operator has no memory."""
    way, operator = seed % len(WAYS), seed // len(WAYS) * EVERY
    torch.manual_seed(0)
    model = Coupled(way)
    private, optimizer, loader = FastPrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(32, 6), torch.zeros(32).long()), 8),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    fails = no_memory if operator % 2 else out_of_memory
    told = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        try:
            with AtOperator(operator if not number else -1, fails):
                functional.cross_entropy(private(x), y).backward()
        except (RuntimeError, BatchSizeError) as error:
            told.append(type(error).__name__)
            continue
        met = way < 2 or len(x) > LARGE
        expect(not met, f"{WAYS[way]}: accepted in batch {number}, operator {operator} failed")
    return Outcome(ERROR, f"first {told[0]}; never accepted")

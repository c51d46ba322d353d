"""A network in which something may stand between two layers, and one step of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.oracle import (
    backward,
)

B, T, D = 4, 3, 6
Use = Callable[[nn.Module, Tensor], Tensor]


class Hidden(nn.Module):
    """Something between two layers, behind a gate, a scale or a head that lets nothing through yet."""

    def __init__(self, use: Use, behind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.raw = nn.Parameter(torch.zeros(1, T, D))
        scale = {"zero gate": 0.0, "layer scale": 1e-6}.get(behind)
        self.scale = None if scale is None else nn.Parameter(torch.full((1, 1, D), scale))
        if behind == "zero head":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        if behind == "small head":
            nn.init.normal_(self.head.weight, std=1e-8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.use(self, h) if self.scale is None else h + self.scale * self.use(self, h)
        return self.head(h.mean(1))


def step(private: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    backward(private, x)
    optimizer.step()


class LatePositions(nn.Module):
    """A position table in a branch that is reached later."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.head, self.rank, self.calls = nn.Linear(D, D), nn.Linear(D, 2), rank, 0
        self.table, self.on = nn.Embedding(9, D), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.on:
            ids = torch.arange(x.shape[1])
            h = h + self.table(ids if self.rank == 1 else ids[None])
        return self.head(torch.tanh(h)).mean(1)

"""Canaries as rows, and models in which each has two entries of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate


class Canaries(Dataset):
    """Those that are in, one or several rows each; a row is the number of its canary."""

    def __init__(self, inside: Tensor, rows: int) -> None:
        self.numbers = inside.nonzero().flatten().repeat_interleave(rows)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> tuple[Tensor]:
        return (self.numbers[row],)

    def __getitems__(self, rows: Sequence[int]) -> Tensor:
        """At once: row by row they would take longer than a step."""
        return self.numbers[torch.as_tensor(rows, dtype=torch.int64, device="cpu")]


class Entries(nn.Module):
    """Entry [j, i] of two linear layers for each canary; the output is [b]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        layer = partial(nn.Linear, width, width, bias=False, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, numbers: Tensor) -> Tensor:
        columns = nn.functional.one_hot(numbers % self.width, self.width).to(torch.float32)
        out = self.layers[0](columns) + self.layers[1](columns)
        return out.gather(1, (numbers // self.width).unsqueeze(1)).squeeze(1)


class Tables(nn.Module):
    """A row of two embedding tables for each canary; the output is [b]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        table = partial(nn.Embedding, width**2, 1, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([table(), table()])

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.layers[0](numbers) + self.layers[1](numbers)).squeeze(1)


def collate(rows: Any) -> tuple[Tensor]:
    """Numbers that were fetched as a whole, or row by row."""
    return (rows,) if isinstance(rows, Tensor) else tuple(default_collate(rows))

"""Data in the shapes of the programs' own: something to learn, nobody's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


def images(rows: int, channels: int, size: int, classes: int = 10, seed: int = 0) -> TensorDataset:
    """([rows, channels, size, size], [rows]): a pattern for each class, and noise."""
    rng = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, channels, size, size, generator=rng)
    labels = torch.randint(classes, (rows,), generator=rng)
    noise = torch.randn(rows, channels, size, size, generator=rng)
    return TensorDataset(0.5 * patterns[labels] + noise, labels)


def sequences(
    rows: int, words: int, shortest: int, longest: int, classes: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Rows of (tokens [length], label []): each class prefers words of its own."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=rng).tolist()
    labels = torch.randint(classes, (rows,), generator=rng)
    preferred = torch.randint(1, words, (classes, 32), generator=rng)
    found = []
    for length, label in zip(lengths, labels, strict=True):
        own = preferred[label][torch.randint(32, (length,), generator=rng)]
        others = torch.randint(1, words, (length,), generator=rng)
        found.append((torch.where(torch.rand(length, generator=rng) < 0.3, own, others), label))
    return found


class Rows(Dataset):
    """A list as a data set."""

    def __init__(self, rows: list) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> object:
        return self._rows[index]

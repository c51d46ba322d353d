"""Canaries as rows, and models in which each has entries of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

LOUD = 1e4
"""Entries of most canaries' gradients: far above every threshold."""
EVERY = 11
"""Each such canary's norm is another one; no multiple of the groups, which alternate."""
_SHARED = 1 / 16
"""A canary's gradient at the bias that it shares with others, where its own entries have 1 or 2."""
_GOLDEN = 0.6180339887498949


class Canaries(Dataset):
    """Those that are there, one or several rows each; a row is the number of its canary."""

    def __init__(self, present: Tensor, rows: int) -> None:
        self.numbers = present.nonzero().flatten().repeat_interleave(rows)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> tuple[Tensor]:
        return (self.numbers[row],)

    def __getitems__(self, rows: Sequence[int]) -> Tensor:
        """At once: row by row they would take longer than a step."""
        return self.numbers[torch.as_tensor(rows, dtype=torch.int64, device="cpu")]


class Model(nn.Module):
    """What canaries are trained on: number k of them has gradient `loud[k] * own` at entries of its own.

    Attributes:
        own: at its entry of each of the first parameters, [parameters].
        shared: norm of its gradient in the last one, whose entries are others', too; 0: there is none.
    """

    own: tuple[float, ...]
    shared = 0.0

    @property
    def parts(self) -> Tensor:
        """Norms of a canary's gradient whose `loud` is 1 in each parameter, [parameters]."""
        found = [*self.own, self.shared] if self.shared else self.own
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    @property
    def norm(self) -> float:
        return float(self.parts.norm())

    def sums(self, parts: Tensor) -> list[Tensor]:
        """Of canaries' gradients with these lengths in each parameter, [parameters, canaries]: flat."""
        return list(parts[: len(self.own)])


class Entries(Model):
    """Entry [j, i] of two linear layers for each canary, and j of a bias; the output is [b].

    Args:
        tied: the layers have one weight, whose gradient is the sum of its two uses.
    """

    shared = _SHARED

    def __init__(self, width: int, tied: bool = False) -> None:
        super().__init__()
        self.width = width
        layer = partial(nn.Linear, width, width, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([layer(bias=False), layer()])
        self.own = (1.0, 1.0)
        if tied:
            self.layers[1].weight = self.layers[0].weight
            self.own = (2.0,)

    def forward(self, numbers: Tensor) -> Tensor:
        columns = nn.functional.one_hot(numbers % self.width, self.width).to(torch.float32)
        columns = columns / _SHARED
        out = _SHARED * (self.layers[0](columns) + self.layers[1](columns))
        return out.gather(1, (numbers // self.width).unsqueeze(1)).squeeze(1)

    def sums(self, parts: Tensor) -> list[Tensor]:
        return [*super().sums(parts), parts[-1].reshape(self.width, self.width).sum(1)]


class Tables(Model):
    """A row of two embedding tables for each canary; the output is [b]."""

    own = (1.0, 1.0)

    def __init__(self, width: int) -> None:
        super().__init__()
        table = partial(nn.Embedding, width**2, 1, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([table(), table()])

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.layers[0](numbers) + self.layers[1](numbers)).squeeze(1)


def weights_of(canaries: int) -> Tensor:
    """Factors of the rate, float64 [canaries], where they differ: a quarter of it for every fourth."""
    numbers = torch.arange(canaries, dtype=torch.int64, device="cpu")
    return torch.where(numbers % 4 == 3, 0.25, 1.0).to(torch.float64)


def loudness(canaries: int, norm: float, threshold: float) -> tuple[Tensor, Tensor]:
    """How loud each canary is, float32 [canaries], and which of them are LOUD.

    Norms of the others are spread evenly, in logarithms, from a tenth of the first threshold to 1e4
    times it.

    Args:
        norm: of a canary whose loudness is 1.
        threshold: C of the first step.
    """
    numbers = torch.arange(canaries, dtype=torch.float64, device="cpu")
    others = numbers % EVERY == EVERY // 2
    place = (numbers * _GOLDEN) % 1
    loud = torch.where(others, threshold / norm * 10 ** (5 * place - 1), LOUD)
    return loud.to(torch.float32), ~others


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Its parameters for an optimizer: the first in a group, the others in another of another rate."""
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.5}]


def collate(rows: Any) -> tuple[Tensor]:
    """Numbers that were fetched as a whole, or row by row."""
    return (rows,) if isinstance(rows, Tensor) else tuple(default_collate(rows))

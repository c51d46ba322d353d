"""A data set with canaries among its rows (fastclip.audit.mix_in), and whether a loader draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fastclip.data.samplers import Choice


class Mixed(ConcatDataset[Any]):
    """Rows, and behind them the canaries that are in.

    Args:
        data_set: the rows. canaries: those whose coins say so.
        coins: the name of all coins, which nothing else bears; copies of the data set keep it.
    """

    def __init__(self, data_set: Dataset[Any], canaries: Dataset[Any], coins: str) -> None:
        super().__init__([data_set, canaries])
        self.coins = coins


@dataclass(frozen=True)
class Canaries:
    """Those of the data set that a loader draws from."""

    coins: str
    """As of Mixed."""
    drawn: bool
    """Each may be drawn, and as a unit of its own."""


def canaries_of(data_set: Any, choice: Choice | None, unit: Tensor | None) -> Canaries | None:
    """None for a data set without any, or one that was made from a mixed one (a subset, a transform).

    Args:
        choice: of the rows to draw; None where the loader's own sampler draws.
        unit: of each row, -1 for those that are not drawn; None where rows are drawn one by one.
    """
    if not isinstance(data_set, Mixed):
        return None
    may = torch.ones(len(data_set), dtype=torch.bool, device="cpu")
    if unit is not None:
        alone = torch.bincount(unit[unit >= 0]) == 1
        may = (unit >= 0) & alone[unit]
    elif choice is not None:
        weights = choice.weights if choice.rates is None else choice.rates
        if weights is not None:
            may = weights > 0
        elif choice.rows is not None:
            may.zero_()[choice.rows] = True
    first = len(data_set.datasets[0])  # type: ignore[arg-type]
    return Canaries(data_set.coins, bool(may[first:].all()))

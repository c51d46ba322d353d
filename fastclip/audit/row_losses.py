"""Losses of canaries, one a row, of a model at weights that are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fastclip.errors import ArgumentError


def one_a_row(found: Tensor, count: int) -> Tensor:
    """Losses of `count` rows, float64 on the CPU.

    Raises:
        ArgumentError: they are not one a row.
    """
    if found.shape != (count,):
        raise ArgumentError(
            f"losses expects to return one loss a row, [{count}], got shape {tuple(found.shape)}; take "
            "reduction='none', and the mean over what is not the batch"
        )
    return found.detach().double().cpu()


class AtWeights:
    """A model with given weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self._model, self._weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._weights, args, kwargs)

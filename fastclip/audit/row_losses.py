"""Losses of canaries, one a row, and their derivatives by a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from fastclip.errors import ArgumentError

Losses = Callable[[Any, Any], Tensor]
"""losses(model, batch): the loss of each row, [b]."""
Batches = Iterable[tuple[int, Any]]
"""(rows, batch) of all canaries, in order."""


def batches_of(canaries: Dataset[Any], batch_size: int, collate: Any) -> Iterator[tuple[int, Any]]:
    """With the number of canaries in each."""
    count = len(canaries)  # type: ignore[arg-type]
    batches = DataLoader(canaries, batch_size=batch_size, collate_fn=collate)
    for number, batch in enumerate(batches):
        yield min(batch_size, count - number * batch_size), batch


def losses_of(model: nn.Module, losses: Losses, batches: Batches) -> Tensor:
    """Of a model in evaluation mode, [canaries], float64 on the CPU.

    Raises:
        ArgumentError: they are not one a row.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([_one_a_row(losses(model, batch), count) for count, batch in batches])
    finally:
        for part, training in modes:
            part.training = training


class Slopes(nn.Module):
    """How the losses of rows change along a direction of the weights.

    Args:
        model: of its own, which it is called with; what it is at is said at each call.
        losses: which may use the model as any other: its parts, its parameters, its attributes.
    """

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self._losses = model, (losses,)  # in a tuple: it may be a module

    def forward(self, batch: Any) -> Tensor:
        """The loss of each row."""
        return self._losses[0](self.model, batch)

    def along(
        self, step: dict[str, Tensor], weights: dict[str, Tensor], rest: dict[str, Tensor],
        batches: Batches,
    ) -> Tensor:  # fmt: skip
        """[canaries], float64 on the CPU; one pass in forward mode.

        Args:
            step: the direction, by parameter. weights: the same parameters.
            rest: the other parameters and the buffers.

        Raises:
            ArgumentError: losses that are not one a row, or do not depend on the model.
        """
        primal, tangent, held = (
            {f"model.{n}": t for n, t in d.items()} for d in (weights, step, rest)
        )
        found = []
        for count, batch in batches:

            def at(moved: dict[str, Tensor], batch: Any = batch) -> Tensor:
                return functional_call(self, {**held, **moved}, (batch,))

            try:
                with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                    slopes = jvp(at, (primal,), (tangent,), strict=True)[1]
            except RuntimeError as error:
                if "independent of the inputs" not in str(error):
                    raise
                raise ArgumentError(
                    "losses expects to return losses of the model that it is given, and what it returns "
                    "does not depend on it: call the argument, losses(model, batch), not a model from "
                    "outside"
                ) from error
            found.append(_one_a_row(slopes, count))
        return torch.cat(found)


def _one_a_row(found: Tensor, count: int) -> Tensor:
    if found.shape != (count,):
        raise ArgumentError(
            f"losses expects to return one loss a row, [{count}], got shape {tuple(found.shape)}; take "
            "reduction='none', and the mean over what is not the batch"
        )
    return found.detach().double().cpu()

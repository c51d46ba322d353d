"""Losses whose rows do not touch each other, and a check that a model's own loss is one.

transformers averages over all tokens of a batch, or divides by the tokens of several batches
(num_items_in_batch): a long row then shrinks the gradients of the others before they are clipped.

Index letters: b row, t position, k class or token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import ArgumentError

IGNORED = -100
WAY_OUT = (
    "pass PrivateTrainer(compute_loss_func=...), a function (outputs, labels, num_items_in_batch) that "
    "returns one loss a row, [b]"
)


def rows_of(inputs: dict[str, Any]) -> int:
    """Rows of a batch: the first dimension of its labels, or of the first tensor."""
    tensors = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim()]
    labels = inputs.get("labels")
    return len(labels) if isinstance(labels, Tensor) and labels.dim() else len(tensors[0])


def take(inputs: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """These rows of a batch, as plain tensors."""
    size = rows_of(inputs)
    return {
        name: v.as_subclass(Tensor)[rows]
        if isinstance(v, Tensor) and v.dim() and len(v) == size
        else v
        for name, v in inputs.items()
    }


@torch.no_grad()
def check_uncoupled(
    loss_of: Callable[[dict[str, Any]], Tensor], inputs: dict[str, Any], tolerance: float
) -> None:
    """Refuse a loss that is not the mean of its rows' own losses.

    Two rows are compared with each alone. Of token labels the second row keeps a single one, so
    that a mean over the tokens of both gives itself away.

    Args:
        loss_of: the scalar loss of a batch, without dropout. inputs: at least two rows.
        tolerance: relative.

    Raises:
        ArgumentError: with the way out.
    """
    labels = inputs.get("labels")
    pair = [0, 1]
    tokens = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    if tokens:
        assert isinstance(labels, Tensor)
        longest = int((labels != IGNORED).sum(1).argmax())
        pair = [longest, 1 if longest == 0 else 0]
    two = take(inputs, pair)
    if tokens:
        places = (two["labels"][1] != IGNORED).nonzero().flatten()
        kept = two["labels"].clone()
        kept[1, places[:-1]] = IGNORED  # the last one: a shifted loss does not use the first
        two["labels"] = kept
    both = float(loss_of(two))
    alone = [float(loss_of(take(two, [row]))) for row in (0, 1)]
    mean = sum(alone) / 2
    if not abs(both - mean) <= tolerance * max(1.0, abs(mean)):
        raise ArgumentError(
            f"the loss of two rows is {both:.6g}, but the mean of their own losses is {mean:.6g}: the "
            f"loss couples rows (a mean over the tokens of the batch?), so no row can be clipped; "
            f"{WAY_OUT}"
        )

"""Outputs that belong to no one row: a loss computed inside the model, scores of rows against rows.

A mean of the rows' own losses gives every row the same gradient whatever the others hold. A mean over
tokens, a contrastive loss, a statistic of the batch do not; they may be returned, but not trained on.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.errors import PER_SAMPLE, BatchSizeError
from fastclip.samples.inputs import flatten, rebuild, tensors_of
from fastclip.samples.stopped import stop_gradients

if TYPE_CHECKING:
    from fastclip.samples.layout import Guards


def refuse_gradients(guards: Guards, output: Any, *, replaced: bool = False) -> Any:
    """Let no gradient come in through outputs that couple rows.

    Args:
        guards: of the call's inputs. output: of the call. replaced: the model's own mean cross
            entropies are per sample.

    Returns:
        The output, in which views take the place of what couples rows: other outputs may be made of it.
    """
    stop_gradients(guards.spreading, output)
    if not guards.mixed:
        return output
    output = _apart(guards.mixed, output)
    for number, tensor in enumerate(tensors_of(output)):
        if guards.mixed.get(number) == tensor.dim() and tensor.requires_grad:
            tensor.register_hook(partial(_refuse, number, tuple(tensor.shape), replaced))
    return output


def _apart(numbers: Collection[int], output: Any) -> Any:
    leaves, structure = flatten(output)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, PackedSequence))]
    for number in numbers:
        x = leaves[places[number]] if number < len(places) else None
        if isinstance(x, Tensor):
            leaves[places[number]] = x.view_as(x)
    return rebuild(leaves, structure)


def _refuse(number: int, shape: tuple[int, ...], replaced: bool, gradient: Tensor) -> None:
    way_out = (
        "model_loss='per_sample' does not know this loss:" if replaced else f"{PER_SAMPLE}, or"
    )
    raise BatchSizeError(
        f"output {number} of the model, of shape {list(shape)}, is part of the loss, but one sample's "
        "gradient depends on the other samples (a mean over tokens, scores of rows against rows). "
        f"{way_out} return one loss a row, of shape [b]."
    )

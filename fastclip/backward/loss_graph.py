"""The graph of the loss whose backward pass is running, read from its top.

A hook inside a backward pass sees gradients, and no edge of the graph leads upwards to the loss. But
torch.autograd.backward waits for the pass to end, and what it was called with is noted. Nothing here
looks at a value, so no device is waited for. Where the call cannot be told, nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from fastclip._torch import backward_calls, number_of
from fastclip.graph import Node


class Roots(NamedTuple):
    """What a backward pass began with."""

    nodes: tuple[Node, ...]
    seeded: bool
    """Gradients were given, so the losses are not all of what is differentiated."""


def running_losses() -> list[Tensor]:
    """The losses of the running backward pass; empty if gradients were given for them, or they cannot be
    identified.
    """
    call = backward_calls.running()
    if call is None or call.seeded:
        return []
    return [loss for loss in call.losses if isinstance(loss, Tensor)]


def running_roots() -> Roots | None:
    """The nodes of the losses of the running backward pass; None where they cannot be told."""
    call = backward_calls.running()
    if call is None:
        return None
    nodes = (getattr(loss, "node", None) or getattr(loss, "grad_fn", None) for loss in call.losses)
    return Roots(tuple(node for node in nodes if node is not None), call.seeded)


def is_output(loss: Tensor, outputs: Collection[int]) -> bool:
    """The loss is a sum or a mean of an output of the model itself, which no target contradicts."""
    node = loss.grad_fn
    while node is not None and number_of(node) not in outputs:
        if node.name() not in ("SumBackward0", "MeanBackward0") or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None

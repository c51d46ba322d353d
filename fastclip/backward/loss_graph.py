"""The graph of the loss whose backward pass is running, read from its top.

A hook inside a backward pass sees gradients, and no edge of the graph leads upwards to the loss. But
`torch.autograd.backward` waits for the pass to end, and holds the losses that it was called with: on
the same thread, or, where the engine runs a device on a thread of its own, on another. Nothing here
looks at a value, so no device is waited for. Where the call cannot be found, nothing is known.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from fastclip._torch import BACKWARD_CODE, LOSSES, SEEDS, number_of
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
    call = _call()
    if call is None or any(call.f_locals.get(name) is not None for name in SEEDS):
        return []
    return [loss for loss in _losses(call.f_locals) if isinstance(loss, Tensor)]


def running_roots() -> Roots | None:
    """The nodes of the losses of the running backward pass; None where they cannot be told."""
    call = _call()
    if call is None:
        return None
    values = call.f_locals
    losses = _losses(values)
    nodes = [getattr(loss, "node", None) or getattr(loss, "grad_fn", None) for loss in losses]
    given = [values.get(name) for name in SEEDS]
    return Roots(
        tuple(node for node in nodes if node is not None), any(g is not None for g in given)
    )


def _losses(values: Any) -> Sequence[Any]:
    losses = values.get(LOSSES, ())
    return losses if isinstance(losses, (tuple, list)) else (losses,)


def _call() -> FrameType | None:
    call = _waiting_call(sys._getframe())
    if call is not None:
        return call
    calls = [_waiting_call(frame) for frame in sys._current_frames().values()]
    found = [call for call in calls if call is not None]  # of a thread of the engine's own
    return found[0] if len(found) == 1 else None


def _waiting_call(frame: FrameType | None) -> FrameType | None:
    """The innermost call of torch.autograd.backward on this stack."""
    while frame is not None and frame.f_code is not BACKWARD_CODE:
        frame = frame.f_back
    return frame


def is_output(loss: Tensor, outputs: Collection[int]) -> bool:
    """The loss is a sum or a mean of an output of the model itself, which no target contradicts."""
    node = loss.grad_fn
    while node is not None and number_of(node) not in outputs:
        if node.name() not in ("SumBackward0", "MeanBackward0") or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None

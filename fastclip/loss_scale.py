"""The scale of a loss, and how the backward pass that it starts gets to know it.

A scaled loss multiplies the gradient by its scale where the backward pass enters it, before it
reaches the model, and notes the scale under the id of the running pass. The book-keeper asks for it
there: nothing has to be told twice, and a pass of an unscaled loss has scale 1. Notes are kept by pass,
not by thread: the passes of CUDA devices run on threads of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from fastclip.errors import GraphError

_running: dict[int, float] = {}
"""The scale of each backward pass under way, by its id."""


class ScaledLoss(Function):
    """loss * scale, in float32 at least, whose backward pass knows its scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _note(ctx.scale)
        return (gradient * ctx.scale).to(ctx.dtype), None


def _note(scale: float) -> None:
    task = torch._C._current_graph_task_id()
    if task not in _running:
        Variable._execution_engine.queue_callback(partial(_forget, task))
    if _running.setdefault(task, scale) != scale:
        raise GraphError(
            f"one backward pass holds losses of the scales {_running.pop(task)} and {scale}, so its "
            "gradients have no one unit: add the losses, and scale the sum once"
        )


def _forget(task: int) -> None:
    _running.pop(task, None)


def running_scale() -> float:
    """The scale of the loss whose backward pass is running; 1 where it has none."""
    return _running.get(torch._C._current_graph_task_id(), 1.0)

"""The scale of a loss, and how the backward pass that it starts gets to know it.

A scaled loss multiplies the gradient by its scale where the backward pass enters it, before it
reaches the model, and notes the scale under the id of the running pass. The book-keeper asks for it
there: nothing has to be told twice, and a pass of an unscaled loss has scale 1. Notes are kept by pass,
not by thread: the passes of CUDA devices run on threads of their own.

One pass has one scale. A note that comes after the book-keeper has asked, a part of the loss that
reaches the model past the scaled ones, and a loss that is scaled within a scaled one are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from fastclip._torch import at_end_of_pass, current_node, current_task, node_type
from fastclip.backward.loss_graph import running_roots
from fastclip.errors import GraphError
from fastclip.graph import Node, reached_without

_running: dict[int, float] = {}
"""The scale of each backward pass under way, by its id."""

_WAY_OUT = "add the losses, and scale the sum once: scaler.scale(a + b).backward()"


class ScaledLoss(Function):
    """loss * scale, in float32 at least, whose backward pass knows its scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _set_scale(ctx.scale)
        _check_scaled_once(ctx)
        return (gradient * ctx.scale).to(ctx.dtype), None


def is_scaled(node: Node) -> bool:
    """Whether a node of the graph is that of a scaled loss."""
    return type(node) is node_type(ScaledLoss)


def running_scale() -> float:
    """The scale of the loss whose backward pass has reached a model's output; 1 where it has none.

    Raises:
        GraphError: where a part of the loss reaches this output without the scale.
    """
    scale = _running.get(current_task())
    if scale is None:
        _set_scale(1.0)
        return 1.0
    roots = running_roots()
    if scale != 1.0 and roots is not None:
        unscaled, _ = reached_without(roots.nodes, is_scaled)
        if current_node() in unscaled:
            raise GraphError(
                f"a part of the loss reached the private model without the scale {scale} of the rest, "
                f"so its gradients have no one unit: {_WAY_OUT}"
            )
    return scale


def _set_scale(scale: float) -> None:
    task = current_task()
    if task not in _running:
        at_end_of_pass(partial(_forget, task))
    if _running.setdefault(task, scale) != scale:
        raise GraphError(
            f"one backward pass holds losses of the scales {_running.pop(task)} and {scale}, so its "
            f"gradients have no one unit: {_WAY_OUT}"
        )


def _check_scaled_once(node: Node) -> None:
    roots = running_roots()
    if roots is None or node in roots.nodes:
        return
    _, outermost = reached_without(roots.nodes, is_scaled)
    if node not in outermost:
        raise GraphError(
            "a loss that is scaled already is part of one that was scaled again, so its gradients "
            f"have no one unit: {_WAY_OUT}"
        )


def _forget(task: int) -> None:
    _running.pop(task, None)

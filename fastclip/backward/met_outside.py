"""Trained tensors that are none of the model's, as a traced step meets them beside data."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from torch import Tensor, nn

from fastclip.backward.guards import is_guarded
from fastclip.errors import ParameterLeakError
from fastclip.graph import above_private
from fastclip.trace.findings import Report


def watch_outside(held: weakref.ref[Any], x: Tensor, line: str) -> None:
    """Let no gradient come to such a tensor in a pass that trains the model, too.

    Args:
        held: the step (fastclip.backward.traced_step). x: the tensor. line: of the user's, where it met
            data.
    """
    step = held()
    if step is None or not x.requires_grad or is_guarded(x):
        return
    if x.grad_fn is not None:
        below = above_private(deque([x.grad_fn]))
        if not any(hasattr(node, "variable") for node in below):
            return  # computed by private models alone

    def came(gradient: Tensor | None) -> None:
        step = held()
        if gradient is None or step is None:
            return
        step.came.append((x, line))
        if step.opened:
            raise trained_outside(step.tracer.report, x, line)

    with step.tracer.aside():
        step.handles.append(x.register_hook(came))


def trained_outside(report: Report, x: Tensor, line: str) -> ParameterLeakError:
    """The error of a pass that trains such a tensor, noted in the report."""
    report.outside.append((f"{list(x.shape)}", line))
    kind = "parameter" if isinstance(x, nn.Parameter) else "tensor"
    return ParameterLeakError(
        f"A {kind} of shape {list(x.shape)} that is not a parameter of the private model is trained at "
        f"{line}, on a gradient that is neither clipped nor noised. Make it a parameter of the model "
        "before make_private, or detach it."
    )

"""Whose a row is where the model moves rows about: read from the gradient, in every backward pass.

Inside a mixture of experts, rows of a batch are gathered, sorted and put back as their values say. What
comes out of the whole module has its samples in their places again. There, gradients of sample i are
scaled by a power of two of its own and sent through the module once more; the ratio says whose every
row inside is (fastclip.samples.owners).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastclip._torch import current_task
from fastclip.errors import BatchSizeError
from fastclip.samples.owners import NOBODY, coded_by
from fastclip.samples.place import Place

_BASE = 16
"""Samples that one pass tells apart, by factors of 2^-8 to 2^7."""
_NEAR = 2.0**-10
_NEAR_HALF = 2.0**-5
"""How far from a power of two a ratio may be: on a GPU gradients may be added up in another order."""


class Routing:
    """One call of a module inside which rows are moved.

    Args:
        batch: samples.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._edges: list[GradientEdge] = []
        self._codes: list[tuple[Tensor | None, ...]] = []

    def watch(self, out: Tensor) -> int:
        """The owners of this tensor's rows will be asked for, by the number returned."""
        self._edges.append(get_gradient_edge(out))
        return len(self._edges) - 1

    def leave(self, outputs: list[Tensor], places: list[Place]) -> list[Tensor]:
        """What the module returns, where its gradients come in."""
        if not self._edges:
            return outputs
        return list(_Leave.apply(self, places, *outputs))

    def send(self, edges: list[GradientEdge], gradients: list[Tensor], places: list[Place]) -> None:
        """Send coded gradients through the module."""
        self._codes = []
        span = 1
        while span < max(self.batch, 2):
            seeds = []
            for gradient, place in zip(gradients, places, strict=True):
                owner = place.owners(gradient.shape[place.axis], self.batch, gradient.device)
                digits = owner.div(span, rounding_mode="floor").remainder(_BASE) - _BASE // 2
                seeds.append(coded_by(gradient, place.axis, digits))
            self._codes.append(
                torch.autograd.grad(edges, self._edges, seeds, retain_graph=True, allow_unused=True)
            )
            span *= _BASE

    def owners(self, number: int, g: Tensor, label: str) -> Tensor:
        """The sample of every row of `g` (all axes but the last), int64 [..., 1]; NOBODY if it is 0.

        Raises:
            BatchSizeError: a row follows from several samples (on a CPU; on a GPU, which would have to
                be waited for, such a row contributes nothing).
        """
        if not self._codes:
            raise BatchSizeError(
                f"{label}: gradients reach it past the output of the module that moves its rows (a "
                "value kept on an attribute, an auxiliary loss), so that its rows cannot be told apart"
            )
        near = _NEAR if torch.finfo(g.dtype).bits > 16 else _NEAR_HALF
        largest = g.detach().abs().nan_to_num(0.0, 0.0, 0.0).argmax(-1, keepdim=True)
        plain = g.detach().gather(-1, largest).double()
        owner = torch.zeros_like(plain, dtype=torch.int64)
        mixed = torch.zeros_like(plain, dtype=torch.bool)
        for power, codes in enumerate(self._codes):
            code = codes[number]
            code = torch.zeros_like(g) if code is None else code
            ratio = code.detach().gather(-1, largest).double() / plain
            power_of_two = ratio.abs().log2().nan_to_num(0.0, 0.0, 0.0).round()
            digit = (power_of_two + _BASE // 2).clamp(0, _BASE - 1)
            power_of_two = digit - _BASE // 2
            mixed |= ~((ratio / power_of_two.exp2() - 1).abs() <= near)  # NaN is not near
            owner += digit.to(torch.int64) * _BASE**power
        silent = (plain == 0) | ~torch.isfinite(plain)
        mixed = (mixed | (owner >= self.batch)) & ~silent
        if g.device.type == "cpu" and bool(mixed.any()):
            raise BatchSizeError(
                f"{label}: a row of its output follows from several samples, so no per-sample gradient "
                "exists; let every row be computed from one sample alone"
            )
        return owner.masked_fill(silent | mixed, NOBODY)


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, routing: Routing, places: list[Place], *outputs: Tensor) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.routing, ctx.places = routing, places
        return tuple(x.clone() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        came = [
            (GradientEdge(*edge), gradient.detach(), place)
            for edge, gradient, place in zip(
                ctx.next_functions[-len(gradients) :], gradients, ctx.places, strict=True
            )
            if gradient is not None and edge[0] is not None
        ]
        if came and _records():
            edges, values, places = (list(column) for column in zip(*came, strict=True))
            ctx.routing.send(edges, values, places)
        return None, None, *gradients


def _records() -> bool:
    """It is a backward pass, and not one that was sent through an enclosing module."""
    return current_task() != -1

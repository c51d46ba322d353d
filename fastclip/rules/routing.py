"""Finds the sample of each row if the model moves rows, from the gradient of each backward pass.

A mixture of experts gathers, sorts and puts back rows of a batch depending on their values. The output
of the whole module has a batch axis again. There, gradients of sample i are scaled by its own power of
two and sent through the module once more. The ratio identifies the sample of each row inside
(fastclip.samples.batch_axis).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastclip.core.torch_names import current_task
from fastclip.errors import BatchSizeError
from fastclip.samples.batch_axis import NOBODY, BatchAxis, coded_by
from fastclip.trace.tracer import all_aside

_BASE = 16
"""Samples that one pass distinguishes, by factors of 2^-8 to 2^7."""
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
_NEAR_HALF = 2.0**-5
"""Distance of a ratio from a power of two: on a GPU gradients may be added in another order."""
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}
_ROUNDING_HALF = 1e-3
"""Relative to the largest entry: a smaller entry of several samples has canceled up to rounding (as
the maximum that a softmax subtracts), and contributes nothing."""


class Routing:
    """One call of a module that moves rows inside.

    Args:
        batch: samples.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._edges: list[GradientEdge] = []
        self._codes: list[tuple[Tensor | None, ...]] = []

    def watch(self, out: Tensor) -> int:
        """Registers a tensor whose samples will be asked for, and returns its number."""
        self._edges.append(get_gradient_edge(out))
        return len(self._edges) - 1

    def leave(self, outputs: list[Tensor], batch_axes: list[BatchAxis]) -> list[Tensor]:
        """Returns the module's outputs, with a hook for their gradients."""
        if not self._edges:
            return outputs
        return list(_Leave.apply(self, batch_axes, *outputs))

    def send(
        self, edges: list[GradientEdge], gradients: list[Tensor], batch_axes: list[BatchAxis]
    ) -> None:
        """Sends coded gradients through the module."""
        self._codes = []
        span = 1
        while span < max(self.batch, 2):
            seeds = []
            for gradient, batch_axis in zip(gradients, batch_axes, strict=True):
                owner = batch_axis.sample_of_entry(
                    gradient.shape[batch_axis.axis], self.batch, gradient.device
                )
                digits = owner.div(span, rounding_mode="floor").remainder(_BASE) - _BASE // 2
                seeds.append(coded_by(gradient, batch_axis.axis, digits))
            self._codes.append(
                torch.autograd.grad(edges, self._edges, seeds, retain_graph=True, allow_unused=True)
            )
            span *= _BASE

    def sample_of_entry(self, number: int, g: Tensor, label: str) -> Tensor:
        """Returns the sample of every entry of `g`, int64 in its shape; NOBODY where it is 0.

        Raises:
            BatchSizeError: an entry depends on several samples. That is on a CPU. On a GPU such an
                entry contributes nothing, because a check would wait for the device.
        """
        if not self._codes:
            raise BatchSizeError(
                f"{label}: gradients bypass the output of the module that moves its rows, so "
                "fastclip cannot identify which sample each row belongs to. Return such values "
                "from the module."
            )
        met = {g.dtype, *(x.dtype for codes in self._codes for x in codes if x is not None)}
        exact = torch.float16 not in met  # whose small numbers do not scale exactly
        near = _NEAR.get(g.dtype, _NEAR_HALF) if exact else _NEAR_HALF
        rounding = _ROUNDING.get(g.dtype, _ROUNDING_HALF) if exact else _ROUNDING_HALF
        plain = _wide(g)
        owner = torch.zeros_like(plain, dtype=torch.int64)
        mixed = torch.zeros_like(plain, dtype=torch.bool)
        for power, codes in enumerate(self._codes):
            code = codes[number]
            code = plain.new_zeros(()) if code is None else _wide(code)
            digit, certain = _digit(plain, code, near)
            mixed |= ~certain
            owner += digit * _BASE**power
        size = plain.abs().nan_to_num(0.0, 0.0, 0.0)
        largest = size.amax() if size.numel() else size.sum()
        silent = (plain == 0) | ~torch.isfinite(plain) | (mixed & (size <= rounding * largest))
        mixed = (mixed | (owner >= self.batch)) & ~silent
        if g.device.type == "cpu" and bool(mixed.any()):
            raise several(label, "an entry")
        return owner.masked_fill(silent | mixed, NOBODY)


def several(label: str, what: str) -> BatchSizeError:
    """Returns the error for entries that do not belong to one sample."""
    return BatchSizeError(
        f"{label}: {what} of its output depends on several samples, so per-sample gradients do not "
        "exist. Compute each row from one sample alone.",
        doc="coupled-samples",
    )


def _wide(x: Tensor) -> Tensor:
    """Widens a tensor enough for the ratio of two entries, which has few digits."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def _digit(plain: Tensor, code: Tensor, near: float) -> tuple[Tensor, Tensor]:
    """Returns by how much each entry was scaled (0 for the least), and where that is certain."""
    ratio = code / plain
    digit = ratio.abs().log2().nan_to_num(0.0, 0.0, 0.0).round() + _BASE // 2
    digit = digit.clamp(0, _BASE - 1)
    distance = (ratio * (_BASE // 2 - digit).exp2() - 1).abs()
    return digit.to(torch.int64), distance <= near  # NaN is not near


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, routing: Routing, batch_axes: list[BatchAxis], *outputs: Tensor) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.routing, ctx.batch_axes = routing, batch_axes
        return tuple(x.clone() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        came = [
            (GradientEdge(*edge), gradient.detach(), batch_axis)
            for edge, gradient, batch_axis in zip(
                ctx.next_functions[-len(gradients) :], gradients, ctx.batch_axes, strict=True
            )
            if gradient is not None and edge[0] is not None
        ]
        if came and _records():
            edges, values, batch_axes = (list(column) for column in zip(*came, strict=True))
            with all_aside():  # these gradients are not part of a traced step
                ctx.routing.send(edges, values, batch_axes)
        return None, None, *gradients


def _records() -> bool:
    """Whether this is a backward pass, and not one sent through an enclosing module."""
    return current_task() != -1

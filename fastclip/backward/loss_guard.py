"""What the traced steps have found of a loss, watched in every later step.

A mean over classes divides by the labels that count. The traced steps may have had none that is ignored;
from the first batch that has one, the mean joins samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastclip._torch import SAVED_REDUCTION, TARGET, TOTAL_WEIGHT, backward_listeners
from fastclip.errors import GraphError
from fastclip.graph import above_private

_MEAN = 1


class LossGuard:
    """Hears of backward passes before they begin.

    Args:
        concerns: whether a pass trains the private model: asked with its private nodes.
    """

    def __init__(self, concerns: Callable[[object], bool]) -> None:
        self.concerns = concerns
        self.broken: Tensor | None = None
        """On an accelerator: whether the pass under way is over labels of which some do not count."""
        backward_listeners.add(self)

    def ended(self, failed: bool) -> None:
        """A backward pass is over."""

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Look at the means over classes among what these losses are made of.

        Raises:
            GraphError: one of them leaves labels out, so that it joins samples.
        """
        self.broken = None
        private: list[object] = []
        nodes = deque(x.grad_fn for x in losses if x.grad_fn is not None)
        for node in above_private(nodes, private):
            if not node.name().startswith("NllLoss") or getattr(node, SAVED_REDUCTION) != _MEAN:
                continue
            target: Tensor = getattr(node, TARGET)
            if target.numel() < 2:
                continue
            uneven = getattr(node, TOTAL_WEIGHT) != target.numel()
            self.broken = uneven if self.broken is None else self.broken | uneven
        if self.broken is None or not any(map(self.concerns, private)):
            self.broken = None
        elif self.broken.device.type == "cpu" and bool(self.broken):
            self.broken = None
            raise GraphError(
                "Your loss is a mean over the labels that count, and this batch has ignored ones, so "
                "samples are not independent. Use fastclip.losses.per_sample_cross_entropy(...).mean()."
            )

    def void(self, norm_sq: Tensor) -> Tensor:
        """NaN where the loss of this pass joins samples, so that none contributes; no device is waited
        for."""
        broken, self.broken = self.broken, None
        if broken is None:
            return norm_sq
        return norm_sq.masked_fill(broken.to(norm_sq.device), torch.nan)

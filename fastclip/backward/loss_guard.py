"""What the traced steps have found of a loss, watched in every later step.

A mean over classes divides by the labels that count. The traced steps may have had none that is ignored,
but constants of the model, as many for each sample (a sequence shifted by one position); from the
first batch that has more, the mean joins samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fastclip._torch import SAVED_REDUCTION, TARGET, TOTAL_WEIGHT, backward_calls
from fastclip.errors import GraphError
from fastclip.graph import above_private

_MEAN = 1
_IGNORED = (
    "Your loss is a mean over the labels that count, and this batch has ignored ones, so samples are "
    "not independent. Use fastclip.losses.per_sample_cross_entropy(...).mean()."
)


class LossGuard:
    """Hears of backward passes before they begin.

    Args:
        concerns: whether a pass trains the private model: asked with its private nodes.
        constants: of each mean, labels that do not count and are no sample's, for each sample. Means of
            several kinds may have none.
    """

    def __init__(self, concerns: Callable[[object], bool], constants: Collection[int] = ()) -> None:
        self.concerns = concerns
        self.constants = max(constants) if len(constants) == 1 else 0
        self._ignored: list[Tensor] = []
        """How many labels do not count in each mean of the pass under way, []."""
        backward_calls.add(self)

    def ended(self, failed: bool) -> None:
        """A backward pass is over."""

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Look at the means over classes among what these losses are made of."""
        self._ignored = []
        private: list[object] = []
        nodes = deque(x.grad_fn for x in losses if x.grad_fn is not None)
        for node in above_private(nodes, private):
            if not node.name().startswith("NllLoss") or getattr(node, SAVED_REDUCTION) != _MEAN:
                continue
            target: Tensor = getattr(node, TARGET)
            if target.numel() >= 2:
                self._ignored.append(target.numel() - getattr(node, TOTAL_WEIGHT))
        if not any(map(self.concerns, private)):
            self._ignored = []

    def checked(self, norm_sq: Tensor, batch_size: int) -> Tensor:
        """Squared norms of a pass over so many samples; on an accelerator NaN where its loss joins
        samples, so that none contributes: no device is waited for.

        Raises:
            GraphError: a mean over classes leaves labels of samples out, so that it joins samples.
        """
        ignored, self._ignored = self._ignored, []
        for count in ignored:
            broken = count != batch_size * self.constants
            if count.device.type != "cpu":
                norm_sq = norm_sq.masked_fill(broken.to(norm_sq.device), torch.nan)
            elif bool(broken):
                raise GraphError(_IGNORED)
        return norm_sq

"""Norms of rows' gradients by group as a model trains: before clipping, after it, and who was clipped.

All of it is of raw rows: not private, and nothing that noise covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import ArgumentError

MEASURES = ("rows", "norm_before", "norm_after", "clipped")


class Observed:
    """Sums by group since the period began, on the device of the norms: a step waits for nothing.

    Args:
        attributes: names of the groups of each attribute.
        protected: the attribute whose groups `engine.set_groups` gets; None where no strategy of
            groups clips.
    """

    def __init__(self, attributes: Mapping[str, Sequence[str]], protected: str | None) -> None:
        self.attributes = attributes
        self.protected = protected
        self.sums: dict[str, Tensor] = {}
        """Of each attribute, [4, k]: rows, norms before and after, clipped rows."""

    def add(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """What the last backward pass clipped.

        Args:
            optimizer: of the private run, between `backward()` and `step()`.
            groups: of each attribute, the group of every row of the (physical) batch, [b].
        """
        norms = optimizer.per_sample_norms
        if norms is None or not len(next(iter(groups.values()))):
            return  # nothing was drawn; a placeholder row, if there is one, is nobody
        before, after, clipped = self._clipped(optimizer, norms.double(), groups)
        values = torch.stack([torch.ones_like(before), before, after, clipped])  # [4, b]
        for name, names in self.attributes.items():
            of_rows = groups[name].to(norms.device)
            if len(of_rows) != len(norms):
                raise ArgumentError(
                    f"observe expects the group of each of the {len(norms)} rows of the last backward "
                    f"pass, got {len(of_rows)} for {name}"
                )
            if name not in self.sums:
                self.sums[name] = values.new_zeros(len(MEASURES), len(names))
            self.sums[name].index_add_(1, of_rows, values)

    def _clipped(
        self, optimizer: Any, norms: Tensor, groups: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norms before and after clipping, and 1 where a norm was above its threshold, all [b].

        Of a strategy by layers the norms of layers are not kept: the last two are NaN.
        """
        clipping = optimizer.keeper.clipping
        strategy, state = clipping.strategy, clipping.current
        # A sample whose gradient is not finite contributes nothing, and counts as clipped.
        finite = torch.where(torch.isfinite(norms), norms, 0.0)
        if strategy.threshold.per_layer:
            unknown = torch.full_like(norms, torch.nan)
            return finite, unknown, unknown
        of_strategy = None
        if strategy.threshold.num_groups is not None:
            if self.protected is None:
                raise ArgumentError(
                    "the strategy clips by groups: FairnessRecorder expects protected=, the attribute "
                    "whose groups engine.set_groups gets"
                )
            of_strategy = groups[self.protected].to(norms.device)
        scales = strategy.scales(norms, state, of_strategy)
        threshold = state.threshold
        if threshold.dim() and of_strategy is not None:
            threshold = threshold[of_strategy]
        return finite, finite * scales, (~(norms <= threshold)).double()

    def read(self) -> dict[str, dict[str, list[float]]]:
        """Means by attribute, measure and group; starts anew."""
        found = {}
        for name, sums in self.sums.items():
            rows, *others = sums.cpu()
            means = [(of / rows).tolist() for of in others]  # 0 / 0 is NaN: nobody was drawn
            found[name] = dict(zip(MEASURES, [rows.tolist(), *means], strict=True))
        self.sums = {}
        return found

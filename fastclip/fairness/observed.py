"""Norms of rows' gradients by group as a model trains: before clipping, after it, and who was clipped.

All of it is of raw rows: not private, and nothing that noise covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness.given import check_numbers, chosen

MEASURES = ("rows", "norm_before", "norm_after", "clipped")


class Observed:
    """Sums by group since the period began, on the device of the norms: a step waits for nothing.

    Args:
        attributes: names of the groups of each attribute.
        protected: the attribute whose groups `engine.set_groups` gets; None where no strategy of
            groups clips.
    """

    def __init__(self, attributes: Mapping[str, tuple[str, ...]], protected: str | None) -> None:
        self.attributes = attributes
        self.protected = protected
        self._sums: dict[str, Tensor] = {}
        """Of each attribute, [4, k]: rows, norms before and after, clipped rows."""

    def add(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """What the last backward pass clipped.

        Args:
            optimizer: of the private run, between `backward()` and `step()`.
            groups: of each attribute, the group of every row of the (physical) batch, int64 [b];
                where units are clipped, of every unit, in the order of their first rows. Numbers
                outside, which a GPU cannot refuse without waiting, count nowhere.
        """
        given = chosen("observe", groups, self.attributes)
        if not hasattr(optimizer, "per_sample_norms") or not hasattr(optimizer, "keeper"):
            raise ArgumentTypeError(
                "observe expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}"
            )
        if not any(len(of_rows) for of_rows in given.values()) or _placeholder(optimizer):
            return  # nobody was drawn
        norms = optimizer.per_sample_norms
        if norms is None:
            raise ArgumentError(
                "observe expects to follow a backward pass, of which there was none yet"
            )
        for name, of_rows in given.items():
            self._check(optimizer, name, of_rows, len(norms))
        on = {
            name: of_rows.to(norms.device, torch.int64, non_blocking=True)
            for name, of_rows in given.items()
        }
        before, after, clipped = self._clipped(optimizer, norms.double(), on)
        values = torch.stack([torch.ones_like(before), before, after, clipped])  # [4, b]
        for name, of_rows in on.items():
            k = len(self.attributes[name])
            outside = (of_rows < 0) | (of_rows >= k)
            sums = self._sums.get(name, values.new_zeros(len(MEASURES), k)).to(norms.device)
            inside = values.masked_fill(outside, 0.0)
            self._sums[name] = sums.index_add_(1, of_rows.clamp(0, k - 1), inside)

    def groups_of(self, strategy: Any) -> str | None:
        """The attribute whose groups the strategy clips by; None where it knows no groups.

        Raises:
            ArgumentError: `protected` is not it.
        """
        number = strategy.threshold.num_groups
        if number is None:
            return None
        if self.protected is None:
            raise ArgumentError(
                "the strategy clips by groups: FairnessRecorder expects protected=, the attribute "
                "whose groups engine.set_groups gets"
            )
        if len(self.attributes[self.protected]) != number:
            raise ArgumentError(
                f"the strategy clips {number} groups: FairnessRecorder expects so many of "
                f"protected={self.protected!r}, which has {len(self.attributes[self.protected])}"
            )
        return self.protected

    def _check(self, optimizer: Any, name: str, of_rows: Any, rows: int) -> None:
        draws = optimizer.keeper.batch.draws
        if draws is not None and draws.by_units and len(of_rows) != rows:
            raise ArgumentError(
                f"observe expects the group of each of the {rows} units of the last backward pass, got "
                f"{len(of_rows)} for {name}: rows were clipped by units (unit_ids), so pass a unit's "
                "group once, at the place of its first row"
            )
        check_numbers("observe", name, of_rows, rows, len(self.attributes[name]), wait=False)

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
        attribute = self.groups_of(strategy)
        of_strategy = None if attribute is None else groups[attribute]
        scales = strategy.scales(norms, state, of_strategy)
        threshold = state.threshold
        if threshold.dim() and of_strategy is not None:
            threshold = threshold[of_strategy.clamp(0, len(threshold) - 1)]
        return finite, finite * scales, (~(norms <= threshold)).double()

    def read(self) -> dict[str, dict[str, list[float]]]:
        """Means by attribute, measure and group; starts anew."""
        found = {}
        for name, sums in self._sums.items():
            rows, *others = sums.cpu()
            means = [(of / rows).tolist() for of in others]  # 0 / 0 is NaN: nobody was drawn
            found[name] = dict(zip(MEASURES, [rows.tolist(), *means], strict=True))
        self._sums = {}
        return found

    def state(self) -> dict[str, Tensor]:
        """A copy of the sums, which go on."""
        return {name: sums.clone() for name, sums in self._sums.items()}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        shapes = {name: (len(MEASURES), len(groups)) for name, groups in self.attributes.items()}
        found = {name: tuple(of.shape) for name, of in sums.items()}
        if any(shapes.get(name) != shape for name, shape in found.items()):
            raise ArgumentError(
                f"load_state_dict expects sums of this recorder's attributes, {shapes}, got {found}"
            )
        self._sums = {name: of.clone() for name, of in sums.items()}


def _placeholder(optimizer: Any) -> bool:
    """The last pass was over a row that stands for an empty draw (rand_on_empty)."""
    draws = optimizer.keeper.batch.draws
    return draws is not None and draws.last is not None and not draws.last.draw.size

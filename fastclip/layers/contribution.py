"""What layers and uses are alike in, in a backward pass: what is wanted of them, what they leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from fastclip import ops
from fastclip.errors import GraphError
from fastclip.layers.record import Record
from fastclip.ops.units import UnitRows
from fastclip.planner import Choice, Planner
from fastclip.planner.report import PlanLog


class Contribution(ABC):
    """One call of a layer or of a use, in the backward pass.

    Args:
        label, rule: its names in the plan. g: gradient of its output. wanted: names of the parameters
            that take part. planner, log: how norms are computed, and where that is noted.
        last_input: what is known of the one that the pass has met last.
    """

    def __init__(
        self, label: str, rule: str, g: Tensor, wanted: Collection[str], planner: Planner,
        log: PlanLog, last_input: ops.LastInput,
    ) -> None:  # fmt: skip
        self.g, self.last_input = g, last_input
        self._label, self._rule, self._names = label, rule, wanted
        self._planner, self._log = planner, log
        self._recorded: set[str] = set()

    def wants(self, name: str) -> bool:
        """Whether the parameter of this name takes part in the backward pass."""
        return name in self._names

    def record(self, name: str, record: Record) -> None:
        """Add a contribution to the parameter of this name.

        Raises:
            GraphError: it is not wanted.
        """
        if name not in self._names:
            raise GraphError(
                f"{self._named()} records for {name}, but call.wants(name) asked for "
                f"{', '.join(self._names) or 'nothing'} alone"
            )
        self._recorded.add(name)
        if not self._log.planned(self._label):
            self._log.seen(self._label, self._rule, tuple(self.g.shape), record.nbytes)
        self._take(name, record)

    def check_complete(self) -> None:
        """Refuse a rule that left out a parameter, which would never be trained."""
        if len(self._recorded) < len(self._names):
            missing = sorted(set(self._names) - self._recorded)
            raise GraphError(
                f"{self._named()} recorded nothing for {', '.join(missing)}; call.record what "
                "call.wants (fastclip.testing compares all of it with autograd)"
            )

    def _named(self) -> str:
        return f"the rule {self._rule} of {self._label}"

    @abstractmethod
    def _take(self, name: str, record: Record) -> None:
        """Hand the contribution to the book-keeper."""

    def _may_keep(self, name: str) -> bool:
        """Whether per-sample gradients may be held instead of what they are computed from."""
        return False

    def is_alone(self, name: str) -> bool:
        """Whether the parameter's norm is that of one contribution, of rows that are samples."""
        return self._may_keep(name) and self._units() is None

    def _units(self) -> UnitRows | None:
        """Which rows are clipped as one; None: each alone."""
        return None

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> Choice:
        """The planner's choice for a [b, t, d] and g [b, t, p]."""
        b, t, d = a.shape
        units = self._units()
        if units is not None:
            each = b // max(1, len(units))  # rows of the layer's that are one of the batch's
            b, t = units.count, units.positions(each * t)
        choice = self._planner.linear(
            b, t, d, g.shape[2], a.element_size(), self._may_keep(name), a.device
        )
        return self._noted(a, choice if units is None else replace(choice, of_units=True))

    def plan_conv(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, name: str = "weight"
    ) -> Choice:
        """The planner's choice for a convolution over x [b, c, *space]."""
        b, space, out = x.shape[0], *(torch.Size(y.shape[2:]).numel() for y in (x, g))
        units = self._units()
        if units is not None:
            each = b // max(1, len(units))
            b, space, out = units.count, *(units.positions(each * n) for n in (space, out))
        choice = self._planner.conv(
            b, space, out, geometry, x.element_size(), self._may_keep(name), x.device
        )
        return self._noted(x, choice if units is None else replace(choice, of_units=True))

    def _noted(self, x: Tensor, choice: Choice) -> Choice:
        self._log.note(self._label, self._rule, tuple(x.shape), choice)
        return choice

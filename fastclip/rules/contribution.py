"""The common part of layers and uses in a backward pass: wanted parameters and their records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.torch_names import stream_of
from fastclip.errors import GraphError
from fastclip.ops.planner import NormMethod, PlanLog, Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules.records import Record, norm_apart
from fastclip.samples.batch_axis import BatchAxis


class Contribution(ABC):
    """One call of a layer or of a use, in the backward pass.

    Args:
        label, rule: its names in the plan. g: gradient of its output. wanted: names of the parameters
            that take part. planner, log: choose how norms are computed, and record that.
        last_input: what is known of the last input in the pass.
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
        """Adds a contribution to the parameter of this name.

        Raises:
            GraphError: it is not wanted, or no record.
        """
        if name not in self._names:
            raise GraphError(
                f"{self._named()} records for {name}, but call.wants(name) asked for "
                f"{', '.join(self._names) or 'nothing'} alone. Record only what call.wants.",
                doc="layer-rule",
            )
        if not isinstance(record, Record):
            raise GraphError(
                f"{self._named()} recorded a {type(record).__name__} for {name}. Record per-sample "
                "gradients of shape [b, *parameter.shape] as KeptRecord(gradients), or another Record.",
                doc="layer-rule",
            )
        self._recorded.add(name)
        if not self._log.planned(self._label):
            self._log.seen(self._label, self._rule, tuple(self.g.shape), record.nbytes)
        self._take(name, record)

    def check_complete(self) -> None:
        """Raises GraphError if the rule left out a parameter, which would never be trained."""
        if len(self._recorded) < len(self._names):
            missing = sorted(set(self._names) - self._recorded)
            raise GraphError(
                f"{self._named()} recorded nothing for {', '.join(missing)}, so it would not be "
                "trained. Record every parameter that call.wants.",
                doc="layer-rule",
            )

    def _named(self) -> str:
        return f"The rule {self._rule} of {self._label}"

    @abstractmethod
    def _take(self, name: str, record: Record) -> None:
        """Passes the contribution to the gradient state."""

    def _may_keep(self, name: str) -> bool:
        """Whether per-sample gradients may be held instead of what they are computed from."""
        return False

    def is_alone(self, name: str) -> bool:
        """Whether the parameter has one contribution, whose rows are samples."""
        return self._may_keep(name) and self._units() is None

    def _units(self) -> UnitSamples | None:
        """Returns the privacy units; None: each sample is clipped separately."""
        return None

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> NormMethod:
        """The planner's choice for a [b, t, d] and g [b, t, p]."""
        b, t, d = a.shape
        units = self._units()
        if units is not None:
            each = b // max(1, len(units))  # rows of the layer per sample
            b, t = units.count, units.positions(each * t)
        choice = self._planner.linear(
            b, t, d, g.shape[2], a.element_size(), self._may_keep(name), a.device
        )
        return self._noted(a, choice if units is None else replace(choice, of_units=True))

    def plan_conv(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, name: str = "weight"
    ) -> NormMethod:
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

    def _noted(self, x: Tensor, choice: NormMethod) -> NormMethod:
        self._log.note(self._label, self._rule, tuple(x.shape), choice)
        return choice


# -------------------------------------------------------------------------------------------------
# Inputs in the type in which torch's autocast multiplies them.


def autocast_operand(x: Tensor) -> Tensor:
    """Returns `x` in the type in which torch's autocast, if it is on, multiplies it.

    It is for layers that are products. The backward pass then saves the operand that was multiplied. It
    is as large as torch's own, and has the type of the output's gradient.
    """
    kind = multiplied(x)
    return x if kind == x.dtype else x.to(kind)


def multiplied(x: Tensor) -> torch.dtype:
    """Returns the type in which autocast multiplies x."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device) if x.is_floating_point() else x.dtype


class LastCast:
    """The last cast input of a forward pass, which layers with the same input share.

    Queries, keys and values then need one cast and one saved copy. Neither tensor is held here. A copy
    on another stream is not shared, because a layer could have to wait for it. Nor is a copy of a tensor
    that was changed since. Changes without a new version (through `.data`, or by a kernel that writes to
    the address) are not seen, by autograd neither.
    """

    def __init__(self) -> None:
        self._last: tuple[Hashable, ref[Tensor], ref[Tensor], int] | None = None

    def of(self, x: Tensor) -> Tensor:
        """Returns `autocast_operand(x)`. A copy is a new leaf, which requires a gradient if x does."""
        kind = multiplied(x)
        if kind == x.dtype:
            return x
        key = _state(x, kind)
        if key is not None and self._last is not None:
            last, original, cast, version = self._last
            copy = cast()
            if copy is not None and last == key and original() is x and copy._version == version:
                return copy
        copy = x.to(kind).detach().requires_grad_(x.requires_grad)
        if key is not None:
            self._last = key, ref(x), ref(copy), copy._version
        return copy


def _state(x: Tensor, kind: torch.dtype) -> Hashable:
    """Returns what the copy of a tensor depends on; None if that is unknown."""
    if type(x) is not Tensor or x.is_inference():
        return None
    address = x.data_ptr()
    if not address:
        return None
    stream = stream_of(x.get_device()) if x.is_cuda else 0
    return x._version, address, x.shape, x.stride(), x.requires_grad, kind, stream


# -------------------------------------------------------------------------------------------------
# Records of layers that treat each row as a sample, if several rows belong to one sample.


class FoldedRecord(Record):
    """A record of b * n rows, for b samples.

    Args:
        record: of the rows. batch_axis: of the samples in them. batch: b.
    """

    def __init__(self, record: Record, batch_axis: BatchAxis, batch: int) -> None:
        super().__init__(*record._operands)
        self.record, self.batch_axis, self.batch = record, batch_axis, batch

    instantiates = True

    def norm_sq(self) -> Tensor:
        return norm_apart(self)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.parted_sum(self.apart(), scale)

    def per_sample(self) -> Tensor:
        own = self.record.per_sample()
        rows = BatchAxis(0, self.batch_axis.outer, self.batch_axis.inner).samples(
            ops.widen(own), self.batch
        )
        return rows.sum(1)

    def margin(self) -> Tensor | None:
        margin = self.record.margin()
        if margin is None:
            return None
        return (
            BatchAxis(0, self.batch_axis.outer, self.batch_axis.inner)
            .samples(margin, self.batch)
            .sum(1)
        )

    def of_units(self, units: UnitSamples) -> Record:
        """Returns the record of units, whose rows include those flattened with the batch axis."""
        size = len(self._operands[0])
        rows = self.batch_axis.sample_of_entry(size, self.batch, units.owner.device)
        return self.record.of_units(units.of_entries(rows, size // max(self.batch, 1)))

"""What one backward pass gathers: contributions to parameters, and to values computed from them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.loss import SeenLoss
from fastclip.backward.sums import (
    SMALL,
    ClippedSums,
    Entry,
    LinearSums,
    Stack,
    alone,
    finish_norms,
    norms_of_linear,
    stack_small,
)
from fastclip.core.numerics import margin, widen
from fastclip.distributed.ranks import Ranks, whole
from fastclip.errors import GraphError, where
from fastclip.ops.planner import Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules import KeptRecord, Record, joint_record
from fastclip.rules.use import Target
from fastclip.samples.calls import Calls, Forward


class BackwardPass:
    """What one backward pass has gathered so far.

    Args:
        task: torch's number of the pass. planner: chooses how norms are computed.
        shared: parameters that are known to be used more than once.
        loss: what the pass began with.
        unbounded: its scales may be as large as 1 over any norm (`Clipping.unbounded`).
    """

    def __init__(
        self, task: int, planner: Planner, shared: set[nn.Parameter], loss: SeenLoss | None,
        unbounded: bool = False,
    ) -> None:  # fmt: skip
        self.task, self.loss, self.loss_scale = task, loss, 1.0
        self._planner, self._shared, self._unbounded = planner, shared, unbounded
        self.begun = False
        """A contribution has been admitted."""
        self._samples: int | None = None
        """In every contribution."""
        self.units: UnitSamples | None = None
        """Which samples are clipped as one; None: each by itself."""
        self.forwards: list[Forward] = []
        self.entries: dict[int, Entry] = {}
        """By the parameters' ids, which are quicker to find than themselves."""
        self.stacks: list[Stack] = []
        """What several parameters have together, once its norms are known."""
        self.last_input = ops.LastInput()
        self._derived: dict[Any, list[tuple[Target, Record]]] = {}
        """Contributions to values computed from parameters, by these values."""
        self._wanted: set[nn.Parameter] = set()
        """Parameters that take part through such values."""
        self._watching: AbstractContextManager[None] | None = None
        """Records uses of parameters until the pass ends."""

    def watch(self, forward: Forward, calls: Calls) -> None:
        """Parts of this forward pass may be computed again: uses are noticed there, too."""
        if forward.layout is not None and forward.layout.proxied and self._watching is None:
            self._watching = calls.intercepted(forward.layout.proxied)
            self._watching.__enter__()

    def unwatch(self) -> None:
        """The pass has ended, or failed."""
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
            self._watching = None

    def check_kept(self, kept: BackwardPass | None) -> None:
        """Check that this pass is still the model's running pass as it ends.

        Raises:
            GraphError: another thread has replaced it.
        """
        if kept is not self:
            raise GraphError(
                "Another thread called the private model during a backward pass, and the pass is lost. "
                "Call the model from one thread at a time, or evaluate a copy.",
                doc="step-order",
            )

    @property
    def batch_size(self) -> int | None:
        """Samples in it, once known."""
        return next((f.batch_size for f in self.forwards if f.batch_size is not None), None)

    @property
    def empty(self) -> bool:
        """Nothing has been contributed."""
        return not self.entries and not self._derived

    def admit(self, path: str, forward: Forward, samples: int, batch: LogicalBatch) -> None:
        """Check that a layer's contribution may enter; the first one begins the pass."""
        if forward.finished:
            raise GraphError(
                f"A second backward pass over one forward pass reached a layer ({where(path)}), so each "
                "loss would be clipped separately. Add the losses, and call backward() once.",
                doc="second-backward",
            )
        if forward not in self.forwards:
            self.forwards.append(forward)
        first, self.begun = not self.begun, True
        if first:
            batch.begin_pass()
        if forward.batch_size is None:
            forward.batch_size = samples
        if self._samples is None:
            self._samples = self.batch_size
        if samples != self._samples:
            raise GraphError(
                f"{where(path)} contributes {samples} samples to a backward pass of {self._samples} "
                "samples. Give all forward passes under one loss the same samples in the same order.",
                doc="data-order",
            )
        if first:
            self.units = batch.unit_samples(samples)

    def take(self, parameter: nn.Parameter, record: Record) -> None:
        """Take a contribution to `parameter`."""
        if self.units is not None and self.units.joined:
            record = record.of_units(self.units)
        self._hold(parameter, record)

    @property
    def joined(self) -> UnitSamples | None:
        """The units, if one may have several samples: then records are of units, not of samples."""
        return self.units if self.units is not None and self.units.joined else None

    def _hold(self, parameter: nn.Parameter, record: Record) -> None:
        entry = self.entries.get(id(parameter))
        if entry is None:
            self.entries[id(parameter)] = Entry(parameter, [record])
            return
        self._shared.add(parameter)
        entry.join(record)

    def others(self) -> set[int]:
        """Ids of the parameters of which there is, or may be, a contribution from elsewhere."""
        return {*map(id, self._shared), *map(id, self._wanted), *self.entries}

    def keep(self, parameter: nn.Parameter, gradients: Tensor) -> None:
        """Take the only contribution to a parameter: samples' gradients [b, *shape]."""
        rows = widen(gradients if gradients.dim() == 2 else gradients.flatten(1))
        samples, size = rows.shape
        if size > SMALL or not samples:
            self.take(parameter, KeptRecord(gradients.reshape(samples, *parameter.shape)))
        else:
            self.entries[id(parameter)] = Entry(parameter, [], rows=rows)

    def take_together(self, stack: Stack, norms: Tensor) -> None:
        """Take the only contributions to these parameters, with their squared norms [l, b]."""
        for parameter, norm_sq in zip(stack.parameters, norms.unbind(), strict=True):
            self.entries[id(parameter)] = Entry(parameter, [], norm_sq)
        self.stacks.append(stack)

    def take_derived(self, target: Target, record: Record, wanted: Iterable[nn.Parameter]) -> None:
        """Take a contribution to a value computed from parameters; its norms wait for the end."""
        assert target.edge is not None
        self._wanted.update(wanted)
        held = self._derived.setdefault((target.edge.node, target.edge.output_nr), [])
        held.append((target, record))

    def pull_back(self, ranks: Ranks | None) -> None:
        """Contributions to derived values become contributions to parameters.

        Args:
            ranks: gather the parameters from which the values are derived, if these are sharded.
        """
        by_graph: dict[Any, list[tuple[Any, Tensor]]] = {}
        for held in self._derived.values():
            target = held[0][0]
            for _, record in held:
                record.check_unmodified()
            origin = target.origin
            if origin is not None:
                for _, record in held:
                    self.take(origin.parameter, origin.record(record, self._planner))
                continue
            units = self.joined
            records = [r if units is None else r.of_units(units) for _, r in held]
            samples = [record.per_sample() for record in records]
            total = torch.stack(samples).sum(0) if len(samples) > 1 else samples[0]
            total = total.to(target.value.dtype)
            by_graph.setdefault(target.graph, []).append((target.edge, total))
        self._derived.clear()
        for forward in self.forwards:
            forward.derived = None  # the graph is not needed any more
        with whole(ranks, bool(by_graph)):
            for graph, contributions in by_graph.items():
                for parameter, gradient in graph.pull_back(contributions).items():
                    if parameter in self._wanted:
                        self._hold(parameter, KeptRecord(gradient))

    def places(self, parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
        """Of those that took part, in the order of all `parameters`, int64."""
        order = {id(parameter): i for i, parameter in enumerate(parameters)}
        return ops.index_on(tuple(order[own] for own in self.entries), device)

    def norms(self, factor: float, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Squared norms [l, b] of the parameters that took part, of the true gradients.

        Args:
            factor: what the gradients at hand are multiplied by. parameters: all of them; in their order
                those that took part are added up, however a layer has run.

        Returns:
            [l, u] where samples are clipped by units, in the order of `entries`.
        """
        samples = self.batch_size if self.joined is None else self.joined.count
        norms: list[Tensor] = []
        held = self.entries
        self.entries = {own: held[own] for own in map(id, parameters) if own in held}
        assert len(self.entries) == len(held), "whoever takes part is one of them"
        self.last_input = ops.LastInput()  # the one in it is not held any longer
        # In the order of the pass, in which inputs are shared.
        self.stacks += norms_of_linear(alone(held.values()))
        self.stacks += stack_small(self.entries.values())
        finish_norms(alone(held.values()), ops.LastInput())
        for entry in self.entries.values():
            norm, parameter = entry.norm_sq, entry.parameter
            if not isinstance(norm, Tensor):
                joint = joint_record(entry.records, self._planner)
                norm, entry.records = joint.norm_sq(), [joint]
            if norm.shape != (samples,):
                raise GraphError(
                    f"A rule recorded norms of shape {list(norm.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}, but the batch has {samples} samples. Record gradients "
                    "with the samples along axis 0.",
                    doc="layer-rule",
                )
            norms.append(norm)
        # The finest type in use; a coarser norm grows by what its own rounding may hide.
        dtype = max({norm.dtype for norm in norms}, key=lambda d: torch.finfo(d).bits)
        device = norms[0].device
        covered = [
            n if n.dtype == dtype else n.to(dtype) * (1 + margin(n.dtype)) ** 2 for n in norms
        ]
        stacked = torch.stack([n if n.device == device else n.to(device) for n in covered])
        if self._unbounded:
            sizes = [entry.parameter.numel() for entry in self.entries.values()]
            dtypes = [n.dtype for n in norms]
            stacked = ops.with_lost(stacked, sizes, dtypes)
        return self._unit_norms(stacked, factor)

    def _unit_norms(self, norm_sq: Tensor, factor: float) -> Tensor:
        units, device = self.units, norm_sq.device
        if units is None:
            return norm_sq * factor**2
        weights, unknown = units.weights(device), units.unknown(device)
        if not units.joined:
            norm_sq = norm_sq.index_select(1, units.firsts(device))
        if weights is None:
            norm_sq = norm_sq * factor**2
        else:
            norm_sq = (norm_sq.double() * (weights * factor).square()).to(norm_sq.dtype)
        return norm_sq if unknown is None else norm_sq.masked_fill(unknown, torch.inf)

    def factors(self, scales: Tensor, factor: float) -> Tensor:
        """What the records' gradients are multiplied by: `scales` [b], or [l, b], and `factor`.

        Args:
            scales: [u], or [l, u], where samples are clipped by units.
        """
        if self.units is None:
            return scales * factor
        weights = self.units.weights(scales.device)
        if weights is None:
            factors = scales * factor
        else:
            factors = (scales.double() * weights * factor).to(scales.dtype)
        return factors if self.units.joined else self.units.spread(factors)

    def write(self, sums: ClippedSums, factor: float, scales: Tensor) -> None:
        """Add the clipped sums of what the pass holds, given its `scales`."""
        factors = self.factors(scales, factor)
        with ops.looked_at(factors):
            self.sum_into(sums, factors)

    def sum_into(self, sums: ClippedSums, factors: Tensor) -> None:
        """Add the clipped sums of what the pass holds, and let go of it.

        Args:
            factors: [b]; or [l, b], in the order of `entries`.
        """
        samples = None
        if factors.dim() == 2:
            samples = {own: i for i, own in enumerate(self.entries)}
        while self.stacks:
            stack = self.stacks.pop()
            own = factors
            if samples is not None:
                of_stack = tuple(samples[id(parameter)] for parameter in stack.parameters)
                own = factors.index_select(0, ops.index_on(of_stack, factors.device))
            sums.add_all(*zip(*stack.clipped_sums(own.to(stack.device)), strict=True))
        for parameters in sums.together([entry.parameter for entry in self.entries.values()]):
            linear = LinearSums(sums.add, factors)
            for parameter in parameters:
                entry = self.entries.pop(id(parameter), None)
                if entry is None or not entry.records:  # in a stack
                    continue
                for record in entry.records:
                    record.check_unmodified()
                if samples is None and linear.take(parameter, entry.records):
                    continue
                own = factors if samples is None else factors[samples[id(parameter)]]
                own = own.to(parameter.device)
                for record in entry.records:
                    sums.add(parameter, record.clipped_sum(own))
            linear.finish()
            sums.exchange(parameters)

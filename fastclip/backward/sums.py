"""The clipped sums of a logical batch, and what a pass computes for several parameters at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.core.torch_names import base_of, plain_results
from fastclip.errors import GraphError, StepError
from fastclip.rules import BiasRecord, KeptRecord, LinearRecord, Record, join

_NONE = None, 0, None, None
_SHAPE, _NOTHING = attrgetter("shape"), {type(None)}


def _shown_of(parameters: Iterable[nn.Parameter]) -> list[Any]:
    return [*map(getattr, parameters, repeat("summed_grad"), repeat(None))]


class ShownSum(Tensor):
    """A clipped sum as `p.summed_grad` shows it; results computed from it are plain tensors.

    Saving a parameter (`torch.save(net.head.weight, file)`, the state of an optimizer, a list of
    parameters) saves its attributes, and a sum without noise is raw data. So it is pickled as an empty
    tensor, also in a copy that `copy.deepcopy` makes of it.
    """

    __torch_function__ = plain_results  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.new_empty(0).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownSum:
        return self.detach().clone().as_subclass(ShownSum)


class SumsOfOne(ABC):
    """Sums that one process makes by itself."""

    @abstractmethod
    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        """Add a clipped sum of one backward pass, of as many elements as the parameter."""

    def add_all(self, parameters: Sequence[nn.Parameter], clipped: Sequence[Tensor]) -> None:
        """`add` of several."""
        for parameter, total in zip(parameters, clipped, strict=True):
            self.add(parameter, total)

    def together(self, entries: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Lists of parameters, in the order in which a pass must sum what it holds for them."""
        return [list(entries)[::-1]]

    def exchange(self, parameters: list[nn.Parameter]) -> None:  # noqa: B027 - no other ranks
        """Exchange the sums of these, once a pass has summed all that it holds for them."""


class ClippedSums(SumsOfOne):
    """What one engine has summed since its last real step, by parameter.

    `p.summed_grad` shows a sum and is never read back: another engine of the same parameter, or a
    caller, could replace it by something unclipped. A copy is empty: raw sums are neither copied nor
    pickled with a model, nor with its parameters (`ShownSum`).
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, int, nn.Parameter, Tensor]] = {}
        """By the parameter's id, which is quicker to look up, and unique while the parameter is held."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ClippedSums:
        return ClippedSums()

    def __reduce__(self) -> Any:
        return ClippedSums, ()

    def add_all(self, parameters: Sequence[nn.Parameter], clipped: Sequence[Tensor]) -> None:
        own = {*map(id, parameters)}
        first = len(own) == len(parameters) and self._held.keys().isdisjoint(own)
        alone = {*map(type, _shown_of(parameters)), *map(type, map(base_of, clipped))} == _NOTHING
        shapes = [*map(_SHAPE, clipped)] == [*map(_SHAPE, parameters)]
        strides = [*map(Tensor.stride, clipped)] == [*map(Tensor.stride, parameters)]
        if not (first and alone and shapes and strides):
            super().add_all(parameters, clipped)
            return
        for parameter, total in zip(parameters, clipped, strict=True):
            shown = total.as_subclass(ShownSum)
            self._held[id(parameter)] = total, total._version, parameter, shown
            parameter.summed_grad = shown  # type: ignore[attr-defined]

    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        if clipped.shape != parameter.shape and clipped.numel() != parameter.numel():
            raise GraphError(
                f"A rule recorded gradients of size {clipped.numel()} for a parameter of shape "
                f"{list(parameter.shape)}. Record gradients of shape [b, *parameter.shape].",
                doc="layer-rule",
            )
        total = self.take(parameter)
        if total is None:
            # A part of a larger buffer would change its version together with the other parts.
            own = base_of(clipped) is None or clipped.untyped_storage().nbytes() == clipped.nbytes
            total = ops.shaped(clipped if own else clipped.clone(), *parameter.shape)
            total = ops.laid_out_as(total, parameter)
            shown: Tensor = total.as_subclass(ShownSum)
        else:
            total.add_(ops.shaped(clipped, *parameter.shape))
            shown = self._held[id(parameter)][3]
        self._held[id(parameter)] = total, total._version, parameter, shown
        parameter.summed_grad = shown  # type: ignore[attr-defined]

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of this parameter; None if no sample has touched it.

        Raises:
            StepError: if `p.summed_grad` is not what was summed, as far as this can be seen.
        """
        total, version, _, own = self._held.get(id(parameter), _NONE)
        shown = parameter.__dict__.get("summed_grad")
        if shown is not own or (total is not None and total._version != version):
            raise changed(f"a parameter of shape {tuple(parameter.shape)}")
        return total

    def take_all(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The sums of these parameters, as `take` returns them."""
        held = [self._held.get(own, _NONE) for own in map(id, parameters)]
        shown = _shown_of(parameters)
        alike = all(map(is_, shown, [own for *_, own in held]))
        if not alike or not all(x is None or x._version == version for x, version, *_ in held):
            return [self.take(parameter) for parameter in parameters]  # which says where
        return [total for total, *_ in held]

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget all sums, and show none on these parameters."""
        for parameter in (*parameters, *[held[2] for held in self._held.values()]):
            parameter.summed_grad = None  # type: ignore[attr-defined]
        self._held.clear()

    def __bool__(self) -> bool:
        return bool(self._held)


def changed(what: str) -> StepError:
    """The error for a sum that was changed from outside."""
    return StepError(
        f"p.summed_grad of {what} was changed after its samples were clipped and summed. Call "
        "optimizer.zero_grad(), and change p.grad after the noise instead (optimizer.pre_step()).",
        doc="changed-tensors",
    )


# -------------------------------------------------------------------------------------------------
# What a pass computes for several parameters at once, because each small operation has a fixed cost.


SMALL = 4096
"""Entries up to which a parameter's kept gradients wait for others of their size."""

ROOM = 32 << 20
"""Bytes that sums of linear layers, computed together, may always take."""


@dataclass
class Entry:
    """The contributions of one pass to one parameter."""

    parameter: nn.Parameter
    records: list[Record]
    norm_sq: Tensor | ops.LaterNorm | None = None
    """[b], or the parts that it is computed from; None until the pass ends."""
    rows: Tensor | None = None
    """Instead of records: gradients [b, n] of a small parameter, in the accumulation type."""

    def join(self, record: Record) -> None:
        """Add one more contribution."""
        self.settle()
        self.records[:] = [own.settled() for own in self.records]
        join(self.records, record.settled())

    def settle(self) -> None:
        """Make a record of its samples, if it has any."""
        if self.rows is not None:
            gradients = self.rows.reshape(len(self.rows), *self.parameter.shape)
            self.records.append(KeptRecord(gradients))
            self.rows = None


def alone(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with one record and an unknown norm."""
    return [entry for entry in entries if entry.norm_sq is None and len(entry.records) == 1]


def _is_small(record: Record) -> bool:
    """Whether it holds the gradients of a small parameter, unchanged."""
    if type(record) is not KeptRecord or not record.as_given:
        return False
    return record.gradients.dim() > 0 and record.gradients.shape[1:].numel() <= SMALL


class Stack(Protocol):
    """What several parameters share, each from one use of its own.

    Attributes:
        parameters: k of them. device: on which their sums are computed.
    """

    parameters: list[nn.Parameter]

    @property
    def device(self) -> torch.device: ...

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every parameter, a tensor with a version of its own.

        Args:
            scales: [b], or [k, b].
        """


@dataclass
class KeptStack:
    """The gradients of k small parameters of n entries each, [k, b, n]."""

    parameters: list[nn.Parameter]
    gradients: Tensor

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self.gradients.device

    def norms(self) -> Tensor:
        """Their squares, [k, b]."""
        return ops.row_norm_sq(self.gradients.flatten(0, 1)).view(self.gradients.shape[:2])

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every parameter, [n].

        Args:
            scales: [b], or [k, b].
        """
        sums = ops.kept_sums(self.gradients, scales).unbind()
        # `data` has a version of its own, so that no part need be copied out of the buffer.
        return zip(self.parameters, (sample.data for sample in sums), strict=True)


def norms_of_linear(entries: Sequence[Entry]) -> list[Stack]:
    """Compute norms of linear layers of one kind together on a GPU, with their biases' gradients.

    Args:
        entries: with one record each, as are those of the functions below.

    Returns:
        The biases' gradients, taken out of their entries, which get their norms.
    """
    biases: dict[int, Entry] = {}
    groups: dict[Any, list[tuple[Entry, LinearRecord]]] = {}
    linears: list[tuple[Entry, LinearRecord]] = []
    for entry in entries:
        record = entry.records[0]
        if type(record) is BiasRecord:
            biases[id(record.linear)] = entry
        elif (linear := record.together) is not None:
            record.check_unmodified()
            linears.append((entry, linear))
    for entry, linear in linears:
        groups.setdefault((linear.kind, id(linear) in biases), []).append((entry, linear))
    by_size: dict[Any, tuple[list[Entry], list[Tensor]]] = {}
    for (_, biased), group in groups.items():
        for some in _groups(group, biased):
            norms, gradients = ops.ghost_norms([(x.a, x.g) for _, x in some], biased)
            for (entry, _), norm_sq in zip(some, norms.unbind(), strict=True):
                entry.norm_sq = norm_sq
            if gradients is not None:
                size = gradients.shape[1:], gradients.dtype, gradients.device
                small, samples = by_size.setdefault(size, ([], []))
                small += [biases.pop(id(x)) for _, x in some]
                samples.append(gradients)
    for entry in biases.values():  # their weights have other uses
        entry.records[:] = [entry.records[0].settled()]
    return [
        _stacked(small, samples[0] if len(samples) == 1 else torch.cat(samples))
        for small, samples in by_size.values()
    ]


def _groups(
    group: list[tuple[Entry, LinearRecord]], biased: bool
) -> Iterator[list[tuple[Entry, LinearRecord]]]:
    """As many as a kernel takes, and as ROOM has for the sums of the biases' tiles."""
    g = group[0][1].g
    size = 4 * (g.shape[0] * (g.shape[1] // 64 + 1) * g.shape[2]) if biased else 1
    most = max(1, min(ops.LAYERS_TOGETHER, ROOM // max(1, size)))
    for first in range(0, len(group), most):
        yield group[first : first + most]


def _stacked(small: list[Entry], samples: Tensor) -> Stack:
    """Gradients [k, b, n] of these, which get their norms."""
    stack = KeptStack([entry.parameter for entry in small], samples)
    for entry, norm_sq in zip(small, stack.norms().unbind(), strict=True):
        entry.records.clear()
        entry.norm_sq, entry.rows = norm_sq, None
    return stack


def stack_small(entries: Iterable[Entry]) -> list[Stack]:
    """Small parameters' gradients, taken out of their entries, which get their norms.

    Args:
        entries: all of a pass, in the order of the parameters, whatever the order of their recording.

    Raises:
        GraphError: one was changed in place after it was recorded.
    """
    groups: dict[Any, tuple[list[Entry], list[Tensor]]] = {}
    for entry in entries:
        samples = entry.rows
        if samples is None:
            if entry.norm_sq is not None or len(entry.records) != 1:
                continue
            record = entry.records[0]
            if not _is_small(record):
                continue
            record.check_unmodified()
            samples = record.per_sample()
            samples = ops.shaped(samples, len(samples), samples.shape[1:].numel())
        small, held = groups.setdefault((samples.shape, samples.dtype, samples.device), ([], []))
        small.append(entry)
        held.append(samples)
    for small, _ in groups.values():
        if len(small) == 1:
            small[0].settle()
    return [_stacked(small, torch.stack(held)) for small, held in groups.values() if len(held) > 1]


def finish_norms(entries: Iterable[Entry], last_input: ops.LastInput) -> None:
    """Compute norms of all entries with one record, the last operations for several layers at once.

    Args:
        last_input: what is known about the last input.
    """
    groups: dict[Any, list[tuple[Entry, ops.LaterNorm]]] = {}
    for entry in entries:
        record = entry.records[0]
        record.check_unmodified()
        entry.norm_sq = record.norm_parts(last_input)
        if type(entry.norm_sq) is not Tensor and isinstance(entry.norm_sq, ops.LaterNorm):
            groups.setdefault(entry.norm_sq.kind, []).append((entry, entry.norm_sq))
    for pairs in groups.values():
        norms = pairs[0][1].together([norm for _, norm in pairs])
        for (entry, _), norm_sq in zip(pairs, norms.unbind(), strict=True):
            entry.norm_sq = norm_sq


class LinearSums:
    """Clipped sums of linear layers on a GPU, of layers of one kind together.

    Records are freed when their group is summed. Its sums are computed at once, and take no more bytes
    than ROOM, or than the operands of one of its layers.

    Args:
        add: takes a parameter and its sum, of any shape. scales: [b], of all layers.
    """

    def __init__(self, add: Callable[[nn.Parameter, Tensor], None], scales: Tensor) -> None:
        self._add, self._scales = add, scales
        self._waiting: dict[Any, list[tuple[nn.Parameter, tuple[Tensor, Tensor]]]] = {}

    def take(self, parameter: nn.Parameter, records: list[Record]) -> bool:
        """Whether it is the one record of a layer for which a kernel would sum several together."""
        linear = records[0].together
        if len(records) > 1 or linear is None:
            return False
        a, g = pair = linear.pair()
        waiting = self._waiting.setdefault(linear.kind, [])
        waiting.append((parameter, pair))
        room = max(ROOM, a.nbytes + g.nbytes)
        sums = 4 * a.shape[-1] * g.shape[-1] * (len(waiting) + 1)  # with one more layer
        if len(waiting) == ops.LAYERS_TOGETHER or sums > room:
            self._sum(waiting)
        return True

    def finish(self) -> None:
        """Sum the layers that wait."""
        for waiting in self._waiting.values():
            self._sum(waiting)

    def _sum(self, waiting: list[tuple[nn.Parameter, tuple[Tensor, Tensor]]]) -> None:
        parameters, pairs = [p for p, _ in waiting], [pair for _, pair in waiting]
        waiting.clear()
        if not pairs:
            return
        scales = self._scales.to(pairs[0][0].device)
        if len(pairs) == 1:
            self._add(parameters[0], ops.scaled_sum(*pairs[0], scales))
            return
        for parameter, total in zip(parameters, ops.scaled_sums(pairs, scales), strict=True):
            self._add(parameter, total.data)  # which has a version of its own

"""What a run leaves of its operations: two runs that leave the same have computed the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import tree_leaves
from fastclip.trace.attribution import UNSEEN, fitted, lie_along
from fastclip.trace.memory import CHANCE, RANDOM, TRAINED, Shadow, geometry_of
from fastclip.trace.numbers import LARGEST, number_arguments
from fastclip.trace.operation import Kind


class Trail:
    """The operations of a run in their order, with all that tells one run from another: two runs that
    leave equal ones have computed the same of their inputs.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._running: _Step | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trail) and self._steps == other._steps

    def note(
        self, tracer: Any, kind: Kind, args: tuple, kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    ) -> None:  # fmt: skip
        """An operation runs."""
        aside = Tensor, torch.Generator  # what that draws is an operand of other operations
        named = [(name, x) for name, x in kwargs.items() if not isinstance(x, aside)]
        sizes = [x for x in tree_leaves(args) if not isinstance(x, Tensor)]
        meets = any(s.held or s.flags & (TRAINED | RANDOM | CHANCE) for s in shadows)
        of_one = kind.name in _COMPARING and not any(x.dim() for x in tensors)
        of_sizes = kind.name == "arange" or of_one
        numbers = [] if of_sizes else list(number_arguments(kind, args))
        held = [
            _identity(tracer, x, s, meets) for x, s in zip(tensors, shadows, strict=True)
            if x.layout is torch.strided
        ]  # fmt: skip
        self._running = _Step(kind, named, numbers, sizes, held)
        self._steps.append(self._running)

    def gave(self, tracer: Any, outs: Sequence[Tensor]) -> None:
        """An operation has returned these."""
        if self._running is None:
            return
        self._running.outs.extend(
            _identity(tracer, x, tracer.shadow_of(x), meets=True)
            for x in outs[: 1 if self._running.kind.name in _RECURRENT else None]
            if x.layout is torch.strided
        )
        self._running = None

    def agrees(self, other: Trail, samples: int, others: int) -> bool:
        """The runs differ in sizes alone, which follow the number of samples: no number does, nor the
        size of an axis along which no samples lie.

        Args:
            samples, others: of this run, and of the other.
        """
        pairs = zip(self._steps, other._steps, strict=False)
        same = len(self._steps) == len(other._steps)
        return same and all(one.agrees(two, samples, others) for one, two in pairs)


@dataclass
class _Step:
    kind: Kind
    named: list[tuple[str, Any]]
    numbers: list[float]
    sizes: list[Any]
    held: list[_Operand]
    outs: list[_Operand] = field(default_factory=list)

    def agrees(self, other: _Step, samples: int, others: int) -> bool:
        """The other operation is the same on so many other samples."""
        if (
            self.kind is not other.kind
            or self.named != other.named
            or self.numbers != other.numbers
        ):
            return False
        of_one = self.kind.name in _COMPARING and not any(a.geometry[1] for a in self.held)
        may_follow = of_one or self.kind.name in _SHAPED
        sizes = list(zip(self.sizes, other.sizes, strict=False))
        pairs = list(zip(self.held, other.held, strict=False))
        given = list(zip(self.outs, other.outs, strict=False))
        return (
            len(self.sizes) == len(other.sizes)
            and len(self.held) == len(other.held)
            and len(self.outs) == len(other.outs)
            and all(a == b or (may_follow and _follows(a, b, samples, others)) for a, b in sizes)
            and all(a.is_like(b) for a, b in pairs)
            and all(a.grows_as(b) for a, b in (*pairs, *given) if a.axes is not None)
            and self._is_aligned(pairs, given)
        )

    def _is_aligned(
        self, pairs: list[tuple[_Operand, _Operand]], given: list[tuple[_Operand, _Operand]]
    ) -> bool:
        """Constants that grow lie alongside samples, or are made into others that grow."""
        growing = {k for a, b in pairs if a.axes is None for k in a.growing(b)}
        if not growing:
            return True
        if self.kind.name == "diagonal":  # of each sample another entry
            return False
        held = [a for a, _ in (*pairs, *given) if a.axes is not None]
        if not held:
            return all(a.growing(b) or (a.numbers is not None and a.is_like(b)) for a, b in given)
        if self.kind.name in _INDEXING or self.kind.name in _RECURRENT:
            return True
        axes = [a.axes or () for a in held]
        along = {k - len(own) for own in axes for k, lies in enumerate(own) if lies}
        one_by_one = self.kind.pointwise or self.kind.aligned == "stacked"
        return (one_by_one or self.kind.name in _TOGETHER) and growing <= along


@dataclass(frozen=True, eq=False)
class _Operand:
    """What tells it from another.

    Args:
        serial: of what was written there last; the same in another run. geometry: of the tensor.
        axes: along which samples lie; None of a constant. numbers: of a small constant.
    """

    serial: object
    geometry: tuple
    axes: tuple[bool, ...] | None = None
    numbers: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Operand) and self.geometry == other.geometry
            and (self.serial == other.serial if self.numbers is None else self._is_part_of(other))
        )  # fmt: skip

    def is_like(self, other: _Operand) -> bool:
        """The same operand, of a run on other samples: constants begin with the same numbers."""
        if (self.axes is None) is not (other.axes is None):
            return False
        if self.numbers is None or other.numbers is None:
            return self.numbers is other.numbers and self.serial == other.serial
        return self._is_part_of(other) or other._is_part_of(self)

    def growing(self, other: _Operand) -> set[int]:
        """The axes, counted from the last, whose sizes differ."""
        mine, others = self.geometry[1], other.geometry[1]
        if len(mine) != len(others):
            return {0}
        pairs = zip(mine, others, strict=True)
        return {k - len(mine) for k, (n, m) in enumerate(pairs) if n != m}

    def grows_as(self, other: _Operand) -> bool:
        """Of samples: along their axes alone."""
        if self.axes is None or other.axes is None:
            return self.axes is other.axes
        return all(k < 0 and self.axes[k] and other.axes[k] for k in self.growing(other))

    def _is_part_of(self, other: _Operand) -> bool:
        one, two = self.numbers, other.numbers
        if one is None or two is None or one.dim() != two.dim() or one.dtype != two.dtype:
            return False
        if any(n > m for n, m in zip(one.shape, two.shape, strict=True)):
            return False
        return torch.equal(one, two[tuple(map(slice, one.shape))])


_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
"""Of one number of all samples, they answer a question of Python's, or join samples."""
_SHAPED = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "as_strided", "split",
    "unsafe_split", "split_with_sizes", "unflatten", "narrow", "arange", "zeros", "ones", "empty",
    "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn", "randint", "randperm",
    "repeat", "empty_strided", "new_empty_strided", "resize", "native_group_norm",
))  # fmt: skip
"""Whose numbers are sizes: these may follow the number of samples, as far as shapes do so rightly."""
_INDEXING = frozenset(("index", "index_put", "index_select", "gather", "embedding"))
_RECURRENT = frozenset(("mkldnn_rnn_layer",))
"""They begin with states of zeros, and return memory that they work in."""
_TOGETHER = frozenset(("cat", "stack", "copy", "where", "masked_fill"))


def _follows(one: Any, other: Any, samples: int, others: int) -> bool:
    return type(one) is int and type(other) is int and one * others == other * samples


def _axes(shadow: Shadow, x: Tensor) -> tuple[bool, ...] | None:
    if shadow.sample is None or (shadow.sample.numel() == 1 and int(shadow.sample) == UNSEEN):
        return None  # memory that holds nothing yet is no sample's
    found = fitted(shadow.sample, x.dim())
    assert found is not None
    return tuple(n > 1 and lie_along(found, axis) for axis, n in enumerate(found.shape))


def _identity(tracer: Any, x: Tensor, shadow: Shadow, meets: bool) -> _Operand:
    """Of an operand of an operation that meets samples or trained tensors, or does not."""
    drawn, axes = shadow.flags & (RANDOM | CHANCE | TRAINED), _axes(shadow, x)
    if shadow.held or drawn or x.numel() > LARGEST or x.is_meta or not meets:
        known = tracer.memory.record(x) is not None
        return _Operand(tracer.memory.serial(x) if known else None, geometry_of(x), axes)
    with tracer.aside():
        return _Operand(None, geometry_of(x), axes, x.detach().clone())

"""An operation of a run, with all that tells it from the same one of another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastclip.trace.attribution import UNSEEN
from fastclip.trace.memory import CHANCE, RANDOM, TRAINED, Shadow, geometry_of, key_of
from fastclip.trace.numbers import LARGEST
from fastclip.trace.operation import Kind


@dataclass
class Step:
    kind: Kind
    named: list[tuple[str, Any]]
    numbers: list[float]
    sizes: list[Any]
    held: list[Operand]
    outs: list[Operand] = field(default_factory=list)
    source: Tensor | None = None
    """The attribution of what it takes a part of."""

    def agrees(self, other: Step, samples: int, others: int, *, constants: bool = True) -> bool:
        """The other operation is the same on so many other samples; `constants`: in numbers, too."""
        if (
            self.kind is not other.kind
            or self.named != other.named
            or self.numbers != other.numbers
        ):
            return False
        of_one = self.kind.name in COMPARING and not any(a.geometry[1] for a in self.held)
        may_follow = of_one or self.kind.name in _SHAPED
        sizes = list(zip(self.sizes, other.sizes, strict=False))
        pairs = list(zip(self.held, other.held, strict=False))
        given = list(zip(self.outs, other.outs, strict=False))
        same = (
            len(self.sizes) == len(other.sizes)
            and len(self.held) == len(other.held)
            and (
                len(self.outs) == len(other.outs)
                or (
                    self.takes_samples
                    and _follows(len(self.outs), len(other.outs), samples, others)
                )
            )
            and all(a == b or (may_follow and _follows(a, b, samples, others)) for a, b in sizes)
        )
        if same and self.is_known and other.is_known:
            return True
        return (
            same
            and all(a.is_like(b, constants=constants) for a, b in pairs)
            and all(a.grows_as(b) for a, b in (*pairs, *given) if a.axes is not None)
            and self._is_aligned(pairs, given, constants=constants)
        )

    @property
    def takes_samples(self) -> bool:
        """It gives a part for each sample."""
        return (
            self.kind.name == "unbind" and self.held[0].axes is not None and any(self.held[0].axes)
        )

    @property
    def is_known(self) -> bool:
        """It makes constants of constants, all of whose numbers are compared where they meet samples."""
        return bool(self.outs) and all(x.numbers is not None for x in (*self.held, *self.outs))

    def _is_aligned(
        self, pairs: list[tuple[Operand, Operand]], given: list[tuple[Operand, Operand]], *,
        constants: bool,
    ) -> bool:  # fmt: skip
        """Constants that grow lie alongside samples, or are made into others that grow."""
        growing = {k for a, b in pairs if a.axes is None for k in a.growing(b)}
        if not growing:
            return True
        if self.kind.name == "diagonal":  # of each sample another entry
            return False
        held = [a for a, _ in (*pairs, *given) if a.axes is not None]
        if not held:
            return all(
                a.growing(b) or (a.numbers is not None and a.is_like(b, constants=constants))
                for a, b in given
            )
        if self.kind.name in _INDEXING or self.kind.name in RECURRENT:
            return True
        axes = [a.axes or () for a in held]
        along = {k - len(own) for own in axes for k, lies in enumerate(own) if lies}
        if self.kind.name in _NORMS:  # whose weights lie along the channels
            return all(own[1:2] == (True,) for own in axes if len(own) > 1)
        if self.kind.name in _SCATTERING:
            dim = self.sizes[0] % len(self.held[0].geometry[1])
            return growing <= along - {dim - len(self.held[0].geometry[1])}
        one_by_one = self.kind.pointwise or self.kind.aligned == "stacked"
        return (one_by_one or self.kind.name in _TOGETHER) and growing <= along


@dataclass(frozen=True, eq=False)
class Operand:
    """What tells it from another.

    Args:
        serial: of what was written there last; the same in another run. geometry: of the tensor.
        axes: along which samples lie; None of a constant. numbers: of a small or uniform constant.
        sample: the one that it is of, where others have tensors of their own. leaf: names what was there
            before the run.
    """

    serial: object
    geometry: tuple
    axes: tuple[bool, ...] | None = None
    numbers: Tensor | None = None
    sample: int | None = None
    leaf: object = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Operand) and self.geometry == other.geometry
            and (self.serial == other.serial if self.numbers is None else self._is_part_of(other))
        )  # fmt: skip

    def is_like(self, other: Operand, *, constants: bool = True) -> bool:
        """The same operand, of a run on other samples: `constants` begin with the same numbers."""
        if (self.axes is None) is not (other.axes is None) or self.leaf != other.leaf:
            return False
        if not constants:
            return True
        if self.numbers is None or other.numbers is None:
            return self.numbers is other.numbers and self.serial == other.serial
        return self._is_part_of(other) or other._is_part_of(self)

    def growing(self, other: Operand) -> set[int]:
        """The axes, counted from the last, whose sizes differ."""
        mine, others = self.geometry[1], other.geometry[1]
        if len(mine) != len(others):
            return {0}
        pairs = zip(mine, others, strict=True)
        return {k - len(mine) for k, (n, m) in enumerate(pairs) if n != m}

    def grows_as(self, other: Operand) -> bool:
        """Of samples: along their axes alone."""
        if self.axes is None or other.axes is None:
            return self.axes is other.axes
        return all(k < 0 and self.axes[k] and other.axes[k] for k in self.growing(other))

    def _is_part_of(self, other: Operand) -> bool:
        one, two = self.numbers, other.numbers
        if one is None or two is None or one.dim() != two.dim() or one.dtype != two.dtype:
            return False
        if any(n > m for n, m in zip(one.shape, two.shape, strict=True)):
            return False
        return torch.equal(one, two[tuple(map(slice, one.shape))])


COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
"""Of one number of all samples, they answer a question of Python's, or join samples."""
_SHAPED = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "as_strided", "split",
    "unsafe_split", "split_with_sizes", "unflatten", "narrow", "arange", "zeros", "ones", "empty",
    "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn", "randint", "randperm",
    "repeat", "empty_strided", "new_empty_strided", "resize", "native_group_norm",
))  # fmt: skip
"""Whose numbers are sizes: these may follow the number of samples, as far as shapes do so rightly."""
_INDEXING = frozenset((
    "index", "index_put", "index_select", "gather", "embedding", "fractional_max_pool2d",
    "fractional_max_pool3d",
))  # fmt: skip
"""Some of their operands have rows of their own beside the samples'."""
RECURRENT = frozenset(("mkldnn_rnn_layer",))
"""They begin with states of zeros, and return memory that they work in."""
_NORMS = frozenset(("native_batch_norm", "_native_batch_norm_legit"))
_SCATTERING = frozenset(("scatter", "scatter_add", "scatter_reduce"))
"""Along all axes but one an entry goes where it lies."""
_TOGETHER = frozenset(("cat", "stack", "copy", "where", "masked_fill"))


def _follows(one: Any, other: Any, samples: int, others: int) -> bool:
    return type(one) is int and type(other) is int and one * others == other * samples


def _axes(shadow: Shadow, x: Tensor) -> tuple[bool, ...] | None:
    if shadow.sample is None or (shadow.sample.numel() == 1 and int(shadow.sample) == UNSEEN):
        return None  # memory that holds nothing yet is no sample's
    return shadow.axes(x.dim())


def identity(tracer: Any, x: Tensor, shadow: Shadow, leaves: Mapping[int, object]) -> Operand:
    """Of an operand.

    Args:
        leaves: names of what was there before the run, by its memory.
    """
    drawn, axes = shadow.flags & (RANDOM | CHANCE | TRAINED), _axes(shadow, x)
    alone = next(iter(shadow.samples)) if is_of_one(shadow) else None
    known, leaf, numbers = tracer.memory.record(x) is not None, leaves.get(key_of(x)), None
    if not (shadow.held or drawn or x.is_meta):
        with tracer.aside():
            numbers = _numbers(x.detach(), of_run=leaf is None)
    serial = tracer.memory.serial(x) if known else None
    return Operand(serial, geometry_of(x), axes, numbers, alone, leaf)


def _numbers(x: Tensor, *, of_run: bool) -> Tensor | None:
    """Of a constant that is small, or is one number everywhere (what a run begins with)."""
    if x.numel() <= LARGEST:
        return x.clone()
    if not of_run:
        return None
    first = x.reshape(-1)[:1].clone()
    return first.reshape([1] * x.dim()).expand(x.shape) if bool((x == first).all()) else None


def is_of_one(shadow: Shadow) -> bool:
    """It is of one sample, and others have tensors of their own."""
    return shadow.partial and not shadow.mixed and len(shadow.samples) == 1

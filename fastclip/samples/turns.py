"""Samples that a run computes one after the other: what it does for each is the same.

Where a loop runs over the samples, a run on three of them has more operations than one on two. They are
told apart by what they are computed of: those of one sample alone, and of what only these ask for, are
that sample's own; the others are of all. Numbers of writes are replaced by names: of the operation
among those of its sample, or among those of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastclip.samples.steps import Operand, Step
from fastclip.trace.memory import content_of

TAKES = frozenset(("select", "slice"))
"""Views that take one sample by its number."""
_ALL, _NOBODY = -1, -2
"""Whose an operation is: of all samples; of none, and nothing asks for what it gives."""
_Made = tuple[int, int] | None
"""The number of the operation that has made an operand, and of its output."""
_COLLAPSED = 0, torch.Size(), (), 0


class Uneven(Exception):
    """Samples are not treated alike."""


def in_turns(steps: Sequence[Step]) -> bool:
    """Something was computed of one sample alone."""
    return any(x.sample is not None for step in steps for x in step.held)


def take_turns(steps: Sequence[Step], samples: int) -> tuple[list[Step], list[Hashable]]:
    """The operations on all samples, with one operand in the place of each sample's own; and those on
    each sample.

    Raises:
        Uneven: these are not the same for all of them.
    """
    steps = [step for step in steps if not _is_as_it_was(step)]
    made = _made(steps)
    whose = _whose(steps, made)
    count: Counter[int] = Counter()
    names: list[tuple[bool, int]] = []
    for of in whose:
        names.append((of == _ALL, count[of]))
        count[of] += 1
    found = _Named(steps, names, made, samples)
    own: dict[int, list[Hashable]] = {i: [] for i in range(samples)}
    for number, of in enumerate(whose):
        if of >= 0:
            own.setdefault(of, []).append(found.own(number, of))
    if any(each != own[0] for each in own.values()):
        raise Uneven
    return [found.of_all(n) for n, of in enumerate(whose) if of == _ALL], own[0]


def _is_as_it_was(step: Step) -> bool:
    """It gives the constant that it was given (`detach`)."""
    given = {(x.serial, x.geometry) for x in step.held if x.serial is not None and x.axes is None}
    return bool(step.outs) and all((x.serial, x.geometry) in given for x in step.outs)


def _made(steps: Sequence[Step]) -> list[list[_Made]]:
    """For each operand of each operation, what has made it."""
    values: dict[Hashable, tuple[int, int]] = {}
    writes: dict[Hashable, tuple[int, int]] = {}
    found = []
    for number, step in enumerate(steps):
        found.append([values.get((x.serial, x.geometry), writes.get(x.serial)) for x in step.held])
        given = {x.serial for x in step.held}
        for k, x in enumerate(step.outs):
            if x.serial is not None:
                values[x.serial, x.geometry] = number, k
                if x.serial not in given:  # no view
                    writes[x.serial] = number, k
    return found


def _whose(steps: Sequence[Step], made: Sequence[Sequence[_Made]]) -> list[int]:
    """The sample of each operation: of its operands, or of all that asks for what it gives."""
    asking: list[set[int]] = [set() for _ in steps]
    found = [_ALL] * len(steps)
    for number in reversed(range(len(steps))):
        step = steps[number]
        own = {x.sample for x in step.held if x.sample is not None} or asking[number]
        if len(own) == 1:
            found[number] = next(iter(own))
        elif not own and _has_no_effect(step):
            found[number] = _NOBODY
        for source in made[number] if found[number] != _NOBODY else ():
            if source is not None:
                asking[source[0]].add(found[number])
    return found


def _has_no_effect(step: Step) -> bool:
    """Where nobody asks for what it gives: of constants, or a sample that is taken in vain."""
    if step.kind.writes:
        return False
    of_constants = all(x.axes is None for x in (*step.held, *step.outs))
    return of_constants or (step.kind.name in TAKES and step.outs[0].sample is not None)


class _Named:
    """Operations whose operands have names that are the same in every run.

    Args:
        names: of the operations: whether it is one of all samples, and its number among these, or among
            those of its sample.
    """

    def __init__(
        self, steps: Sequence[Step], names: Sequence[tuple[bool, int]],
        made: Sequence[Sequence[_Made]], samples: int,
    ) -> None:  # fmt: skip
        self._steps, self._names, self._made, self._samples = steps, names, made, samples

    def own(self, number: int, sample: int) -> Hashable:
        """All that tells an operation on this sample from another."""
        step = self._steps[number]
        sizes = _relative(step, sample)
        held = [(self._name(number, k), _shape(x), _content(x)) for k, x in enumerate(step.held)]
        outs = [(_shape(x), x.axes is None) for x in step.outs]
        kind = (id(step.kind), repr(step.named), repr(step.numbers), repr(sizes))
        return *kind, tuple(held), tuple(outs)

    def of_all(self, number: int) -> Step:
        """An operation on all samples."""
        step = self._steps[number]
        held = [replace(x, serial=self._name(number, k)) for k, x in enumerate(step.held)]
        outs = [replace(x, serial=None) for x in step.outs]
        return replace(step, held=self._collapsed(held), outs=self._collapsed(outs))

    def _name(self, number: int, k: int) -> Hashable:
        """Of an operand."""
        x, made = self._steps[number].held[k], self._made[number][k]
        if made is None:
            return x.serial if x.leaf is None else ("leaf", x.leaf)
        source, k = made
        outs = self._steps[source].outs
        if x.sample is not None and outs[k].sample == x.sample:  # of each sample another output
            k = sum(y.sample == x.sample for y in outs[:k])
        seen = x.geometry == outs[made[1]].geometry
        return (*self._names[source], k, None if seen else x.geometry)

    def _collapsed(self, found: list[Operand]) -> list[Operand]:
        """One in the place of those of single samples, if each has the same, one after the other."""
        places = [k for k, x in enumerate(found) if x.sample is not None]
        if not places or len(places) % self._samples:
            return found
        own = [found[k] for k in places]
        each = len(own) // self._samples
        names = [(x.serial, x.geometry[1]) for x in own]
        in_order = [x.sample for x in own] == [k // each for k in range(len(own))]
        alike = names == names[:each] * self._samples
        together = places[-1] - places[0] == len(places) - 1
        if not (in_order and alike and together):
            return found
        one = Operand(("each", places[0], *names[:each]), _COLLAPSED, ())
        return [*found[: places[0]], one, *found[places[-1] + 1 :]]


def _shape(x: Operand) -> tuple[int | None, ...]:
    """Without the sizes that follow the number of samples."""
    along = x.axes if x.axes is not None and x.sample is None else (False,) * len(x.geometry[1])
    return tuple(None if lies else n for n, lies in zip(x.geometry[1], along, strict=True))


def _content(x: Operand) -> Hashable:
    return None if x.numbers is None else (x.numbers.dtype, content_of(x.numbers))


def _relative(step: Step, sample: int) -> list[object]:
    """The numbers that an operation was given; where it takes a sample, counted from that one on."""
    source, sizes = step.source, step.sizes
    if source is None or not step.outs or step.outs[0].sample != sample:
        return sizes
    axis, *where = [*sizes, None, None, None][:4]
    dim = (axis or 0) % source.dim()
    if source.shape[dim] == 1:
        return sizes
    size = step.held[0].geometry[1][dim]
    first = _first(source, dim, sample)
    if step.kind.name == "select":
        return [dim, where[0] % size - first]
    start, end, by = slice(*where).indices(size)
    return [dim, start - first, end - first, by]


def _first(source: Tensor, dim: int, sample: int) -> int:
    """Where the sample begins along this axis."""
    own = source == sample
    others = [axis for axis in range(source.dim()) if axis != dim]
    own = own.any(others) if others else own
    return int(own.to(torch.uint8).argmax())

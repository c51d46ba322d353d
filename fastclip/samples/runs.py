"""Records of a run's operations: two runs with equal records have computed the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastclip.core.building import of_this_torch
from fastclip.core.torch_names import (
    current_task,
    in_compiled_call,
    is_profiled,
    transformed,
    tree_leaves,
)
from fastclip.trace.attribution import UNSEEN, fitted
from fastclip.trace.memory import CHANCE, RANDOM, TRAINED, Shadow, content_of, geometry_of, key_of
from fastclip.trace.numbers import LARGEST, number_arguments
from fastclip.trace.operation import Kind
from fastclip.trace.tracer import ASIDE


@dataclass
class Step:
    kind: Kind
    named: list[tuple[str, Any]]
    numbers: list[float]
    sizes: list[Any]
    held: list[Operand]
    outs: list[Operand] = field(default_factory=list)
    source: Tensor | None = None
    """The sample attribution of the tensor that it takes a part of."""

    def agrees(self, other: Step, samples: int, others: int, *, constants: bool = True) -> bool:
        """Whether the other operation is the same on so many other samples; `constants`: in values,
        too."""
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
        """Whether it gives a part for each sample."""
        return (
            self.kind.name == "unbind" and self.held[0].axes is not None and any(self.held[0].axes)
        )

    @property
    def is_known(self) -> bool:
        """Whether it computes constants from constants; all are compared when they meet samples."""
        return bool(self.outs) and all(x.numbers is not None for x in (*self.held, *self.outs))

    def _is_aligned(
        self, pairs: list[tuple[Operand, Operand]], given: list[tuple[Operand, Operand]], *,
        constants: bool,
    ) -> bool:  # fmt: skip
        """Whether constants that grow lie alongside samples, or become others that grow."""
        growing = {k for a, b in pairs if a.axes is None for k in a.growing(b)}
        if not growing:
            return True
        if self.kind.name == "diagonal":  # another entry of each sample
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
        if self.kind.name in _NORMS:  # their weights lie along the channels
            return all(own[1:2] == (True,) for own in axes if len(own) > 1)
        if self.kind.name in _SCATTERING:
            dim = self.sizes[0] % len(self.held[0].geometry[1])
            return growing <= along - {dim - len(self.held[0].geometry[1])}
        one_by_one = self.kind.pointwise or self.kind.aligned == "stacked"
        return (one_by_one or self.kind.name in _TOGETHER) and growing <= along


@dataclass(frozen=True, eq=False)
class Operand:
    """Identifies an operand among all others.

    Args:
        serial: of the last write there; the same in another run. geometry: of the tensor.
        axes: along which samples lie; None for a constant. numbers: of a small or uniform constant.
        sample: its sample, if others have tensors of their own. leaf: names a tensor that was there
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
        """Whether it is the same operand in a run on other samples, with the same `constants`."""
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
        """Whether its samples grow along their batch axes only."""
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
"""With one number of all samples, they answer a question of Python, or mix samples."""
_SHAPED = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "as_strided", "split",
    "unsafe_split", "split_with_sizes", "unflatten", "narrow", "arange", "zeros", "ones", "empty",
    "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn", "randint", "randperm",
    "repeat", "empty_strided", "new_empty_strided", "resize", "native_group_norm",
))  # fmt: skip
"""Their numbers are sizes, which may grow with the number of samples as shapes do."""
_INDEXING = frozenset((
    "index", "index_put", "index_select", "gather", "embedding", "fractional_max_pool2d",
    "fractional_max_pool3d",
))  # fmt: skip
"""Some of their operands have rows of their own in addition to the samples'."""
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
    """The identity of an operand.

    Args:
        leaves: names of tensors that were there before the run, by their memory.
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
    """The values of a constant that is small, or has one value everywhere (as at the start of a run)."""
    if x.numel() <= LARGEST:
        return x.clone()
    if not of_run:
        return None
    first = x.reshape(-1)[:1].clone()
    return first.reshape([1] * x.dim()).expand(x.shape) if bool((x == first).all()) else None


def is_of_one(shadow: Shadow) -> bool:
    """Whether it belongs to one sample, and others have tensors of their own."""
    return shadow.partial and not shadow.mixed and len(shadow.samples) == 1


# -------------------------------------------------------------------------------------------------
# Samples that a run computes one after the other, with the same operations for each.
#
# If a loop runs over the samples, a run on three of them has more operations than one on two.
# Operations are assigned by their operands: those on one sample, and those that only these need, belong
# to that sample. The others belong to all. Numbers of writes are replaced by names: of the operation
# among those of its sample, or among those of all.


TAKES = frozenset(("select", "slice"))
"""Views that take one sample by its number."""
_ALL, _NO_SAMPLE = -1, -2
"""Sample of an operation: all samples; or none, if nothing needs its result."""
_Made = tuple[int, int] | None
"""The number of the operation that has made an operand, and of its output."""
_COLLAPSED = 0, torch.Size(), (), 0


class Uneven(Exception):
    """Samples are not treated alike."""


def in_turns(steps: Sequence[Step]) -> bool:
    """Whether something was computed from one sample alone."""
    return any(x.sample is not None for step in steps for x in step.held)


def take_turns(steps: Sequence[Step], samples: int) -> tuple[list[Step], list[Hashable]]:
    """The operations on all samples, with one operand instead of each sample's own; and those on each
    sample.

    Raises:
        Uneven: these are not the same for all of them.
    """
    steps = [step for step in steps if not _is_as_it_was(step)]
    made = _made(steps)
    whose = _sample_of_steps(steps, made)
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
    """Whether it returns the constant that it gets (`detach`)."""
    given = {(x.serial, x.geometry) for x in step.held if x.serial is not None and x.axes is None}
    return bool(step.outs) and all((x.serial, x.geometry) in given for x in step.outs)


def _made(steps: Sequence[Step]) -> list[list[_Made]]:
    """For each operand of each operation, the operation that has made it."""
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


def _sample_of_steps(steps: Sequence[Step], made: Sequence[Sequence[_Made]]) -> list[int]:
    """The sample of each operation: of its operands, or of all operations that need its result."""
    asking: list[set[int]] = [set() for _ in steps]
    found = [_ALL] * len(steps)
    for number in reversed(range(len(steps))):
        step = steps[number]
        own = {x.sample for x in step.held if x.sample is not None} or asking[number]
        if len(own) == 1:
            found[number] = next(iter(own))
        elif not own and _has_no_effect(step):
            found[number] = _NO_SAMPLE
        for source in made[number] if found[number] != _NO_SAMPLE else ():
            if source is not None:
                asking[source[0]].add(found[number])
    return found


def _has_no_effect(step: Step) -> bool:
    """Whether it does nothing if its result is unused: on constants, or taking an unused sample."""
    if step.kind.writes:
        return False
    of_constants = all(x.axes is None for x in (*step.held, *step.outs))
    return of_constants or (step.kind.name in TAKES and step.outs[0].sample is not None)


class _Named:
    """Operations with operands that have the same names in every run.

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
        """The identity of an operation on this sample."""
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
        """The name of an operand."""
        x, made = self._steps[number].held[k], self._made[number][k]
        if made is None:
            return x.serial if x.leaf is None else ("leaf", x.leaf)
        source, k = made
        outs = self._steps[source].outs
        if x.sample is not None and outs[k].sample == x.sample:  # another output of each sample
            k = sum(y.sample == x.sample for y in outs[:k])
        seen = x.geometry == outs[made[1]].geometry
        return (*self._names[source], k, None if seen else x.geometry)

    def _collapsed(self, found: list[Operand]) -> list[Operand]:
        """The operands, with one instead of those of single samples, if these are the same in order."""
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
    """The shape without the sizes that depend on the number of samples."""
    along = x.axes if x.axes is not None and x.sample is None else (False,) * len(x.geometry[1])
    return tuple(None if lies else n for n, lies in zip(x.geometry[1], along, strict=True))


def _content(x: Operand) -> Hashable:
    return None if x.numbers is None else (x.numbers.dtype, content_of(x.numbers))


def _relative(step: Step, sample: int) -> list[object]:
    """The numeric arguments of an operation; if it takes a sample, counted from that sample on."""
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
    """The index at which the sample begins along this axis."""
    own = source == sample
    others = [axis for axis in range(source.dim()) if axis != dim]
    own = own.any(others) if others else own
    return int(own.to(torch.uint8).argmax())


# -------------------------------------------------------------------------------------------------
# Records of a run's operations: two runs with equal records have computed the same.


def growing_axes(one: Iterable[int], other: Iterable[int], samples: int, others: int) -> list[int]:
    """The axes that are longer for more samples."""
    sizes = enumerate(zip(one, other, strict=False))
    return [axis for axis, (n, m) in sizes if n and n * others == m * samples]


class Trail:
    """The operations of a run in order, with all that distinguishes runs. Two runs with equal trails
    have computed the same from their inputs.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._running: Step | None = None
        self._leaves: dict[int, object] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trail) and self._steps == other._steps

    def begins_with(self, x: Tensor, name: object) -> None:
        """Name a tensor that was there before the run, and is the same in another run."""
        self._leaves[key_of(x)] = name

    def note(
        self, tracer: Any, kind: Kind, args: tuple, kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    ) -> None:  # fmt: skip
        """Note an operation."""
        omitted = Tensor, torch.Generator  # drawn numbers are operands of other operations
        named = [(name, x) for name, x in kwargs.items() if not isinstance(x, omitted)]
        sizes = [x for x in tree_leaves(args) if not isinstance(x, Tensor)]
        of_one = kind.name in COMPARING and not any(x.dim() for x in tensors)
        of_sizes = kind.name == "arange" or of_one
        numbers = [] if of_sizes else list(number_arguments(kind, args))
        pairs = [p for p in zip(tensors, shadows, strict=True) if p[0].layout is torch.strided]
        held = [identity(tracer, x, s, self._leaves) for x, s in pairs]
        self._running = Step(kind, named, numbers, sizes, held)
        if kind.name in TAKES and shadows[0].held:
            self._running.source = fitted(shadows[0].sample, tensors[0].dim())
        self._steps.append(self._running)

    def gave(self, tracer: Any, outs: Sequence[Tensor]) -> None:
        """Note the results of an operation."""
        if self._running is None:
            return
        self._running.outs.extend(
            identity(tracer, x, tracer.shadow_of(x), self._leaves)
            for x in outs[: 1 if self._running.kind.name in RECURRENT else None]
            if x.layout is torch.strided
        )
        self._running = None

    def agrees(self, other: Trail, samples: int, others: int, *, constants: bool = True) -> bool:
        """Whether the runs differ only in sizes along batch axes, by the number of samples. No value and
        no other size depends on it.

        Args:
            samples, others: of this run, and of the other. constants: compare these, too.
        """
        mine, theirs = self._steps, other._steps
        if in_turns(mine) or in_turns(theirs):
            try:
                (mine, own), (theirs, their_own) = (
                    take_turns(mine, samples), take_turns(theirs, others)
                )  # fmt: skip
            except Uneven:
                return False
            if own != their_own:
                return False
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(
            a.agrees(b, samples, others, constants=constants) for a, b in pairs
        )


# -------------------------------------------------------------------------------------------------
# Paths through torch's operators: a call that takes an unknown path is recognized at its end.
#
# What is known about a call holds for the operations that ran then. A counter, a closure or a number
# may let a later call compute something else, which neither its inputs nor the model's settings show.
# So each call is followed: its operators, the earlier results that each of them gets, and their axes,
# sizes and small integer constants (csrc/path). Other numbers do not move samples.


_path: Any
try:
    _path = of_this_torch("_path", "path")
except ImportError as error:  # only inputs and settings decide
    FOLLOWS, WHY_NOT = False, str(error)
else:
    FOLLOWS, WHY_NOT = True, ""
    ASIDE.append(_path.pause)

_EVERY, _FEW = 8, 2
"""So many first paths of one method are traced, and so many that may depend on sizes; after that, each
path with a power of 2 as its number."""
_KEPT = 1024
"""Maximum number of paths that are kept, because each holds its sizes."""


def can_follow(*, eager: bool = False) -> bool:
    """Whether operators can be followed here: not in compiled and captured code, in transforms, in
    backward passes and under torch's profiler.

    Args:
        eager: the call runs uncompiled, although inside compiled code.
    """
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    elsewhere = captured or current_task() != -1 or transformed() or is_profiled()
    return FOLLOWS and not elsewhere and (eager or not in_compiled_call())


def begin(inputs: list[Tensor], *, eager: bool = False) -> Any:
    """Follow the operators that this thread calls from now on, in a call with these inputs.

    Args:
        eager: it runs uncompiled, although inside compiled code.

    Returns:
        An object with a method `stop`, which returns the path; None if operators cannot be followed.
    """
    if not can_follow(eager=eager):
        return None
    recording = _path.Recording()
    recording.start(inputs)
    return recording


class Paths:
    """The paths that calls of one method have taken."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Any, list[int]]]] = {}
        self._sizes: set[tuple[int, ...]] = set()
        """Input sizes of all calls that have taken them."""
        self._of_all_sizes = False
        """Calls of different sizes took one path, so another size does not explain another path."""
        self.unseen = 0
        """Number of calls that took a new path."""
        self._by_size = 0
        """Number of those that may have done so because of their sizes, as a loop over samples does."""

    def knows(self, path: Any, sizes: list[int]) -> bool:
        """Whether a call has taken this path: the same operators on the same results.

        Sizes among their arguments may differ if they depend on those of the inputs.

        Args:
            sizes: of all inputs of the call.
        """
        known = self._known.get(path.hash, [])
        if any(path.follows(other, [], []) for other, _ in known):
            return True
        found = any(path.follows(other, sizes, others) for other, others in known)
        self._of_all_sizes |= found
        return found

    def note(self, path: Any, sizes: list[int], *, known: bool) -> None:
        """Note that a call has taken this path; `known` as `knows` has returned it."""
        self._sizes.add(tuple(sizes))
        if not known and len(self._known) < _KEPT:
            self._known.setdefault(path.hash, []).append((path, sizes))

    def next_due(self, sizes: list[int], *, turns: bool) -> bool:
        """Count an unknown path, and say whether it must be traced. If a program changes in every call,
        not all are traced.

        Args:
            turns: samples were proven to run one after another, as in a loop, which grows with the
            batch.
        """
        self.unseen += 1
        number, most = self.unseen, _EVERY
        if not self._of_all_sizes and tuple(sizes) not in self._sizes:
            if turns:
                return False
            self._by_size += 1
            number, most = self._by_size, _FEW
        return number <= most or not number & (number - 1)

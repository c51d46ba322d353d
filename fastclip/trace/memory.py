"""Shadows of tensors (what is known of them), stored by memory: autograd unpacks saved tensors as
other objects.

A memory holds the shadow of every geometry in which it was seen. A write into a part of it turns the
record into one attribution per entry, from which other geometries are read.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastclip.core.torch_names import StorageWeakRef, memory_of, version_of
from fastclip.trace.attribution import (
    KIND,
    NONE,
    SEVERAL,
    UNSEEN,
    Attribution,
    compressed,
    everywhere,
    expanded,
    is_mixed,
    lie_along,
    reduced,
)

ORDER = 1
"""Its numbers depend on a sample's position in the batch."""
MOVED = 2
"""Data decides where samples lie; each entry still belongs to one sample."""
RANDOM = 4
"""It depends on no sample, and is drawn independently for every entry."""
TRAINED = 8
"""It depends only on trained tensors: a derived value."""
POSITIONS = 16
"""Positions of moved samples: of one sample as an index, of several as a value."""
BY_VALUE = 32
"""The attribution holds for the values of this batch."""
LEARNED = 64
"""It depends on trained tensors."""
FOREIGN = 128
"""It depends on trained tensors outside the model."""
READ = 256
"""It depends on a number that Python may have computed from samples."""
CHANCE = 512
"""It depends on no sample, and is computed from random numbers."""
STICKY = ORDER | MOVED | BY_VALUE | POSITIONS | LEARNED | READ
"""The flags that an operation's outputs inherit from its operands."""
_CONSTANT = RANDOM | CHANCE | TRAINED | FOREIGN
"""The flags that a constant can have."""


class Shadow:
    """What is known of one tensor.

    Args:
        sample: the attribution. flags: of those above.
        degree: k if the tensor is a sum over samples of b^k times one sample's term.
        part: for a tensor with only some samples: how it was computed, as a number.
        factor: identifies the positive number that multiplies all entries, depends on several samples
            and takes no gradient; None: there is none.
        whole: all samples of the batch are in it.

    Attributes:
        held: it depends on some sample. partial: only on some samples. joined: on several, or on their
            order, and it is not a sum over samples.
    """

    __slots__ = (
        "_axes", "_samples", "degree", "factor", "flags", "held", "joined", "mixed", "part", "partial",
        "sample", "whole",
    )  # fmt: skip

    def __init__(
        self, sample: Attribution, flags: int = 0, degree: int | None = None,
        part: int | None = None, factor: int | None = None, whole: bool = True,
    ) -> None:  # fmt: skip
        self.sample, self.flags, self.degree = sample, flags, degree
        self.part, self.factor, self.whole = part, factor, whole
        self.mixed = is_mixed(sample)
        self.held = sample is not None
        self.partial = self.held and not whole
        self.joined = (self.mixed and degree is None) or bool(flags & ORDER)
        self._samples: frozenset[int] | None = None
        self._axes: tuple[bool, ...] | None = None

    def __repr__(self) -> str:
        if self.sample is None:
            return f"constant ({self.flags})"
        of = self.sample.unique().tolist()[:9]
        return f"{list(self.sample.shape)} of {of} ({self.flags}, {self.degree})"

    @property
    def samples(self) -> frozenset[int]:
        """The numbers of its samples."""
        found = self._samples
        if found is None:
            own = () if self.sample is None else self.sample.unique().tolist()
            found = self._samples = frozenset(k for k in own if 0 <= k < SEVERAL)
        return found

    def axes(self, dims: int) -> tuple[bool, ...]:
        """Returns for each of a tensor's axes whether entries of several samples lie along it."""
        if self._axes is None:
            own = self.sample
            several = () if own is None else (lie_along(own, axis) for axis in range(own.dim()))
            self._axes = tuple(several)
        return (False,) * (dims - len(self._axes)) + self._axes[max(0, len(self._axes) - dims) :]


class Shadows:
    """Keeps one object for equal shadows, and remembers results of rules by them.

    All tracers of a process share one instance. It forgets everything when it holds too much. Shadows
    that are in use remain valid.
    """

    MOST = 1 << 15
    """Shadows, and remembered results."""
    LARGEST = 1 << 26
    """Entries of all shadows together."""

    def __init__(self) -> None:
        self._constants = {k: Shadow(None, k) for k in range(_CONSTANT + 1) if not k & ~_CONSTANT}
        self._found: dict[tuple, Shadow] = {}
        self._entries = 0
        self.remembered: dict[tuple, tuple[list[Shadow], list[Shadow]]] = {}
        """(operator, arguments, shapes, shadows) -> the result, and those shadows, kept alive."""
        self.constant = self.of_no_sample()

    def of_no_sample(self, flags: int = 0, factor: int | None = None) -> Shadow:
        """Returns the shadow of a constant."""
        flags &= _CONSTANT
        return self._constants[flags] if factor is None else Shadow(None, flags, factor=factor)

    def of(
        self, sample: Attribution, samples: int, flags: int = 0, degree: int | None = None,
        part: int | None = None, factor: int | None = None,
    ) -> Shadow:  # fmt: skip
        """Returns the shadow of a tensor in a batch of so many samples."""
        if sample is None or not sample.numel():
            return self.of_no_sample(flags, factor)
        content = sample.numpy().tobytes()
        key = (content, tuple(sample.shape), samples, flags, degree, part, factor)
        found = self._found.get(key)
        if found is None:
            self._make_room(sample.numel())
            # A copy: it may be part of a memory's record, which is written into.
            found = self._made(sample.clone(), samples, flags, degree, part, factor)
            self._found[key] = found
        return found

    def _make_room(self, entries: int) -> None:
        self._entries += entries
        most = max(len(self._found), len(self.remembered))
        if self._entries > self.LARGEST or most > self.MOST:
            self._found, self.remembered, self._entries = {}, {}, entries

    def _made(
        self, sample: Tensor, samples: int, flags: int, degree: int | None, part: int | None,
        factor: int | None,
    ) -> Shadow:  # fmt: skip
        values = sample.unique()
        if values.numel() == 1 and int(values[0]) == NONE:
            return self.of_no_sample(flags, factor)
        own = int(((values >= 0) & (values < SEVERAL)).sum())
        whole = own == samples or bool((values >= SEVERAL).any())
        return Shadow(sample, flags, degree, part, factor, whole)


SHADOWS = Shadows()
"""The instance of this process."""


# Storage by memory

Geometry = tuple[int, torch.Size, tuple[int, ...], int]
_SWEEP = 2048
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Tensors of other classes may hold only a part of their numbers."""
_FEW = 64
"""Entries of a constant that is identified by its values."""
_KEPT = STICKY | TRAINED | FOREIGN
"""The flags that a part of a memory gives to all of it."""


def key_of(x: Tensor) -> int:
    """Returns a key of a tensor's memory while it lives; 0 if it has none (sparse, nested)."""
    try:
        return memory_of(x)
    except (NotImplementedError, RuntimeError):
        return 0


def lies_in(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether it shares memory with an operand; schemas do not say so for `unsafe_split` etc."""
    own = key_of(x)
    return any(x is y or (own != 0 and own == key_of(y)) for y in tensors)


def geometry_of(x: Tensor) -> Geometry:
    """Returns offset, sizes, strides and bytes per entry."""
    return int(x.storage_offset()), x.shape, x.stride(), x.element_size()


def _start_of(x: Tensor) -> Hashable:
    """Returns the same for first parts of one tensor, independent of their length."""
    return int(x.storage_offset()), x.stride(), x.element_size()


def content_of(x: Tensor) -> int:
    """Returns an id of the values of a constant."""
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    values = torch.empty(x.numel(), dtype=x.dtype, device="cpu").copy_(plain.reshape(-1))
    content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return hash((tuple(x.shape), content))


def state_of(generator: torch.Generator) -> int:
    """Returns an id of a generator's state; 0 while a graph is being captured."""
    with suppress(RuntimeError):
        return hash(generator.get_state().numpy().tobytes())
    return 0


@dataclass(slots=True)
class Record:
    """The shadows in one memory."""

    reference: StorageWeakRef
    """It keeps the key unique, but does not keep the memory."""
    size: int
    """Bytes per entry."""
    shadows: dict[Geometry, Shadow] = field(default_factory=dict)
    flat: Tensor | None = None
    flags: int = 0
    parts: dict[object, set[int]] = field(default_factory=dict)
    """How entries of some samples were written, and which samples these are."""
    root: object = None
    """How all of it was made, if it holds only some samples."""
    factors: set[int | None] = field(default_factory=set)
    serial: int = 0
    fresh: bool = False
    """Whether nothing was written there since it was made."""
    formula: int | None = None
    """How its values were computed, and from what; equal formulas mean equal values."""
    cause: object | None = None
    """Where its entries first depended on several samples."""

    @property
    def holds_samples(self) -> bool:
        return any(shadow.held for shadow in self.shadows.values())


class Memory:
    """Shadows by memory. A tensor without a record is a constant."""

    def __init__(self, shadows: Shadows) -> None:
        self.shadows, self.samples = shadows, 0
        self.present: torch.Tensor | None = None
        """Numbers of the samples in the model's input; None: all."""
        self.lengths_read = False
        """Python knows the lengths of samples, and may choose parts of the batch by them."""
        self.views = 1
        """Positions per sample in a tensor that is this many times as long as the batch."""
        self._records: dict[int, Record] = {}
        self._given: dict[int, dict[Hashable, tuple[StorageWeakRef, int, int]]] = {}
        """Memory where samples of this step were marked: where they begin, and its version."""
        self._earlier: dict[int, dict[Hashable, tuple[StorageWeakRef, int, int]]] = {}
        """The same for earlier steps."""
        self._known: dict[int, StorageWeakRef] = {}
        """Memory of the model: constants."""
        self._writes = 0
        self._drawn: set[int] = set()
        """States of generators that this step has drawn from."""
        self.drawn_before: Collection[int] = ()
        """The same for the previous step."""

    def axis_of(self, x: torch.Tensor) -> int | None:
        """Returns the first axis that is as long as the batch, without views or with them."""
        sizes = (self.samples, self.samples * self.views) if x.layout is torch.strided else ()
        return next((a for a, n in enumerate(x.shape) if n in sizes and x.stride(a)), None)

    def each_at(self, size: int) -> int:
        """Returns the positions per sample along a batch axis of this length."""
        return self.views if self.samples and size == self.samples * self.views else 1

    def samples_in(self, rows: int) -> int:
        """Returns the number of samples in so many rows."""
        return rows // self.each_at(rows)

    def drew_again(self, generator: torch.Generator | None, state: int) -> bool:
        """Whether draws from this state of the generator repeat the numbers of the previous step.

        Args:
            state: as of `state_of`. Dropout with p = 0 draws nothing.
        """
        if generator is None or state_of(generator) == state:
            return False
        self._drawn.add(state)
        return state in self.drawn_before

    def know(self, x: Tensor) -> None:
        """Marks memory as constant until an operation writes samples there."""
        if key := key_of(x):
            self._known[key] = StorageWeakRef(x.untyped_storage())

    def knows(self, x: Tensor) -> bool:
        found = self._known.get(key_of(x))
        return found is not None and not found.expired()

    def record(self, x: Tensor) -> Record | None:
        """Returns the record of a tensor; None for constants and tensors without memory."""
        return self._records.get(key_of(x))

    def found(self, x: Tensor) -> Shadow | None:
        """Returns the shadow of a tensor; None if its memory is unknown."""
        record = self.record(x)
        return None if record is None else self.within(record, x)

    def among_constants(self, x: Tensor) -> Attribution:
        """Returns the sample of every entry if its memory may also hold constants. Otherwise it is not
        computed, which would be slow for a large buffer written in parts."""
        record = self.record(x)
        flat = None if record is None else record.flat
        if record is None or (flat is not None and not bool((flat == NONE).any())):
            return None
        return self.within(record, x).sample

    def within(self, record: Record, x: Tensor) -> Shadow:
        """Returns the shadow of a tensor in the memory of this record."""
        geometry = geometry_of(x)
        shadow = record.shadows.get(geometry)
        if shadow is None:
            shadow = record.shadows[geometry] = self._derived(record, x, geometry)
        return shadow

    def write(
        self, x: Tensor, shadow: Shadow, cause: object | None = None, *, whole: bool = True
    ) -> None:
        """Stores the shadow of `x`, which an operation has made or written into.

        Args:
            whole: all of this memory is new.
        """
        key = key_of(x)
        if not key:
            return
        storage, record = x.untyped_storage(), self._records.get(key)
        if record is None:
            record = self._records[key] = Record(StorageWeakRef(storage), x.element_size())
            if len(self._records) % _SWEEP == 0:
                self.sweep()
        self._writes += 1
        record.formula = None
        geometry = geometry_of(x)
        if whole or x.numel() * x.element_size() == storage.nbytes():
            record.shadows, record.flat, record.parts = {geometry: shadow}, None, {}
            record.factors, record.root = {shadow.factor}, shadow.part
            record.size, record.flags, record.cause = x.element_size(), shadow.flags & _KEPT, cause
        else:
            self._note_part(record, x, shadow)
            record.factors.add(shadow.factor)
            flat = self.flat(record, x)
            place = flat.as_strided(x.shape, x.stride(), geometry[0])
            made = expanded(shadow.sample, x.shape)
            for axis, step in enumerate(x.stride()):
                if not step and x.shape[axis]:  # expanded: its memory holds one entry
                    place, made = place.narrow(axis, 0, 1), made.narrow(axis, 0, 1)
            place.copy_(made)
            record.shadows = {geometry: shadow}
            record.flags |= shadow.flags & _KEPT
            record.cause = record.cause or cause
        record.serial, record.fresh = self._writes, False

    def begins(self, x: Tensor, shadow: Shadow) -> None:
        """Stores a shadow for memory that holds no numbers yet."""
        self.write(x, shadow)
        if (record := self.record(x)) is not None:
            record.fresh = True

    def give(self, x: Tensor, shadow: Shadow) -> bool:
        """Notes that samples of this step lie in `x`.

        Returns:
            Whether it is unchanged since an earlier step, whose samples lay there too.
        """
        storage, again = x.untyped_storage(), self.was_given(x)
        parts = self._given.setdefault(memory_of(x), {})
        parts[_start_of(x)] = StorageWeakRef(storage), version_of(x), x.numel()
        self.write(x, shadow, whole=False)
        return again

    def is_given(self, x: Tensor) -> bool:
        """Whether samples of this step lie in this memory."""
        return memory_of(x) in self._given

    def is_as_given(self, x: Tensor) -> bool:
        """Whether it is one of these tensors, and nothing was written there since."""
        found = self._given.get(memory_of(x), {}).get(_start_of(x))
        return found is not None and found[1:] == (version_of(x), x.numel())

    def was_given(self, x: Tensor) -> bool:
        """Whether samples of an earlier step (any number) lay here, and nothing was written since."""
        found = self._earlier.get(memory_of(x), {}).get(_start_of(x))
        return found is not None and not found[0].expired() and found[1] == version_of(x)

    def _note_part(self, record: Record, x: Tensor, shadow: Shadow) -> None:
        """Notes how entries of some samples were written, if the memory also holds others."""
        if shadow.held:
            if not shadow.whole and not shadow.flags & MOVED:
                record.parts.setdefault(shadow.part, set()).update(shadow.samples)
            return
        before = self.found(x)
        if before is not None and before.held and not before.whole:
            record.parts.setdefault(content_of(x), set()).update(before.samples)

    def view(self, x: Tensor, shadow: Shadow) -> None:
        """Stores the shadow of another geometry of the same memory."""
        record = self.record(x)
        if record is not None:
            record.shadows[geometry_of(x)] = shadow

    def flat(self, record: Record, x: Tensor) -> Tensor:
        """Returns one attribution per entry of the memory of `x`; callers write into it."""
        if record.flat is None:
            entries = x.untyped_storage().nbytes() // record.size
            flat = torch.full((entries,), NONE, dtype=KIND, device="cpu")
            for (offset, size, stride, item), shadow in record.shadows.items():
                if shadow.held and item == record.size:
                    flat.as_strided(size, stride, offset).copy_(expanded(shadow.sample, size))
            record.flat = flat
        return record.flat

    def _derived(self, record: Record, x: Tensor, geometry: Geometry) -> Shadow:
        if not record.holds_samples and record.flat is None and len(record.factors) < 2:
            return next(iter(record.shadows.values()), self.shadows.constant)
        flat, (offset, size, stride, item) = self.flat(record, x), geometry
        if item < record.size:
            flat = flat.repeat_interleave(record.size // item)
        elif item > record.size:
            flat = reduced(flat.view(-1, item // record.size), [1], keep=False)  # type: ignore[assignment]
        sample = compressed(flat.as_strided(size, stride, offset))
        found = self.shadows.of(sample, self.samples, record.flags)
        if found.held and record.parts:
            ways = [found.samples & written for written in record.parts.values()]
            if any(way and way != found.samples for way in ways):
                flag = BY_VALUE if self.lengths_read else ORDER
                found = self.shadows.of(sample, self.samples, record.flags | flag)
        if record.factors != {None}:
            if len(record.factors) > 1:
                sample = everywhere(SEVERAL, x.dim())
                return self.shadows.of(sample, self.samples, found.flags | LEARNED)
            factor = next(iter(record.factors))
            return self.shadows.of(sample, self.samples, found.flags, factor=factor)
        if found.held and not found.whole:
            part = self.part_of(x, found)
            found = self.shadows.of(sample, self.samples, found.flags, part=part)
        return found

    def part_of(self, x: Tensor, shadow: Shadow) -> int | None:
        """Returns how a view of some samples was made: equal numbers for equal views of others."""
        record = self.record(x)
        if record is None or not shadow.samples or shadow.sample is None:
            return shadow.part
        flat = self.flat(record, x)
        first = int((flat == min(shadow.samples)).to(torch.uint8).argmax())
        place = x.storage_offset() * x.element_size() // record.size - first
        kept = [k for k, n in enumerate(shadow.sample.shape) if n == 1 < x.shape[k]]
        source = record.root if record.root is not None else record.serial
        for part, written in record.parts.items():
            if shadow.samples <= written:
                source = part
        return hash((source, place, *((x.shape[k], x.stride(k)) for k in kept)))

    def computed(self, x: Tensor, key: object, operands: Iterable[Tensor]) -> None:
        """Notes that an operation without random numbers computed all of this memory from operands."""
        record = self.record(x)
        if record is not None:
            record.formula = hash((key, *map(self.formula, operands)))

    def formula(self, x: Tensor) -> object:
        """Returns a key that is equal for equal values, as far as that was seen."""
        record = self.record(x)
        few = x.layout is torch.strided and x.numel() <= _FEW and not x.is_meta
        few &= type(x) in _PLAIN
        if few and (record is None or not (record.holds_samples or record.flags & TRAINED)):
            return content_of(x)
        if record is None:
            return object()  # its memory may be reused later
        if x.numel() == 1 and record.formula is not None:
            return record.formula
        return record.formula or record.serial, geometry_of(x)

    def serial(self, x: Tensor) -> object:
        """Returns a key that changes with writes into the memory, as far as these were seen."""
        record = self.record(x)
        if record is not None:
            return record.serial
        return None if x.layout is not torch.strided else memory_of(x)

    def cause(self, x: Tensor) -> object | None:
        record = self.record(x)
        return None if record is None else record.cause

    def sweep(self) -> None:
        """Forgets memory that has been freed."""
        self._records = {k: r for k, r in self._records.items() if not r.reference.expired()}

    def alive(self, but: Iterable[Tensor] = ()) -> list[Record]:
        """Returns records of samples whose memory is still in use, except by these tensors."""
        kept = {memory_of(x) for x in but if x.layout is torch.strided} | self._given.keys()
        return [
            record for key, record in self._records.items()
            if key not in kept and not record.reference.expired() and record.holds_samples
        ]  # fmt: skip

    def forget_step(self) -> None:
        """Forgets a step without computation: its batch, and results of it, are then from elsewhere."""
        self._records, self._given = {}, {}

    def end_step(self) -> list[Record]:
        """Ends a step. The next one may read tensors computed from this batch: there their samples are
        unknown. The batch itself is constant there while it does not change.

        Returns:
            The records of tensors that were computed and are still held.
        """
        carried = self.alive()
        self._drawn, self.drawn_before = set(), self._drawn
        for key, parts in self._given.items():
            self._earlier[key] = {**self._earlier.get(key, {}), **parts}
        for key, parts in list(self._earlier.items()):
            if any(held.expired() for held, *_ in parts.values()):
                del self._earlier[key]
        self._given = {}
        self._records = {record.reference.cdata: record for record in carried}
        for record in carried:
            record.flat, record.parts, record.flags, record.root = None, {}, 0, None
            record.fresh = False
            record.factors = {None}
            record.shadows = {
                geometry: self.shadows.of(everywhere(UNSEEN, len(geometry[1])), self.samples)
                for geometry, shadow in record.shadows.items()
                if shadow.held
            }
        return carried

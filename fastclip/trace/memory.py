"""What is known of each tensor (its shadow), and where that is kept: by memory, since autograd unpacks
what it saves as other tensors.

A memory holds the shadow of every geometry in which it has been seen. A write into a part of it turns
the record into one attribution for each of its entries, of which other geometries are read.
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
"""Its numbers depend on which number a sample has in the batch."""
MOVED = 2
"""Samples lie where data put them, each entry still of one sample."""
RANDOM = 4
"""Of no sample, and drawn anew for every entry."""
TRAINED = 8
"""Of trained tensors alone: a derived value."""
POSITIONS = 16
"""Numbers that say where moved samples lie: of one sample as an index, of several as a value."""
BY_VALUE = 32
"""The attribution holds for the values of this batch."""
LEARNED = 64
"""Trained tensors have had a part in it."""
FOREIGN = 128
"""Trained tensors that are none of the model's have had a part in it."""
READ = 256
"""A number that Python may have computed from samples has had a part in it."""
CHANCE = 512
"""Of no sample, and computed from what was drawn."""
STICKY = ORDER | MOVED | BY_VALUE | POSITIONS | LEARNED | READ
"""What an operation hands on from its operands."""
_CONSTANT = RANDOM | CHANCE | TRAINED | FOREIGN
"""What a constant can be."""


class Shadow:
    """One tensor's.

    Args:
        sample: the attribution. flags: of those above.
        degree: k if the tensor is a sum over samples of b^k times one sample's term.
        part: of a tensor that holds some of the samples alone: how it was made, as a number.
        factor: identifies the positive number that all entries have been multiplied by, which follows
            from several samples and takes no gradient; None: there is none.
        whole: all samples of the batch are in it.

    Attributes:
        held: it follows from some sample. partial: from some samples alone. joined: of several, or of
            their order, and no sum over samples.
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
        """The numbers of the samples that are in it."""
        found = self._samples
        if found is None:
            own = () if self.sample is None else self.sample.unique().tolist()
            found = self._samples = frozenset(k for k in own if 0 <= k < SEVERAL)
        return found

    def axes(self, dims: int) -> tuple[bool, ...]:
        """Of a tensor of so many dimensions: along which of its axes entries of several samples lie."""
        if self._axes is None:
            own = self.sample
            several = () if own is None else (lie_along(own, axis) for axis in range(own.dim()))
            self._axes = tuple(several)
        return (False,) * (dims - len(self._axes)) + self._axes[max(0, len(self._axes) - dims) :]


class Shadows:
    """Equal shadows are one object, so that what a rule has found can be remembered by them.

    One of these serves all tracers of a process. It forgets everything when it holds too much; whoever
    still has a shadow keeps it.
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
        """(operator, arguments, shapes, shadows) -> what it returned, and those shadows, kept."""
        self.constant = self.of_no_sample()

    def of_no_sample(self, flags: int = 0, factor: int | None = None) -> Shadow:
        """A constant."""
        flags &= _CONSTANT
        return self._constants[flags] if factor is None else Shadow(None, flags, factor=factor)

    def of(
        self, sample: Attribution, samples: int, flags: int = 0, degree: int | None = None,
        part: int | None = None, factor: int | None = None,
    ) -> Shadow:  # fmt: skip
        """The shadow of a tensor in a batch of so many samples."""
        if sample is None or not sample.numel():
            return self.of_no_sample(flags, factor)
        content = sample.numpy().tobytes()
        key = (content, tuple(sample.shape), samples, flags, degree, part, factor)
        found = self._found.get(key)
        if found is None:
            self._make_room(sample.numel())
            # A copy: it may lie in a memory's record, which is written into.
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
"""Of this process."""


# Where they are kept

Geometry = tuple[int, torch.Size, tuple[int, ...], int]
_SWEEP = 2048
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Of other classes a tensor may hold a part of its numbers alone."""
_FEW = 64
"""Entries of a constant that is known by its numbers."""
_KEPT = STICKY | TRAINED | FOREIGN
"""What a part of a memory gives to all of it."""


def key_of(x: Tensor) -> int:
    """Names the memory of a tensor while it lives; 0 if it has none of its own (sparse, nested)."""
    try:
        return memory_of(x)
    except (NotImplementedError, RuntimeError):
        return 0


def lies_in(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    """In an operand's memory; `unsafe_split` and its like do not say so in their schema."""
    own = key_of(x)
    return any(x is y or (own != 0 and own == key_of(y)) for y in tensors)


def geometry_of(x: Tensor) -> Geometry:
    """Offset, sizes, strides and bytes an entry."""
    return int(x.storage_offset()), x.shape, x.stride(), x.element_size()


def _start_of(x: Tensor) -> Hashable:
    """The same of the first parts of one tensor, however long."""
    return int(x.storage_offset()), x.stride(), x.element_size()


def content_of(x: Tensor) -> int:
    """Identifies the numbers of a constant."""
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    values = torch.empty(x.numel(), dtype=x.dtype, device="cpu").copy_(plain.reshape(-1))
    content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return hash((tuple(x.shape), content))


def state_of(generator: torch.Generator) -> int:
    """Identifies what it draws next; 0 while a graph is being captured."""
    with suppress(RuntimeError):
        return hash(generator.get_state().numpy().tobytes())
    return 0


@dataclass(slots=True)
class Record:
    """What lies in one memory."""

    reference: StorageWeakRef
    """Its number is not used again while this lives; the memory itself is freed."""
    size: int
    """Bytes an entry."""
    shadows: dict[Geometry, Shadow] = field(default_factory=dict)
    flat: Tensor | None = None
    flags: int = 0
    parts: dict[object, set[int]] = field(default_factory=dict)
    """How some samples' entries were written, and of which samples."""
    root: object = None
    """How all of it was made, if it holds some samples alone."""
    factors: set[int | None] = field(default_factory=set)
    serial: int = 0
    fresh: bool = False
    """Nothing was written there since it was made."""
    formula: int | None = None
    """How what lies there was computed, and from what; what has the same formula is equal."""
    cause: object | None = None
    """Where its entries first followed from several samples."""

    @property
    def holds_samples(self) -> bool:
        return any(shadow.held for shadow in self.shadows.values())


class Memory:
    """Shadows by memory. What has no record is a constant."""

    def __init__(self, shadows: Shadows) -> None:
        self.shadows, self.samples = shadows, 0
        self.present: torch.Tensor | None = None
        """Numbers of the samples that the model is called with; None: all."""
        self.lengths_read = False
        """Python knows how long samples are, so parts of the batch may be chosen by it."""
        self.views = 1
        """Positions of each sample in what is so many times as long as the batch."""
        self._records: dict[int, Record] = {}
        self._given: dict[int, dict[Hashable, tuple[StorageWeakRef, int, int]]] = {}
        """Memory that samples of this step were seeded in: where they begin there, and its version."""
        self._earlier: dict[int, dict[Hashable, tuple[StorageWeakRef, int, int]]] = {}
        """The same of the steps before."""
        self._known: dict[int, StorageWeakRef] = {}
        """Memory of the model: constants."""
        self._writes = 0
        self._drawn: set[int] = set()
        """States of generators that this step has drawn from."""
        self.drawn_before: Collection[int] = ()
        """The same of the step before."""

    def axis_of(self, x: torch.Tensor) -> int | None:
        """The first axis that is as long as the batch, without views or with them."""
        sizes = (self.samples, self.samples * self.views) if x.layout is torch.strided else ()
        return next((a for a, n in enumerate(x.shape) if n in sizes and x.stride(a)), None)

    def each_at(self, size: int) -> int:
        """Positions of each sample along an axis of this length that the samples lie along."""
        return self.views if self.samples and size == self.samples * self.views else 1

    def samples_in(self, rows: int) -> int:
        """Of how many samples so many rows are."""
        return rows // self.each_at(rows)

    def drew_again(self, generator: torch.Generator | None, state: int) -> bool:
        """What was drawn since this state of the generator are the numbers of the step before.

        Args:
            state: as of `state_of`. Dropout with p = 0 draws nothing.
        """
        if generator is None or state_of(generator) == state:
            return False
        self._drawn.add(state)
        return state in self.drawn_before

    def know(self, x: Tensor) -> None:
        """What lies in this memory follows from no sample until an operation writes it there."""
        if key := key_of(x):
            self._known[key] = StorageWeakRef(x.untyped_storage())

    def knows(self, x: Tensor) -> bool:
        found = self._known.get(key_of(x))
        return found is not None and not found.expired()

    def record(self, x: Tensor) -> Record | None:
        """None of a constant, and of a tensor without memory of its own."""
        return self._records.get(key_of(x))

    def found(self, x: Tensor) -> Shadow | None:
        """The shadow of a tensor; None where nothing is known of its memory."""
        record = self.record(x)
        return None if record is None else self.within(record, x)

    def among_constants(self, x: Tensor) -> Attribution:
        """The sample of every entry, if any lies in memory where some may be of none: else it is not
        derived, which takes long for a large buffer that is written part by part."""
        record = self.record(x)
        flat = None if record is None else record.flat
        if record is None or (flat is not None and not bool((flat == NONE).any())):
            return None
        return self.within(record, x).sample

    def within(self, record: Record, x: Tensor) -> Shadow:
        """The shadow of a tensor that lies in the memory of this record."""
        geometry = geometry_of(x)
        shadow = record.shadows.get(geometry)
        if shadow is None:
            shadow = record.shadows[geometry] = self._derived(record, x, geometry)
        return shadow

    def write(
        self, x: Tensor, shadow: Shadow, cause: object | None = None, *, whole: bool = True
    ) -> None:
        """An operation has made `x`, or has written into it.

        Args:
            whole: all that lies in this memory is new.
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
        """Memory that holds no numbers yet."""
        self.write(x, shadow)
        if (record := self.record(x)) is not None:
            record.fresh = True

    def give(self, x: Tensor, shadow: Shadow) -> bool:
        """Samples of this step lie in `x`.

        Returns:
            Whether it is unchanged since an earlier step, in which samples lay there, too.
        """
        storage, again = x.untyped_storage(), self.was_given(x)
        parts = self._given.setdefault(memory_of(x), {})
        parts[_start_of(x)] = StorageWeakRef(storage), version_of(x), x.numel()
        self.write(x, shadow, whole=False)
        return again

    def is_given(self, x: Tensor) -> bool:
        """Samples of this step lie in this memory."""
        return memory_of(x) in self._given

    def is_as_given(self, x: Tensor) -> bool:
        """It is one of these tensors, and nothing was written there since."""
        found = self._given.get(memory_of(x), {}).get(_start_of(x))
        return found is not None and found[1:] == (version_of(x), x.numel())

    def was_given(self, x: Tensor) -> bool:
        """Samples of an earlier step lay here, perhaps fewer or more, and nothing was written since."""
        found = self._earlier.get(memory_of(x), {}).get(_start_of(x))
        return found is not None and not found[0].expired() and found[1] == version_of(x)

    def _note_part(self, record: Record, x: Tensor, shadow: Shadow) -> None:
        """How the entries of some samples were written, where others lie in the same memory."""
        if shadow.held:
            if not shadow.whole and not shadow.flags & MOVED:
                record.parts.setdefault(shadow.part, set()).update(shadow.samples)
            return
        before = self.found(x)
        if before is not None and before.held and not before.whole:
            record.parts.setdefault(content_of(x), set()).update(before.samples)

    def view(self, x: Tensor, shadow: Shadow) -> None:
        """Another geometry of the same memory."""
        record = self.record(x)
        if record is not None:
            record.shadows[geometry_of(x)] = shadow

    def flat(self, record: Record, x: Tensor) -> Tensor:
        """One attribution an entry of the memory that `x` lies in; it is written into."""
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
        """How a view of some samples was made: the same number for the same view of other samples."""
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
        """An operation that draws nothing has made all that lies in this memory, of its operands."""
        record = self.record(x)
        if record is not None:
            record.formula = hash((key, *map(self.formula, operands)))

    def formula(self, x: Tensor) -> object:
        """Equal for equal numbers, as far as that was seen."""
        record = self.record(x)
        few = x.layout is torch.strided and x.numel() <= _FEW and not x.is_meta
        few &= type(x) in _PLAIN
        if few and (record is None or not (record.holds_samples or record.flags & TRAINED)):
            return content_of(x)
        if record is None:
            return object()  # whose memory may be another's later
        if x.numel() == 1 and record.formula is not None:
            return record.formula
        return record.formula or record.serial, geometry_of(x)

    def serial(self, x: Tensor) -> object:
        """Changes when the memory is written into, as far as that was seen."""
        record = self.record(x)
        if record is not None:
            return record.serial
        return None if x.layout is not torch.strided else memory_of(x)

    def cause(self, x: Tensor) -> object | None:
        record = self.record(x)
        return None if record is None else record.cause

    def sweep(self) -> None:
        """Forget memory that has been freed."""
        self._records = {k: r for k, r in self._records.items() if not r.reference.expired()}

    def alive(self, but: Iterable[Tensor] = ()) -> list[Record]:
        """Records of samples whose memory is still held by somebody, but not by these tensors."""
        kept = {memory_of(x) for x in but if x.layout is torch.strided} | self._given.keys()
        return [
            record for key, record in self._records.items()
            if key not in kept and not record.reference.expired() and record.holds_samples
        ]  # fmt: skip

    def forget_step(self) -> None:
        """Nothing was computed: the batch, and what was made of it, is from elsewhere when it is met."""
        self._records, self._given = {}, {}

    def end_step(self) -> list[Record]:
        """What was computed from this batch and is still held may be read in the next step: there it is
        of nobody. The batch itself is constant there, as long as it does not change.

        Returns:
            The records of what was computed and is held.
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

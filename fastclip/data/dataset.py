"""The identity of samples: across subsets and joined data sets, across ranks, and while a run lasts.

What a data set is, or holds, with an entry for each sample (lists, tensors, arrays, tables) is
looked at in a few places when a pass begins. An entry that has changed is no reason to complain,
for a data set may cache or label its samples anew; one that has changed its place is.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastclip.core.torch_names import tree_leaves
from fastclip.distributed.shards import digest
from fastclip.errors import ArgumentError, StepError

# -------------------------------------------------------------------------------------------------
# Samples that a sampler of the user's own draws: each at most once in a pass over the data.
#
# Epsilon is stated for samples that are in a batch with probability q = 1 / len(data_loader), once.
# A sample that is drawn twice in a batch contributes twice; one that is drawn twice in a pass has
# the rate 2q. Which sample it is says the key that the data set is asked for, so keys must compare
# by value.


def value_of(key: Any) -> Any:
    """The key as something that is equal to another one's if the keys are.

    Raises:
        TypeError: keys of this type are equal to themselves alone, or cannot be hashed.
    """
    if isinstance(key, (Tensor, np.ndarray)) and not key.shape:  # tensors compare by identity
        key = key.item()
    if isinstance(key, tuple):
        return tuple(map(value_of, key))
    kind = type(key)
    by_identity = kind.__eq__ is object.__eq__ and key is not None and not isinstance(key, Enum)
    if by_identity or kind.__hash__ is None:
        raise TypeError(kind.__name__)
    if is_dataclass(key):
        for field in fields(key):
            if field.compare:
                value_of(getattr(key, field.name))
    return key


class Distinct:
    """Raises an error for a sample that was drawn before.

    Args:
        samples: of the data set. name: of the sampler, for the message. once: a sample may be drawn
            once in a pass; else once in a draw.
    """

    def __init__(self, samples: int, name: str, *, once: bool = True) -> None:
        self.samples, self.name, self.once = samples, name, once
        self._clear()

    def _clear(self) -> None:
        self._numbers = bytearray(self.samples)
        self._keys: set[Any] = set()

    def one_pass(self) -> Distinct:
        """The same for a pass that begins."""
        return Distinct(self.samples, self.name, once=self.once)

    def check(self, drawn: Any) -> int:
        """Note the samples of one draw; of a list of keys, which the data set is asked for at once, all.

        Returns:
            How many these are.

        Raises:
            ArgumentError: one of them was drawn before, or that cannot be known.
        """
        if not self.once:
            self._clear()
        count = 0
        for key in _single(drawn, self.samples):
            count += 1
            if self._seen(key):
                raise ArgumentError(
                    f"The data loader's {self.name} drew sample {key!r} twice in one "
                    f"{'pass over the data' if self.once else 'batch'}, so it contributes more often "
                    "than epsilon states. Draw each sample at most once, or pass "
                    "poisson_sampling=True with shuffle=True.",
                    doc="sampling",
                )
        return count

    def _seen(self, key: Any) -> bool:
        try:
            key = value_of(key)
        except TypeError as error:
            raise ArgumentError(
                unknown_keys(f"The data loader's {self.name} draws", error), doc="sampling"
            ) from error
        try:
            number = (
                int(key) if isinstance(key, float) and key.is_integer() else operator.index(key)
            )
        except TypeError:  # keys of a data set that is not indexed by numbers
            before = key in self._keys
            self._keys.add(key)
            return before
        number += self.samples if -self.samples <= number < 0 else 0
        if not 0 <= number < self.samples:
            raise ArgumentError(
                f"The data loader's {self.name} drew sample {number} of a data set of "
                f"{self.samples} samples. Correct the numbers that it draws.",
                doc="sampling",
            )
        before = bool(self._numbers[number])
        self._numbers[number] = 1
        return before


def unknown_keys(who: str, error: TypeError) -> str:
    """What to say of keys that `value_of` does not take."""
    return (
        f"{who} keys of type {error}, which do not compare by value, so a sample drawn twice under two "
        f"keys is not detected. Use numbers, strings or tuples as keys, or give {error} __eq__ and "
        "__hash__."
    )


def _single(drawn: Any, samples: int) -> Iterator[Any]:
    """The keys of single samples among those of a draw."""
    if isinstance(drawn, slice):
        drawn = range(*drawn.indices(samples))
    if isinstance(drawn, (Tensor, np.ndarray)):
        drawn = drawn.tolist()
    if samples > 1 and len(drawn) == samples and all(isinstance(key, bool) for key in drawn):
        drawn = [number for number, chosen in enumerate(drawn) if chosen]  # a mask
    for key in drawn:
        listed = isinstance(key, (list, range, slice, set, frozenset))
        if listed or (isinstance(key, (Tensor, np.ndarray)) and key.shape):
            yield from _single(key, samples)
        else:
            yield key


# -------------------------------------------------------------------------------------------------
# Which sample of which data set a loader's sample is, through torch's own subsets and joined data sets.


@dataclass(frozen=True, eq=False)
class Part:
    """Samples that one data set of no known parts brings.

    Args:
        dataset: that data set. places: int64 [samples], of the samples among those that were asked for.
        samples: int64 [samples], their numbers in it.
    """

    dataset: Any
    places: np.ndarray
    rows: np.ndarray


def parts_of(dataset: Any, samples: np.ndarray | None = None) -> list[Part]:
    """Samples of a data set, by the data sets that they come from: random_split's and nested ones too.

    Data sets of the user's own that repeat or reorder what they hold are taken as they are.

    Args:
        samples: int64 [samples], the numbers of those that are asked for; None: all.

    Raises:
        ArgumentError: a Subset has keys that do not say which of its samples are the same.
    """
    samples = np.arange(len(dataset), dtype=np.int64) if samples is None else samples
    return list(_parts(dataset, np.arange(len(samples), dtype=np.int64), samples))


def _parts(dataset: Any, places: np.ndarray, samples: np.ndarray) -> Iterator[Part]:
    if isinstance(dataset, Subset) and len(dataset) == len(dataset.indices):
        chosen = numbers(dataset.indices)
        if chosen is not None:
            yield from _parts(dataset.dataset, places, chosen[samples])
            return
        first: dict[Any, int] = {}
        try:
            keys = [value_of(key) for key in dataset.indices]
        except TypeError as error:
            who = f"The data set's {type(dataset).__name__} has"
            raise ArgumentError(unknown_keys(who, error), doc="sampling") from error
        same = [first.setdefault(key, place) for place, key in enumerate(keys)]
        samples = np.asarray(same, dtype=np.int64)[samples]
    elif isinstance(dataset, ConcatDataset) and len(dataset) == dataset.cumulative_sizes[-1]:
        samples = np.where(samples < 0, samples + len(dataset), samples)
        ends = np.asarray(dataset.cumulative_sizes, dtype=np.int64)
        which = np.searchsorted(ends, samples, side="right")
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(ends) + 1))
        for number, each in enumerate(dataset.datasets):
            mine = order[cuts[number] : cuts[number + 1]]
            if len(mine):
                before = int(ends[number - 1]) if number else 0
                yield from _parts(each, places[mine], samples[mine] - before)
        return
    length = length_of(dataset)
    yield Part(
        dataset,
        places,
        samples if length is None else np.where(samples < 0, samples + length, samples),
    )


def length_of(dataset: Any) -> int | None:
    """Samples of a data set; None where it does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def numbers(indices: Any) -> np.ndarray | None:
    """Of a Subset, int64; None where it names its samples otherwise."""
    if isinstance(indices, Tensor):
        indices = indices.cpu().numpy()
    found = np.asarray(indices) if len(indices) else np.zeros(0, dtype=np.int64)
    if found.ndim == 1 and found.dtype.kind in "iub":
        return found.astype(np.int64)
    try:
        return np.fromiter((operator.index(i) for i in indices), np.int64, len(indices))
    except TypeError:
        return None


# -------------------------------------------------------------------------------------------------
# What tells whether two processes read the same samples in the same order, where a data set can say
# it.


_ROWS = 256
"""Of a data set of Hugging Face that are looked at, evenly spaced."""
_MOST, _MOST_BYTES = 2**21, 2**30
"""Entries of a list, samples of a table and bytes of an array that are looked at, evenly spaced."""


def told_of(dataset: Any, around: tuple[int, ...] = ()) -> str:
    """A digest of its samples: of tensors, subsets and joined sets of them, and of Hugging Face
    data sets.

    Of others their type and length, the tensors, arrays, tables and lists that they are, or hold,
    with an entry for each sample, and the data sets that they hold: reading samples may change them
    (augmentation).

    Args:
        around: identities of the data sets that hold it.
    """
    if isinstance(dataset, TensorDataset):
        return digest(dataset.tensors)
    if isinstance(dataset, Subset):
        chosen = torch.as_tensor([int(i) for i in dataset.indices], dtype=torch.int64, device="cpu")
        return f"{digest([chosen])} of {told_of(dataset.dataset, around)}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(told_of(each, around) for each in dataset.datasets)
    length = len(dataset) if hasattr(dataset, "__len__") else "?"
    found = hashlib.sha256()
    for name, values in _entries_by_row(dataset, length):
        found.update(name.encode())
        for part in _bytes_of(values):
            found.update(part)
    around = (*around, id(dataset))
    for name, held in sorted(getattr(dataset, "__dict__", {}).items()):
        inner = isinstance(held, Dataset) or hasattr(held, "_fingerprint")
        if inner and id(held) not in around:
            found.update(f"{name} {told_of(held, around)}".encode())
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format") and length != "?":
        for part in _bytes_of(_some_samples(dataset)):
            found.update(part)
    return f"{type(dataset).__name__} {length} {found.hexdigest()[:16]}"


def _some_samples(dataset: Any) -> list[Any]:
    """Of a data set of Hugging Face, evenly spaced, as they are stored.

    Its fingerprint says how it was made, and is another one in each process where a function that it
    was mapped by cannot be hashed, as of trainers that tokenize.
    """
    length = len(dataset)
    places = np.unique(np.linspace(0, length - 1, min(_ROWS, length)).astype(np.int64))
    table = dataset.with_format("arrow")[places.tolist()]
    return [[name, table.column(name).to_pylist()] for name in sorted(table.column_names)]


def _entries_by_row(dataset: Any, length: Any) -> Iterator[tuple[str, Any]]:
    """What a data set is, or holds, with an entry for each of its samples."""
    for name, values in (("", dataset), *held(getattr(dataset, "__dict__", {}))):
        table = hasattr(values, "iloc") and hasattr(values, "to_numpy")
        known = table or type(values) in (list, tuple) or isinstance(values, (Tensor, np.ndarray))
        if known and getattr(values, "shape", (0,)) != () and len(values) == length:
            step = 1
            if isinstance(values, np.ndarray):
                step = max(1, values.nbytes // _MOST_BYTES)
            elif not isinstance(values, Tensor) and length:
                leaves = [0] if table else tree_leaves(values[0])
                size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
                step = max(1, length * len(leaves) // _MOST, length * size // _MOST_BYTES)
            few = values if step == 1 else (values.iloc if table else values)[::step]
            yield name, few.to_numpy() if table else few


def held(by_name: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a data set holds, by name, and the columns of mappings among that (a tokenizer's)."""
    for name, values in sorted(by_name.items()):
        yield name, values
        if isinstance(values, Mapping):
            yield from ((f"{name}.{key}", column) for key, column in values.items())


def _bytes_of(values: Any) -> Iterator[bytes]:
    """Of strings what follows the last slash: files may lie in another folder on another machine."""
    if isinstance(values, Tensor):
        yield digest([values]).encode()
    elif isinstance(values, np.ndarray) and values.dtype != object:
        yield f"{values.dtype} {values.shape}".encode()
        yield np.ascontiguousarray(values).tobytes()
    elif isinstance(values, np.ndarray):
        yield from _bytes_of(values.reshape(-1).tolist())
    else:
        for leaf in tree_leaves(list(values)):
            if isinstance(leaf, (Tensor, np.ndarray)):
                yield from _bytes_of(leaf)
            elif isinstance(leaf, str):
                yield f"{leaf.rpartition('/')[2]!r} ".encode()
            else:
                known = isinstance(leaf, (int, float, bytes, np.generic))
                yield f"{leaf if known else type(leaf).__name__!r} ".encode()


# -------------------------------------------------------------------------------------------------


_PLACES = 64
"""That are looked at, evenly spaced."""
_BYTES = 2**28
"""Of a tensor or an array whose samples are looked for; of larger ones only some entries of each
sample."""


class SameSamples:
    """What a data set was when `make_private` was called.

    No Snapshot, for entries may change: it is asked where they are now. Formal guarantee: none: a few
    samples that change places, and data sets that hold no entry for each sample, are not seen.

    Args:
        dataset: of the loader. unit: int64 [samples], whose each sample is, -1 for samples that are
            never drawn; None where samples are drawn one by one, and only their number matters.
    """

    def __init__(self, dataset: Any, unit: Tensor | None = None) -> None:
        self._dataset, self._samples = dataset, len(dataset)
        self._parts = [] if unit is None else parts_of(dataset)
        self._looks: list[dict[str, _Look]] = []
        for part in self._parts:
            assert unit is not None
            length = length_of(part.dataset)
            owner = np.full(length or 0, -1)
            if length is not None:
                owner[part.rows] = unit.numpy()[part.places]
            columns = dict(_columns(part.dataset, len(owner)))
            self._looks.append({name: _look(column, owner) for name, column in columns.items()})

    def check(self) -> None:
        """When a pass over the data begins.

        Raises:
            StepError: samples are gone, or are at other places.
        """
        samples = len(self._dataset)
        if samples < self._samples:
            raise StepError(
                f"The data set ({type(self._dataset).__name__}) has {samples} samples, and had "
                f"{self._samples} when make_private was called, which may still be drawn. Call "
                "make_private again, with a data loader of the remaining samples.",
                doc="data-order",
            )
        if not self._parts:
            return
        now = parts_of(self._dataset)
        if not all(map(self._as_before, now, self._parts)) or len(now) < len(self._parts):
            self._refuse(type(self._dataset).__name__)
        for part, looks in zip(now, self._looks, strict=False):
            columns = dict(_columns(part.dataset, len(part.dataset))) if looks else {}
            for name, look in looks.items():
                if name in columns and look.moved(columns[name]):
                    kind = type(part.dataset).__name__
                    self._refuse(f"{kind}.{name}" if name else kind)

    def _as_before(self, now: Part, before: Part) -> bool:
        old = now.places < self._samples  # samples behind them are never drawn
        places, samples = now.places[old], now.rows[old]
        return np.array_equal(places, before.places) and np.array_equal(samples, before.rows)

    def _refuse(self, name: str) -> None:
        raise StepError(
            f"Samples of the data set ({name}) moved after make_private, and unit_ids "
            "identifies the unit of each by its position. Keep the order, or call make_private again "
            "with the ids in the new order.",
            doc="privacy-units",
        )


@dataclass(frozen=True, eq=False)
class _Look:
    """Entries of one column, at some places.

    Args:
        owner: int64 [samples], whose each sample is. places: that are looked at. stride: of the
            entries of a sample. keys: equal where entries are. kept: the entries, whose identities
            are keys.
    """

    owner: np.ndarray
    places: np.ndarray
    stride: int
    keys: Sequence[Any]
    kept: Any

    def moved(self, column: Any) -> bool:
        """Most entries that are not where they were are, each at one place only, elsewhere."""
        now = _keys(column, self.places, self.stride)
        gone = [i for i, key in enumerate(self.keys) if key != now[i]]
        if not gone:
            return False
        found: dict[Any, list[int]] = {self.keys[i]: [] for i in gone}
        for place, key in enumerate(_keys(column, None, self.stride)):
            if key in found:
                found[key].append(place)
        times = Counter(self.keys)  # what stood at several places tells nothing: a label, None
        alone = [i for i in gone if times[self.keys[i]] == len(found[self.keys[i]]) == 1]
        once = [(self.places[i], found[self.keys[i]][0]) for i in alone]
        others = any(
            place >= len(self.owner) or self.owner[place] != self.owner[before]
            for before, place in once
        )
        return others and 2 * len(once) > len(gone)


def _look(column: Any, owner: np.ndarray) -> _Look:
    samples = len(owner)
    places = np.unique(np.linspace(0, samples - 1, min(_PLACES, samples)).astype(np.int64))
    size = getattr(column, "nbytes", 0)
    stride = max(1, -(-size // _BYTES)) if isinstance(size, int) else 1
    kept = [column[i] for i in places.tolist()] if isinstance(column, (list, tuple)) else None
    return _Look(owner, places, stride, _keys(column, places, stride), kept)


def _keys(column: Any, places: np.ndarray | None, stride: int) -> Sequence[Any]:
    """Of the entries at these places, or of all: of a list their identities, else what they hold."""
    if isinstance(column, (list, tuple)):
        return [id(column[i]) for i in (range(len(column)) if places is None else places.tolist())]
    if isinstance(column, Tensor):
        some = column.detach()
        if places is not None:
            some = some[torch.from_numpy(places).to(column.device)]
        entries = some.reshape(len(some), -1)[:, ::stride].cpu().contiguous()
        column, places, stride = entries.view(torch.uint8).numpy(), None, 1
    if not isinstance(column, np.ndarray):  # a table
        column = (column if places is None else column.iloc[places]).to_numpy()
        places = None
    chosen = column if places is None else column[places]
    if chosen.dtype == object:
        return [repr(sample) for sample in chosen.tolist()]
    flat = np.ascontiguousarray(chosen.reshape(len(chosen), -1)[:, ::stride])
    return [sample.tobytes() for sample in flat]


def _columns(dataset: Any, samples: int, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What a data set is, or holds, with an entry for each sample, by name; also of one around
    another."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    numbered = ((f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors))
    for name, values in (("", dataset), *numbered, *held(getattr(dataset, "__dict__", {}))):
        if _by_row(values) and len(values) == samples > 0:
            yield name, values
        elif isinstance(values, Dataset) and values is not dataset and id(values) not in around:
            inside = length_of(values) == samples
            for inner, column in (
                _columns(values, samples, (*around, id(dataset))) if inside else ()
            ):
                yield f"{name}.{inner}", column


def _by_row(values: Any) -> bool:
    if type(values) in (list, tuple):
        return True
    if isinstance(values, Tensor):
        odd = values.is_nested or values.is_quantized or values.is_complex() or values.is_meta
        return (
            type(values) is Tensor
            and values.layout is torch.strided
            and values.dim() > 0
            and not odd
        )
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return hasattr(values, "iloc") and hasattr(values, "to_numpy")

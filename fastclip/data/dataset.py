"""Identity of samples across subsets and joined data sets, across ranks, and during a run.

A data set may be, or hold, containers with an entry per sample (lists, tensors, arrays, tables). A few
of their entries are probed when a pass begins. An entry that has moved raises an error. An entry that
has changed does not, because a data set may cache its samples or label them anew.
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
# Samples that the user's own sampler draws, each at most once in a pass over the data.
#
# Epsilon assumes that a sample is in a batch once, with probability q = 1 / len(data_loader). A
# sample that is drawn twice in a batch contributes twice. One that is drawn twice in a pass has the
# rate 2q. Samples are identified by the keys that the data set is asked for, so keys must compare by
# value.


def value_of(key: Any) -> Any:
    """Converts a key to a value that is equal to another key's if the keys are equal.

    Raises:
        TypeError: keys of this type compare by identity, or cannot be hashed.
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
        samples: number of samples in the data set.
        name: name of the sampler, for the message.
        once: a sample may be drawn once in a pass. If False, once in a batch.
    """

    def __init__(self, samples: int, name: str, *, once: bool = True) -> None:
        self.samples, self.name, self.once = samples, name, once
        self._clear()

    def _clear(self) -> None:
        self._numbers = bytearray(self.samples)
        self._keys: set[Any] = set()

    def one_pass(self) -> Distinct:
        """Returns the same check for a new pass."""
        return Distinct(self.samples, self.name, once=self.once)

    def check(self, drawn: Any) -> int:
        """Notes the samples of one sampled batch, including all in lists of keys.

        Returns:
            The number of samples.

        Raises:
            ArgumentError: a sample was drawn before, or its key does not compare by value.
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
        except TypeError:  # the data set is not indexed by numbers
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
    """Returns the message for keys that `value_of` does not accept."""
    return (
        f"{who} keys of type {error}, which do not compare by value, so a sample drawn twice under two "
        f"keys is not detected. Use numbers, strings or tuples as keys, or give {error} __eq__ and "
        "__hash__."
    )


def _single(drawn: Any, samples: int) -> Iterator[Any]:
    """Yields the keys of single samples in a sampled batch."""
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
# The data set and number of a loader's sample, through torch's subsets and joined data sets.


@dataclass(frozen=True, eq=False)
class Part:
    """Samples of one data set that has no known parts.

    Args:
        dataset: the data set.
        places: int64 [samples], positions among the samples that were asked for.
        samples: int64 [samples], their numbers in the data set.
    """

    dataset: Any
    places: np.ndarray
    samples: np.ndarray


def parts_of(dataset: Any, samples: np.ndarray | None = None) -> list[Part]:
    """Resolves samples of a data set to the data sets that hold them, through nested subsets too.

    The user's own data sets that repeat or reorder what they hold are not opened.

    Args:
        samples: int64 [samples], numbers of the samples. None: all.

    Raises:
        ArgumentError: a Subset has keys that do not compare by value.
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
    """Number of samples of a data set. None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def numbers(indices: Any) -> np.ndarray | None:
    """Returns the indices of a Subset, int64. None if its keys are not numbers."""
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
# A digest by which two processes compare their samples and the order of these.


_ROWS = 256
"""Number of samples of a Hugging Face data set that are compared, evenly spaced."""
_MOST, _MOST_BYTES = 2**21, 2**30
"""Entries of a list, samples of a table and bytes of an array that are compared, evenly spaced."""


def digest_of(dataset: Any, around: tuple[int, ...] = ()) -> str:
    """Returns a digest of the samples of tensors, subsets, joined data sets and Hugging Face data sets.

    For other data sets it covers type and length, and the tensors, arrays, tables and lists with an
    entry per sample that they are or hold. It covers the data sets that they hold, too. None of their
    samples is read, because reading may change them (augmentation).

    Args:
        around: identities of the data sets that hold it.
    """
    if isinstance(dataset, TensorDataset):
        return digest(dataset.tensors)
    if isinstance(dataset, Subset):
        chosen = torch.as_tensor([int(i) for i in dataset.indices], dtype=torch.int64, device="cpu")
        return f"{digest([chosen])} of {digest_of(dataset.dataset, around)}"
    if isinstance(dataset, ConcatDataset):
        return " and ".join(digest_of(each, around) for each in dataset.datasets)
    length = len(dataset) if hasattr(dataset, "__len__") else "?"
    found = hashlib.sha256()
    for name, values in _entries_by_sample(dataset, length):
        found.update(name.encode())
        for part in _bytes_of(values):
            found.update(part)
    around = (*around, id(dataset))
    for name, held in sorted(getattr(dataset, "__dict__", {}).items()):
        inner = isinstance(held, Dataset) or hasattr(held, "_fingerprint")
        if inner and id(held) not in around:
            found.update(f"{name} {digest_of(held, around)}".encode())
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format") and length != "?":
        for part in _bytes_of(_some_samples(dataset)):
            found.update(part)
    return f"{type(dataset).__name__} {length} {found.hexdigest()[:16]}"


def _some_samples(dataset: Any) -> list[Any]:
    """Returns evenly spaced samples of a Hugging Face data set, as they are stored.

    Its fingerprint describes how it was made. The fingerprint differs between processes if the data set
    was mapped by a function that cannot be hashed, as by trainers that tokenize.
    """
    length = len(dataset)
    places = np.unique(np.linspace(0, length - 1, min(_ROWS, length)).astype(np.int64))
    table = dataset.with_format("arrow")[places.tolist()]
    return [[name, table.column(name).to_pylist()] for name in sorted(table.column_names)]


def _entries_by_sample(dataset: Any, length: Any) -> Iterator[tuple[str, Any]]:
    """Yields the containers with an entry per sample that a data set is or holds, by name."""
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
    """Yields what a data set holds, by name, and the columns of its mappings (a tokenizer's)."""
    for name, values in sorted(by_name.items()):
        yield name, values
        if isinstance(values, Mapping):
            yield from ((f"{name}.{key}", column) for key, column in values.items())


def _bytes_of(values: Any) -> Iterator[bytes]:
    """Yields the bytes of values. Of paths only the file name, as folders differ between machines."""
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
"""Number of entries that are probed, evenly spaced."""
_BYTES = 2**28
"""Bytes of a tensor or an array that are compared. Of larger ones only some entries of each sample."""


class SameSamples:
    """Compares a data set with what it was when `make_private` was called.

    It is no Snapshot, because entries may change. It checks the positions of entries. There is no formal
    guarantee. A few samples that move, and data sets without an entry per sample, are not detected.

    Args:
        dataset: the loader's data set.
        unit: int64 [samples], the unit of each sample, -1 for samples that are never drawn. None: single
            samples are drawn, and only their number matters.
    """

    def __init__(self, dataset: Any, unit: Tensor | None = None) -> None:
        self._dataset, self._samples = dataset, len(dataset)
        self._parts = [] if unit is None else parts_of(dataset)
        self._probes: list[dict[str, _ColumnProbe]] = []
        for part in self._parts:
            assert unit is not None
            length = length_of(part.dataset)
            unit_of = np.full(length or 0, -1)
            if length is not None:
                unit_of[part.samples] = unit.numpy()[part.places]
            columns = dict(_columns(part.dataset, len(unit_of)))
            self._probes.append({name: _probe(column, unit_of) for name, column in columns.items()})

    def check(self) -> None:
        """Checks the data set when a pass over the data begins.

        Raises:
            StepError: samples were removed, or have moved.
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
            self._raise_moved(type(self._dataset).__name__)
        for part, probes in zip(now, self._probes, strict=False):
            columns = dict(_columns(part.dataset, len(part.dataset))) if probes else {}
            for name, probe in probes.items():
                if name in columns and probe.moved(columns[name]):
                    kind = type(part.dataset).__name__
                    self._raise_moved(f"{kind}.{name}" if name else kind)

    def _as_before(self, now: Part, before: Part) -> bool:
        old = now.places < self._samples  # samples after these are never drawn
        places, samples = now.places[old], now.samples[old]
        return np.array_equal(places, before.places) and np.array_equal(samples, before.samples)

    def _raise_moved(self, name: str) -> None:
        raise StepError(
            f"Samples of the data set ({name}) moved after make_private, and unit_ids "
            "identifies the unit of each by its position. Keep the order, or call make_private again "
            "with the ids in the new order.",
            doc="privacy-units",
        )


@dataclass(frozen=True, eq=False)
class _ColumnProbe:
    """Probed entries of one column.

    Args:
        unit: int64 [samples], the unit of each sample.
        places: int64, positions of the probed entries.
        stride: stride over the numbers of an entry.
        keys: keys of the entries, equal if the entries are.
        kept: the entries themselves, if keys are their identities.
    """

    unit: np.ndarray
    places: np.ndarray
    stride: int
    keys: Sequence[Any]
    kept: Any

    def moved(self, column: Any) -> bool:
        """Whether most entries that left their position are found elsewhere, at one position each."""
        now = _keys(column, self.places, self.stride)
        gone = [i for i, key in enumerate(self.keys) if key != now[i]]
        if not gone:
            return False
        found: dict[Any, list[int]] = {self.keys[i]: [] for i in gone}
        for place, key in enumerate(_keys(column, None, self.stride)):
            if key in found:
                found[key].append(place)
        times = Counter(self.keys)  # entries at several positions (a label, None) show nothing
        alone = [i for i in gone if times[self.keys[i]] == len(found[self.keys[i]]) == 1]
        once = [(self.places[i], found[self.keys[i]][0]) for i in alone]
        others = any(
            place >= len(self.unit) or self.unit[place] != self.unit[before]
            for before, place in once
        )
        return others and 2 * len(once) > len(gone)


def _probe(column: Any, unit: np.ndarray) -> _ColumnProbe:
    samples = len(unit)
    places = np.unique(np.linspace(0, samples - 1, min(_PLACES, samples)).astype(np.int64))
    size = getattr(column, "nbytes", 0)
    stride = max(1, -(-size // _BYTES)) if isinstance(size, int) else 1
    kept = [column[i] for i in places.tolist()] if isinstance(column, (list, tuple)) else None
    return _ColumnProbe(unit, places, stride, _keys(column, places, stride), kept)


def _keys(column: Any, places: np.ndarray | None, stride: int) -> Sequence[Any]:
    """Returns keys of the entries at these positions, or of all. For a list they are identities."""
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
    """Yields the containers with an entry per sample that a data set, or one that it wraps, holds."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    numbered = ((f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors))
    for name, values in (("", dataset), *numbered, *held(getattr(dataset, "__dict__", {}))):
        if _has_entries(values) and len(values) == samples > 0:
            yield name, values
        elif isinstance(values, Dataset) and values is not dataset and id(values) not in around:
            inside = length_of(values) == samples
            for inner, column in (
                _columns(values, samples, (*around, id(dataset))) if inside else ()
            ):
                yield f"{name}.{inner}", column


def _has_entries(values: Any) -> bool:
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

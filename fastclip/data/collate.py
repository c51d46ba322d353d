"""Checks of the user's collate function, and the empty batches that it is used for.

If items hold tensors, every call is traced. Values that cannot be traced (arrays, text, numbers, values
that leave torch) are compared in the first batch of each kind, then in the second, fourth, and so on.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Subset, default_collate

from fastclip.core.opacus_names import without_empty
from fastclip.core.torch_names import fetch_calls
from fastclip.data.collate_items import Repeatable, alike_items
from fastclip.data.collate_law import (
    CollateTrace,
    Fault,
    Law,
    Leaf,
    Node,
    copied,
    leaves,
    opened,
    rebuilt,
    tensors_of,
)
from fastclip.data.collate_probe import Probe, repeated_samples
from fastclip.data.loader import asks_at_once
from fastclip.errors import ArgumentError, BatchSizeError
from fastclip.ops.random import set_aside
from fastclip.trace.findings import Cause

_SPARE = 4
"""Number of items kept for batches of one sample, which have no other content to compare with."""
_SUSPECTED = 8
"""Number of batches compared in which samples are equal and their items are not."""
_UNDECIDED = 16
"""Number of batches compared that show nothing."""


class Checks:
    """A collate function of fastclip that checks its batches."""


class CheckedCollate(Checks):
    """Calls a collate function, and raises an error for a batch in which samples are repeated or mixed.

    Formal guarantee: in tensors that the trace follows, every entry of the batch depends on at most one
    sample. Every position of the batch axis holds at most one sample. Every sample has one position, the
    same in all tensors of the batch. For other values this held in the batches that were compared.

    Args:
        collate: the user's function.
        batch_first: samples lie along axis 0. If False, along axis 0 or 1.
        ordered: sample i must be at position i.
        views: number of adjacent positions that may hold each sample.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        batch_first: bool = True,
        ordered: bool = False,
        views: int = 1,
    ) -> None:
        self.collate, self.batch_first, self.ordered = collate, batch_first, ordered
        self.views = views
        self._start()

    def _start(self) -> None:
        fetch_calls.watch(self)
        self._seen: Counter[Any] = Counter()
        self._spare: list[Any] = []
        self._trace: CollateTrace | None = None
        self._untraced = False
        self._undecided = 0
        self._busy = threading.Lock()

    @property
    def _asked(self) -> dict[str, Any]:
        names = ("batch_first", "ordered", "views")
        return {name: getattr(self, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {"collate": self.collate, **self._asked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "collate" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, items: Any) -> Any:
        """Returns the batch.

        Raises:
            BatchSizeError: the batch repeats or mixes samples.
        """
        if not isinstance(items, list) or not items:
            return self.collate(items)
        if not self._busy.acquire(blocking=False):  # another thread's call, or one inside this one
            return CheckedCollate(self.collate, **self._asked)._checked(items)
        try:
            return self._checked(items)
        finally:
            self._busy.release()

    def _checked(self, items: list[Any]) -> Any:
        law = Law(len(items), **self._asked)
        kept = [rebuilt(item, lambda leaf: leaf, fresh=True) for item in items]
        random = Repeatable(self.collate)
        if not self._untraced and any(True for item in items for _ in tensors_of(item)):
            before = None
            batch, root, followed = self._traced(items, law)
        else:
            before = random.state()
            batch = self.collate(items)
            root, followed = opened(batch), False
        if not followed and self._is_due(root, kept, law):
            self._compare(kept, law, random, before)
        return batch

    # The trace

    def _traced(self, items: list[Any], law: Law) -> tuple[Any, Node, bool]:
        """Returns the batch, its leaves, and whether the trace followed all of them."""
        trace = self._trace = self._trace or CollateTrace()
        try:
            batch = trace.call(self.collate, items)
        except Exception as error:
            if not _of_the_trace(error):
                raise
            try:
                batch = self.collate(items)
            except Exception:
                raise error from None
            self._untraced = True  # a function that does not run under a trace
            return batch, opened(batch), False
        root = trace.root
        assert root is not None
        fault = law.fault(root)
        if fault is not None and not _of_several():
            cause = trace.cause(fault.leaf.value)
            if not (fault.kind == "mixes" and trace.is_guessed(cause)):
                raise self._error(fault, cause)
        return batch, root, fault is None and not trace.read and law.is_followed(root)

    # By values

    def _is_due(self, root: Node, items: list[Any], law: Law) -> bool:
        """Whether a batch is compared, as the first, second, fourth ... of its kind are."""
        kind = tuple((leaf.path, *_kind(leaf, len(items))) for leaf in leaves(root))
        alike = repeated_samples(root, law)
        suspected = alike > 0 and alike > alike_items(items)
        self._seen[kind, suspected] += 1
        count = self._seen[kind, suspected]
        return (count & (count - 1)) == 0 or (suspected and count <= _SUSPECTED)

    def _compare(
        self, items: list[Any], law: Law, random: Repeatable, before: Callable[[], None] | None
    ) -> None:
        with set_aside():
            after = random.state()
            probe = Probe(self.collate, items, self._spare, law, random, before or after)
            try:
                fault = probe.fault()
            except Exception:  # the changed items may be impossible ones
                fault = None
            finally:
                after()
        if fault is not None and not _of_several():
            raise self._error(fault, None)
        if not probe.decided and self._undecided < _UNDECIDED:  # the next one may say more
            self._undecided += 1
            self._seen.clear()
        if len(self._spare) < _SPARE:
            self._spare += [rebuilt(item, copied, fresh=True) for item in items[:_SPARE]]

    # Words

    def _error(self, fault: Fault, cause: Cause | None) -> BatchSizeError:
        name = f"collate_fn {_named(self.collate)}"
        where = f" ({cause.operation} at {cause.line})" if cause is not None else ""
        which = " and ".join(map(str, fault.samples[:2])) if len(fault.samples) > 1 else ""
        one = f"sample {fault.samples[0]}" if fault.samples else "a sample"
        at = f" in {fault.leaf.path}" if fault.leaf.path != "batch" else ""
        if fault.kind == "repeats":
            return BatchSizeError(
                f"{name} repeats {one} of its batch{at}{where}, so it contributes more often than "
                "epsilon states. Return each sample at one position of the batch axis.",
                doc="data-order",
            )
        if fault.kind == "views":
            return BatchSizeError(
                f"{name} puts views of several samples{at}{where} where views={self.views} expects "
                "those of one, so they would be clipped as one. Keep the views of each sample "
                "adjacent, as torch.stack(views, 1).flatten(0, 1) does.",
                doc="data-order",
            )
        if fault.kind == "mixes":
            return BatchSizeError(
                f"{name} mixes samples{f' {which}' if which else ''} of its batch{at}{where}, so "
                "clipping does not bound what each contributes. Return one sample at each position of "
                "the batch axis.",
                doc="data-order",
            )
        if fault.kind == "axis":
            return BatchSizeError(
                f"{name} mixes samples along axis 0{at}, and they lie along axis 1. Put them along "
                "axis 0, or pass batch_first=False to make_private."
            )
        if fault.kind == "order":
            return BatchSizeError(
                f"{name} changes the order of samples{at}{where}, and unit_ids identifies the unit of "
                "each sample by its position. Keep the order of the samples.",
                doc="privacy-units",
            )
        return BatchSizeError(
            f"{name} draws random numbers that cannot be repeated, so fastclip cannot check whether it "
            "repeats or mixes samples. Draw them in the data set, or from torch's global generator.",
            doc="data-order",
        )


def checked_collate(
    collate: Any, *, batch_first: bool = True, ordered: bool = False, views: int = 1
) -> Any:
    """Wraps a collate function to check its batches. One that needs no check is unchanged."""
    own = without_empty(collate)
    if own is None or own is default_collate or isinstance(own, Checks):
        return collate
    return CheckedCollate(collate, batch_first=batch_first, ordered=ordered, views=views)


def plain_collate(collate: Any) -> Any:
    """The user's own function."""
    return collate.collate if isinstance(collate, CheckedCollate) else collate


def check_collate(loader: DataLoader, *, batch_first: bool = True) -> None:
    """Makes the collate function of a loader check its batches, if the loader's own sampler draws."""
    if getattr(loader, "batch_sampler", None) is None or asks_at_once(loader):
        return  # an item is not one sample
    object.__setattr__(
        loader, "collate_fn", checked_collate(loader.collate_fn, batch_first=batch_first)
    )


def _of_several() -> bool:
    """Whether the data set was asked for several samples by one key. An item is not one sample then."""
    _, keys = fetch_calls.innermost() or (None, None)
    several = (list, slice, range, set, frozenset, np.ndarray, Tensor)
    return isinstance(keys, (list, tuple)) and any(
        isinstance(key, several) and getattr(key, "shape", None) != () for key in keys
    )


def _kind(leaf: Leaf, items: int) -> tuple[Any, ...]:
    """The kind of a leaf: its type, number of axes, and whether it has fewer or more entries."""
    kind = leaf.value.dtype if isinstance(leaf.value, Tensor) else type(leaf.value)
    samples = leaf.shape[0] if leaf.shape else None
    return kind, len(leaf.shape), None if samples is None else (samples > items) - (samples < items)


def _named(collate: Any) -> str:
    """The function as messages name it, with the line where it begins."""
    name = getattr(collate, "__name__", None) or type(collate).__name__
    of = collate if hasattr(collate, "__code__") else getattr(collate, "__func__", None)
    code = getattr(of if of is not None else type(collate).__call__, "__code__", None)
    if code is None:
        return f"'{name}'"
    return f"'{name}' ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _of_the_trace(error: BaseException) -> bool:
    """Whether an error passed through the tracer. The tracer may have raised it."""
    trace = error.__traceback__
    while trace is not None:
        if f"{Path('fastclip') / 'trace'}" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


# -------------------------------------------------------------------------------------------------
# Empty batches, in the form that the collate function gives to others.
#
# Opacus' collator makes them for tensors in dicts, lists and tuples. It fails on the rest when the
# first empty batch comes, which may be hours later. This one finds out at the beginning.


_CANNOT = (
    "collate_fn makes batches that cannot be made without samples ({what}), and Poisson sampling draws "
    "empty ones at times. Let collate_fn accept an empty list, or return tensors, arrays, plain values "
    "and containers of these."
)
_MANY = 24.0
"""Expected batch size above which an empty batch has a probability of at most exp(-24)."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class EmptyBatches(Checks):
    """Opacus' collator of a Poisson loader (CollateFnWithEmpty), for more than tensors.

    Samples lie along the batch axis of tensors, along the first axis of arrays, and in lists that are as
    long as the batch. In an empty batch these are empty. A placeholder sample (rand_on_empty) consists
    of ones. Random values may be a length or divisor of 0, on which a model fails. A copy of a sample
    would be trained on if the user's own loop takes it for a sampled batch.

    Args:
        collate: the user's function. None returns the list of samples.
        batch_first: samples lie along the first axis of tensors. If False, along the second.
        rand_on_empty: an empty batch holds a placeholder sample.
        ordered: sample i of a batch must be the i-th drawn.
        views: number of views that the user's function may make of each sample.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, batch_first: bool = True,
        rand_on_empty: bool = False, *, ordered: bool = False, views: int = 1,
    ) -> None:  # fmt: skip
        self.wrapped_collator_fn = collate
        self.batch_first, self.rand_on_empty = batch_first, rand_on_empty
        self.checked = checked_collate(
            collate, batch_first=batch_first, ordered=ordered, views=views
        )
        self.views = views
        self.first_batch: Any = None
        self.known = False
        self.impossible: str | None = None
        """Message that says why no empty batch can be made."""

    def __call__(self, batch: list[Any]) -> Any:
        """Collates samples.

        Raises:
            ArgumentError: there are no samples, and no empty batch can be made.
            BatchSizeError: as `CheckedCollate`.
        """
        if len(batch):
            output = self.checked(batch) if self.checked else batch
            if not self.known:
                self.learn(output, len(batch))
            return output
        if not self.known:  # no sample was read yet, nor could one be
            try:
                return self.collated([])
            except Exception as error:
                what = "no sample has been read yet"
                raise ArgumentError(_CANNOT.format(what=what), doc="data-order") from error
        if self.impossible is not None:
            raise ArgumentError(self.impossible, doc="data-order")
        return copy.deepcopy(self.first_batch)

    def collated(self, samples: list[Any]) -> Any:
        """Returns what the user's collate function makes of samples, without a check."""
        return self.wrapped_collator_fn(samples) if self.wrapped_collator_fn else samples

    def learn(self, batch: Any, samples: int, longer: Any = None) -> None:
        """Keeps an empty batch like this one, or the reason why there is none.

        Args:
            batch: of `samples` samples.
            longer: the same with one sample more, which identifies lists of samples. None: not known.
        """
        self.known = True
        try:
            self.first_batch = self._empty(batch, samples, longer)
        except Exception as error:  # whatever types of the user's own raise
            try:
                self.first_batch = self.collated([])
            except Exception:  # it does not take an empty list
                what = str(error) if isinstance(error, _CannotError) else type(batch).__name__
                self.impossible = _CANNOT.format(what=what)

    def _empty(self, batch: Any, samples: int, longer: Any) -> Any:
        if isinstance(batch, PackedSequence):
            if not self.rand_on_empty or samples > 1:
                raise _CannotError("PackedSequence")
            return batch._replace(data=torch.ones_like(batch.data))
        if isinstance(batch, Tensor):
            shape = list(batch.shape)
            if shape:
                axis = 0 if self.batch_first or len(shape) == 1 else 1
                shape[axis] = self._placeholders(shape[axis], samples)
            return torch.ones(shape, dtype=batch.dtype, device=batch.device)
        if isinstance(batch, np.ndarray):
            shape = list(batch.shape)
            shape[:1] = [self._placeholders(n, samples) for n in shape[:1]]
            return np.ones(shape, dtype=batch.dtype)
        if isinstance(batch, (list, tuple)) and _of_rows(batch, samples, longer, self.views):
            return type(batch)([_ones(batch[0])] * self._placeholders(len(batch), samples))
        return _rebuilt(batch, longer, lambda part, other: self._empty(part, samples, other))

    def _placeholders(self, length: int, samples: int) -> int:
        """Length of an empty batch, if a batch of `samples` samples has this length."""
        each = self.views if length == samples * self.views else 1
        return each if self.rand_on_empty else 0


def draws_none(sampler: Any) -> bool:
    """Whether an empty batch is to be expected of a Poisson sampler in a training run."""
    rates = getattr(sampler, "rates", None)
    mean = sampler.num_samples * sampler.sample_rate if rates is None else float(rates.sum())
    return bool(mean < _MANY)


class _CannotError(Exception):
    """Holds the name of a type of which no empty batch can be made."""


def _of_rows(batch: Any, samples: int, longer: Any, views: int) -> bool:
    """Whether a list has an entry for each sample, or for each view of it."""
    if len(batch) not in (samples, samples * views) or hasattr(batch, "_fields"):
        return False
    if longer is not None:
        return bool(len(longer) * samples == (samples + 1) * len(batch))
    return all(isinstance(entry, _PLAIN) for entry in batch)


def _ones(sample: Any) -> Any:
    """Returns a value like a sample, of ones."""
    if isinstance(sample, Tensor):
        return torch.ones_like(sample)
    if isinstance(sample, np.ndarray):
        return np.ones_like(sample)
    if isinstance(sample, bytes):
        return b"1"
    if isinstance(sample, (str, bool, int, float, complex)):
        return type(sample)(1)
    return _rebuilt(sample, None, lambda part, _: _ones(part))


def _rebuilt(whole: Any, longer: Any, of_part: Callable[[Any, Any], Any]) -> Any:
    """Rebuilds a container of other parts. A plain value, which belongs to no sample, is unchanged.

    Raises:
        _CannotError: the parts of this type are not known.
    """

    def other(get: Any) -> Any:
        with suppress(Exception):  # `longer` has another structure
            return None if longer is None else get(longer)
        return None

    if isinstance(whole, _PLAIN):
        return whole
    if isinstance(whole, MutableMapping):
        made: Any = copy.copy(whole)
        for key, part in whole.items():
            made[key] = of_part(part, other(lambda x, key=key: x[key]))
        return made
    if isinstance(whole, (list, tuple)):
        parts = [of_part(part, other(lambda x, i=i: x[i])) for i, part in enumerate(whole)]
        return type(whole)(*parts) if hasattr(whole, "_fields") else type(whole)(parts)
    if is_dataclass(whole) and not isinstance(whole, type):
        made = copy.copy(whole)
        for name in (field.name for field in fields(whole)):
            part = of_part(getattr(whole, name), other(lambda x, name=name: getattr(x, name)))
            object.__setattr__(made, name, part)  # a frozen one, too
        return made
    raise _CannotError(type(whole).__name__)


# -------------------------------------------------------------------------------------------------
# Trials of a collate function before training: whether it keeps the order of samples, by which the unit
# of each is identified, and what an empty batch looks like.


_MOST = 16
"""Number of samples that are tried, evenly spaced in the data set."""
_KEEP_ORDER = (
    ", and unit_ids identifies the unit of each by its position. Keep the order, draw no random numbers "
    "there, and return tensors, arrays or lists with samples along axis 0."
)

_NAMES = (
    "poisson_sampling=True draws samples by their numbers, and the data set ({kind}) has no sample "
    "{sample}. If its keys are names, pass torch.utils.data.Subset(dataset, list_of_names)."
)
_NONE = (
    "{kind}.__getitems__ of the data set raises an error for an empty list of numbers, which Poisson "
    "sampling draws at times. Let it return an empty list."
)


def check_sample_order(loader: DataLoader, samples: list[int], batch_first: bool = True) -> None:
    """Raises an error if a collate function, or `__getitems__`, may change the order of samples.

    A few samples are read and collated in three orders, with the same random numbers.

    Args:
        samples: numbers of those that may be drawn.
        batch_first: samples lie along axis 0. If False, along axis 0 or 1.

    Raises:
        ArgumentError: the batches are not the same samples in these orders, or this cannot be decided.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    while isinstance(collate, EmptyBatches):  # a Poisson loader's, around the user's function
        collate = collate.wrapped_collator_fn or list
    collate = plain_collate(without_empty(collate))
    if collate is default_collate and not _reads_at_once(dataset):
        return
    n = min(len(samples), _MOST)
    chosen = [samples[i * (len(samples) - 1) // max(n - 1, 1)] for i in range(n)]
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(n, generator=generator, device="cpu").tolist()
    name = f"collate_fn {getattr(collate, '__name__', type(collate).__name__)}"
    if _reads_at_once(dataset):
        name = f"{type(dataset).__name__}.__getitems__, or {name},"
    with generators_restored() as again:
        read = _reader(dataset, chosen)
        plain = list(_leaves(collate(read(range(n)))))
        moved = 0
        for order in ([*reversed(range(n))], shuffled):
            again()
            read = _reader(dataset, chosen) if _reads_at_once(dataset) else read
            other = list(_leaves(collate(read(order))))
            if len(other) != len(plain):
                raise ArgumentError(
                    f"{name} returns another structure for samples in another order{_KEEP_ORDER}",
                    doc="privacy-units",
                )
            moved += sum(
                _follows(a, b, order, name, batch_first) for a, b in zip(plain, other, strict=True)
            )
        if not moved and n > 1:
            raise ArgumentError(
                f"{name} returns the same batch for {n} samples in any order{_KEEP_ORDER}",
                doc="privacy-units",
            )


def know_empty(loader: DataLoader, sample: int) -> None:
    """Shows the collate function of a Poisson loader a sample, to learn what a batch looks like.

    Raises:
        ArgumentError: the data set does not number its samples, or batches may be empty and no empty
            batch can be made.
    """
    collate, dataset = loader.collate_fn, loader.dataset
    assert isinstance(collate, EmptyBatches)
    with generators_restored():
        try:
            read, longer = _reader(dataset, [sample]), None
            batch = collate.collated(read([0]))
            with suppress(Exception):
                longer = collate.collated(read([0, 0]))
            collate.learn(batch, 1, longer)
        except Exception as error:  # the loader reports a sample that cannot be read
            if isinstance(error, KeyError) and error.args == (sample,):
                raise ArgumentError(
                    _NAMES.format(kind=type(dataset).__name__, sample=sample), doc="sampling"
                ) from error
        if not draws_none(loader.batch_sampler):
            return
        if collate.impossible is not None:
            raise ArgumentError(collate.impossible, doc="data-order")
        if _reads_at_once(dataset):
            try:
                dataset.__getitems__([])  # type: ignore[attr-defined]
            except Exception as error:  # whatever it raises
                none = _NONE.format(kind=type(dataset).__name__)
                raise ArgumentError(none, doc="data-order") from error


def try_collate(loader: DataLoader, samples: list[int]) -> None:
    """Checks what a Poisson loader's collate function makes of a few samples, before workers run it.

    Raises:
        BatchSizeError: the function repeats or mixes samples.
    """
    checked = getattr(loader.collate_fn, "checked", None)
    if not isinstance(checked, CheckedCollate):
        return
    found: BatchSizeError | None = None
    with generators_restored(), suppress(Exception):  # the loader reports unreadable samples
        items = _reader(loader.dataset, samples)(range(len(samples)))
        try:
            checked(items)
        except BatchSizeError as error:
            found = error
    if found is not None:
        raise found


def _reads_at_once(dataset: Any) -> bool:
    """Whether the data set reads all samples of a batch at once, by `__getitems__`."""
    if type(dataset) is Subset:
        return _reads_at_once(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def _reader(dataset: Any, chosen: list[int]) -> Any:
    """Returns a function that reads the chosen samples in a given order, as a DataLoader does."""
    if _reads_at_once(dataset):
        return lambda order: dataset.__getitems__([chosen[i] for i in order])
    kept = [dataset[sample] for sample in chosen]  # once: a data set may draw random numbers
    try:
        copy.deepcopy(kept)
    except Exception:  # a sample may hold a lock, a file or a graph
        return lambda order: [dataset[chosen[i]] for i in order]
    return lambda order: [copy.deepcopy(kept[i]) for i in order]  # a collator may change samples


def _follows(a: Any, b: Any, order: list[int], name: str, batch_first: bool) -> bool:
    """Whether a leaf follows the order of samples. False if it belongs to no sample.

    Raises:
        ArgumentError: the leaf changes in another way.
    """
    for axis in (0,) if batch_first else (0, 1):
        if _length(a, axis) == _length(b, axis) == len(order):
            permuted = _at(a, order, axis)
            if _same(permuted, b):
                return not _same(a, b)
    if not _same(a, b) or _length(a, 0) == len(order) > 1:
        raise ArgumentError(
            f"{name} changes the order of samples, or draws random numbers{_KEEP_ORDER}",
            doc="privacy-units",
        )
    return False


def _length(leaf: Any, axis: int) -> int:
    if isinstance(leaf, Tensor):
        return leaf.shape[axis] if leaf.dim() > axis else -1
    return len(leaf) if isinstance(leaf, list) and not axis else -1


def _at(leaf: Any, order: list[int], axis: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.index_select(axis, torch.tensor(order, dtype=torch.int64, device=leaf.device))
    return [leaf[i] for i in order]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and bool(a == b)


def _leaves(batch: Any) -> Iterator[Any]:
    """Yields the tensors and lists of plain values of a batch. Arrays become tensors."""
    if isinstance(batch, np.ndarray) and batch.dtype != object:
        yield torch.from_numpy(np.array(batch)) if batch.dtype.kind in "biufc" else batch.tolist()
    elif isinstance(batch, (Tensor, str, bytes, int, float, bool, type(None))):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        if batch and all(isinstance(v, (str, bytes, int, float, bool, type(None))) for v in batch):
            yield list(batch)
        else:
            for value in batch:
                yield from _leaves(value)
    else:
        raise ArgumentError(
            f"collate_fn returns a {type(batch).__name__}, in which fastclip cannot find the samples"
            f"{_KEEP_ORDER}",
            doc="privacy-units",
        )


@contextmanager
def generators_restored() -> Iterator[Any]:
    """Yields a function that restores random numbers to the block's start. The block's end does too."""
    with set_aside():
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()

        def again() -> None:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

        try:
            yield again
        finally:
            again()

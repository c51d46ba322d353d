"""The law that a collated batch must keep, and a traced call of collate_fn that checks it.

The law needs the sample attribution of each entry (`fastclip.trace.attribution`), from any source.
"""

from __future__ import annotations

import copy
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack, to_dlpack

from fastclip.core.torch_names import Native, Undispatched, memory_of, pad_sequences
from fastclip.trace import attribution as at
from fastclip.trace.findings import Cause, Report
from fastclip.trace.memory import Memory, Shadow
from fastclip.trace.operation import Kind
from fastclip.trace.tracer import Tracer

PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic)
"""Types of values that are not opened."""
_DEEPEST = 16


@dataclass(eq=False)
class Leaf:
    """A tensor of a batch, a list of plain values, or one plain value.

    Args:
        path: path to it in the batch.
        value: the tensor or value, or the data of packed sequences.
        packed: the packed sequences that hold the data.
        sample: the sample attribution of its entries. None: no sample, or not known.
    """

    path: str
    value: Any
    packed: PackedSequence | None = None
    sample: at.Attribution = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape. For packed sequences the padded shape, [b, t, ...]."""
        if self.packed is not None:
            sizes = self.packed.batch_sizes
            return (int(sizes[0]), len(sizes), *self.packed.data.shape[1:])
        if isinstance(self.value, Tensor):
            return tuple(self.value.shape)
        return (len(self.value),) if isinstance(self.value, list) else ()

    def attribute(self, sample: at.Attribution) -> None:
        """Stores the sample attribution of `value`."""
        if sample is None or not sample.numel() or bool((sample == at.NONE).all()):
            self.sample = None
            return
        if self.packed is not None:
            expanded = at.expanded(sample, self.packed.data.shape).contiguous()
            sample = padded(self.packed._replace(data=expanded), at.NONE)
        self.sample = sample


@dataclass(eq=False)
class Branch:
    """Parts of a batch.

    Attributes:
        listed: the parts are entries of a list, which may be the batch axis.
    """

    parts: list[Leaf | Branch]
    listed: bool = False


Node = Leaf | Branch


def padded(packed: PackedSequence, value: float = 0.0) -> Tensor:
    """Pads packed sequences to [b, t, ...]."""
    return pad_packed_sequence(packed, batch_first=True, padding_value=value)[0]


def opened(batch: Any, path: str = "batch", depth: int = 0) -> Node:
    """Opens a batch into its nested leaves. Objects of other classes show their public attributes."""
    if isinstance(batch, PackedSequence):
        return Leaf(path, batch.data, batch)
    if isinstance(batch, Tensor):
        if batch.is_nested:
            return opened(list(batch.unbind()), path, depth + 1)
        return Leaf(path, batch)
    if isinstance(batch, np.ndarray):
        return _of_array(batch, path, depth)
    if isinstance(batch, PLAIN) or depth == _DEEPEST:
        return Leaf(path, batch)
    if isinstance(batch, (list, tuple)):
        listed = not hasattr(batch, "_fields")
        if listed and all(isinstance(part, PLAIN) for part in batch):
            return Leaf(path, list(batch))
        parts = [opened(part, f"{path}[{i}]", depth + 1) for i, part in enumerate(batch)]
        return Branch(parts, listed)
    return Branch([opened(part, f"{path}.{name}", depth + 1) for name, part in _members(batch)])


def _of_array(array: np.ndarray, path: str, depth: int) -> Node:
    if array.dtype.kind in "biufc":
        return Leaf(path, torch.from_numpy(np.array(array)))
    if array.ndim:
        return opened(array.tolist(), path, depth + 1)
    return Leaf(path, array.item() if array.dtype.kind in "US" else None)


def _members(batch: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in fields(batch))
    elif not isinstance(batch, type) and not callable(batch):
        for name, part in getattr(batch, "__dict__", {}).items():
            if not name.startswith("_"):
                yield name, part


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields all leaves, in order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


# The law


@dataclass(frozen=True)
class Fault:
    """A violation of the law.

    Args:
        kind: "repeats", "mixes", "axis" (samples lie along axis 1 alone), "order", "views" (adjacent
            positions that should hold one sample hold several) or "unknown".
        samples: numbers of the samples concerned, in the order drawn.
        leaf: the leaf that shows it.
    """

    kind: str
    samples: tuple[int, ...]
    leaf: Leaf


class Law:
    """Decides whether a batch may be trained on.

    Args:
        samples: number of samples that were collated.
        batch_first: samples lie along axis 0. If False, along axis 0 or 1.
        ordered: position i must hold sample i.
        views: number of adjacent positions that may hold each sample.
    """

    def __init__(
        self, samples: int, *, batch_first: bool = True, ordered: bool = False, views: int = 1
    ) -> None:
        self.samples, self.ordered, self.views = samples, ordered, views
        self.axes = (0,) if batch_first else (0, 1)

    def fault(self, root: Node) -> Fault | None:
        """Returns the first violation. None: the batch keeps the law."""
        self._sizes = {n for leaf in leaves(root) for n in leaf.shape}
        self._placed: dict[int, dict[int, int]] = {}
        return self._of(root)

    def is_followed(self, root: Node) -> bool:
        """Whether every position of every tensor belongs to a known sample."""
        return all(
            leaf.sample is not None
            and any(bool((self._along(leaf, a) >= 0).all()) for a in (0, 1) if a < len(leaf.shape))
            for leaf in leaves(root)
        )

    def _of(self, node: Node) -> Fault | None:
        if isinstance(node, Leaf):
            return self._of_leaf(node)
        if node.listed and (one := self._one_each(node)) is not None:
            return self._place(one, len(node.parts), next(leaves(node)))
        for part in node.parts:
            if (found := self._of(part)) is not None:
                return found
        return None

    def _one_each(self, node: Branch) -> dict[int, int] | None:
        """Returns the sample of each entry of a list, if no two entries share one."""
        one: dict[int, int] = {}
        for place, part in enumerate(node.parts):
            held = {
                number
                for leaf in leaves(part)
                if leaf.sample is not None
                for number in leaf.sample.unique().tolist()
                if number >= 0
            }
            if len(held) > 1 or at.SEVERAL in held:
                return None
            if held:
                one[place] = held.pop()
        return one if one and len(set(one.values())) == len(one) else None

    def _of_leaf(self, leaf: Leaf) -> Fault | None:
        if leaf.sample is None:
            return None
        held = leaf.sample.unique()
        mixed = bool((held == at.SEVERAL).any())
        own = tuple(held[(held >= 0) & (held < at.SEVERAL)].tolist())
        if not leaf.shape:
            if self.samples == 1 or is_size(leaf.value, self._sizes):
                return None
            return Fault("mixes" if mixed else "repeats", own, leaf)
        faults = []
        for axis in self.axes[: len(leaf.shape)]:
            along, found = self._joined(self._along(leaf, axis), leaf)
            found = found or _fault_along(along, leaf)
            if found is None:
                one = {place: s for place, s in enumerate(along.tolist()) if s >= 0}
                found = self._place(one, len(along), leaf)
            if found is None:
                return None
            faults.append(found)
        other = not mixed and faults[0].kind == "mixes" and len(self.axes) == 1 < len(leaf.shape)
        if other and leaf.shape[1] > 1 and _fault_along(self._along(leaf, 1), leaf) is None:
            return Fault("axis", own, leaf)
        return next((f for f in faults if f.kind == "repeats"), faults[0])

    def _joined(self, along: Tensor, leaf: Leaf) -> tuple[Tensor, Fault | None]:
        """Returns the sample of each run of views, if the axis holds views."""
        if self.views == 1 or len(along) != self.samples * self.views:
            return along, None
        runs = along.reshape(self.samples, self.views)
        first, known = runs.amax(1), runs >= 0
        unlike = ((runs != first[:, None]) & known).any(1)
        if not bool(unlike.any()) or bool((first >= at.SEVERAL).any()):
            return first, None
        run = runs[unlike][0]
        return first, Fault("views", tuple(run[run >= 0].unique().tolist()), leaf)

    @staticmethod
    def _along(leaf: Leaf, axis: int) -> Tensor:
        """Returns the sample at each position of an axis."""
        assert leaf.sample is not None
        others = [a for a in range(len(leaf.shape)) if a != axis]
        held = leaf.sample.masked_fill(leaf.sample == at.UNSEEN, at.NONE)
        found = at.reduced(held, others)
        assert found is not None
        return found.reshape(-1).expand(leaf.shape[axis])

    def _place(self, one: dict[int, int], length: int, leaf: Leaf) -> Fault | None:
        """Checks that tensors of one length hold each sample at one position."""
        lengths = {*self._placed, length}
        if 1 in lengths and len(lengths) > 1 and self.samples > 1:
            alone = one if length == 1 else self._placed[1]
            if alone:
                return Fault("repeats", tuple(alone.values()), leaf)
        before = self._placed.setdefault(length, {})
        places = {sample: place for place, sample in before.items()}
        for place, sample in one.items():
            other = before.get(place, sample)
            if other != sample:
                return Fault("mixes", (other, sample), leaf)
            if places.get(sample, place) != place:
                return Fault("repeats", (sample,), leaf)
            if self.ordered and length == self.samples and place != sample:
                return Fault("order", (sample,), leaf)
        before.update(one)
        return None


def is_size(value: Any, sizes: set[int]) -> bool:
    """Whether a value is text, or a number that is among the sizes of the batch."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            return False
        value = value.item()
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value) in sizes
    return isinstance(value, (str, bytes, type(None)))


def _fault_along(along: Tensor, leaf: Leaf) -> Fault | None:
    if bool((along >= at.SEVERAL).any()):
        assert leaf.sample is not None
        held = leaf.sample.unique()
        return Fault("mixes", tuple(held[(held >= 0) & (held < at.SEVERAL)].tolist()), leaf)
    counts = Counter(along[along >= 0].tolist())
    often = tuple(sample for sample, count in counts.items() if count > 1)
    return Fault("repeats", often, leaf) if often else None


# -------------------------------------------------------------------------------------------------
# The tensors of collated items, each in its own memory, by which the trace distinguishes them.


def tensors_of(item: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields all tensors of an item, including those of objects of unknown classes."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (*PLAIN, np.ndarray, type)) or depth == _DEEPEST:
        return
    else:
        parts: Any = ()
        if isinstance(item, (dict, UserDict)):
            parts = item.values()
        elif isinstance(item, (list, tuple)):
            parts = item
        elif isinstance(getattr(item, "__dict__", None), dict):
            parts = list(vars(item).values())
        for part in parts:
            yield from tensors_of(part, depth + 1)


def rebuilt(
    item: Any, of_leaf: Callable[[Any], Any], *, fresh: bool = False, depth: int = 0
) -> Any:
    """Rebuilds an item of other leaves. Containers in which nothing changes are the same objects.

    Args:
        of_leaf: replaces a tensor, an array or any other value that is not opened.
        fresh: all lists and dicts are copies.
    """

    def other(part: Any) -> Any:
        return rebuilt(part, of_leaf, fresh=fresh, depth=depth + 1)

    if depth == _DEEPEST or isinstance(item, (Tensor, *PLAIN)):
        return of_leaf(item)
    try:
        return _rebuilt(item, other, of_leaf, fresh)
    except Exception:  # a user's class with another constructor than its base
        return of_leaf(item)


def _rebuilt(
    item: Any, other: Callable[[Any], Any], of_leaf: Callable[[Any], Any], fresh: bool
) -> Any:
    if isinstance(item, (dict, UserDict)):
        parts = {key: other(part) for key, part in item.items()}
        if not fresh and all(parts[key] is part for key, part in item.items()):
            return item
        made: Any = copy.copy(item)
        for key, part in parts.items():
            made[key] = part
        return made
    if isinstance(item, (list, tuple)):
        several = [other(part) for part in item]
        same = all(a is b for a, b in zip(several, item, strict=True))
        if same and not (fresh and isinstance(item, list)):
            return item
        if type(item) in (list, tuple):
            return type(item)(several)
        if hasattr(item, "_fields"):
            return type(item)(*several)
        if isinstance(item, list):
            made = copy.copy(item)
            made[:] = several
            return made
        return type(item)(several)
    if is_dataclass(item) and not isinstance(item, type):
        of_fields = {f.name: getattr(item, f.name) for f in fields(item) if hasattr(item, f.name)}
        made = {name: other(part) for name, part in of_fields.items()}
        if not fresh and all(made[name] is part for name, part in of_fields.items()):
            return item
        again = copy.copy(item)
        for name, part in made.items():
            object.__setattr__(again, name, part)  # a frozen one, too
        return again
    return of_leaf(item)


def copied(leaf: Any) -> Any:
    """Copies a leaf into its own memory, if it has memory."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def seeded(tracer: Tracer, items: list[Any]) -> tuple[list[Any], bool]:
    """Records in a tracer which sample each tensor belongs to.

    A tensor that does not share its memory stays the same object. Any other becomes an alias of the same
    memory that the tracer treats as separate. A tensor that all items hold belongs to no sample.

    Returns:
        The items, and whether all their tensors are followed.
    """
    held = [[x for x in tensors_of(item) if x.numel()] for item in items]
    users = Counter(memory for mine in held for memory in {_memory(x) for x in mine})
    regions = Counter(region for mine in held for region in {_region(x) for x in mine})
    common = {r for r, count in regions.items() if count == len(items) > 1}
    tracer.memory.samples = len(items)
    whole = True

    def follow(x: Any, *, sample: int) -> Any:
        nonlocal whole
        if not isinstance(x, Tensor) or not x.numel() or _region(x) in common:
            return x
        memory = _memory(x)
        if memory is None:
            whole = False
            return x
        alone = users[memory] == 1 and x.numel() * x.element_size() == x.untyped_storage().nbytes()
        own = x if alone else elsewhere(x)
        tracer.seed_all(own, sample)
        return own

    made = []
    for sample, item in enumerate(items):
        made.append(rebuilt(item, partial(follow, sample=sample)))
    for sample, (item, mine) in enumerate(zip(made, held, strict=True)):
        if mine:
            for x in tensors_of(item):  # in objects that are not rebuilt
                if x.numel() and _region(x) not in common and tracer.memory.record(x) is None:
                    alone = users[_memory(x)] == 1  # type: ignore[index]
                    if alone and x.numel() * x.element_size() == x.untyped_storage().nbytes():
                        tracer.seed_all(x, sample)
                    else:
                        whole = False
    return made, whole


def elsewhere(x: Tensor) -> Tensor:
    """Aliases a tensor, with its type and attributes, in what torch treats as another memory."""
    plain = x.detach().as_subclass(Tensor)
    try:
        with Native():
            made = from_dlpack(to_dlpack(plain))
    except Exception:  # a type that DLPack does not know
        made = plain.clone(memory_format=torch.preserve_format)
    if type(x) is not Tensor:
        made = made.as_subclass(type(x))
        made.__dict__.update(x.__dict__)
    return made.requires_grad_() if x.requires_grad else made


def _memory(x: Tensor) -> int | None:
    """Identifies a tensor's memory. None if it has no single one (sparse, nested)."""
    try:
        return None if x.layout is not torch.strided else memory_of(x)
    except (NotImplementedError, RuntimeError):
        return None


def _region(x: Tensor) -> Any:
    if _memory(x) is None:
        return id(x)
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


# -------------------------------------------------------------------------------------------------
# A traced call of a collate function, which finds the sample that every entry comes from.


_CALLS = 64
"""Number of calls that share one tracer."""


class CollateTrace:
    """Traces the calls of collate functions, in this process and thread.

    Attributes:
        root: the last batch, each leaf with its sample attribution.
        read: values have left torch, or memory was written unseen.
    """

    def __init__(self) -> None:
        self._tracer, self._calls = _Tracer(), 0
        self.root: Node | None = None
        self.read = False

    def call(self, collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        """Calls the function on the items and returns its batch."""
        if self._calls == _CALLS:
            self._tracer, self._calls = _Tracer(), 0
        self._calls += 1
        tracer = self._tracer
        tracer.memory, tracer.report, tracer.makers = Memory(tracer.shadows), Report(), {}
        followed, whole = seeded(tracer, items)
        tracer.enter()
        try:
            with _Composites(tracer):
                batch = collate(followed)
        finally:
            tracer.leave()
        self.root = opened(batch)
        self.read = bool(tracer.report.reads) or not whole
        for leaf in leaves(self.root):
            if isinstance(leaf.value, Tensor):
                shadow = tracer.shadow_of(leaf.value)
                sample = shadow.sample
                if shadow.factor is not None:  # a divisor common to all samples, such as their norm
                    sample = at.everywhere(at.SEVERAL, leaf.value.dim())
                if sample is not None and bool((sample == at.UNSEEN).any()):
                    self.read = True
                    sample = sample.masked_fill(sample == at.UNSEEN, at.NONE)
                leaf.attribute(sample)
        return batch

    def cause(self, x: Any) -> Cause | None:
        """Returns the operation that joined samples in a tensor, or put several into it."""
        if not isinstance(x, Tensor):
            return None
        found = self._tracer.memory.cause(x)
        if isinstance(found, Cause):
            return found
        record = self._tracer.memory.record(x)
        return None if record is None else self._tracer.makers.get(record.reference.cdata)

    def is_guessed(self, cause: Cause | None) -> bool:
        """Whether the operation has no rule and is assumed to join samples."""
        return cause is not None and cause.operation in self._tracer.report.probed


class _Tracer(Tracer):
    """The tracer of a step, except that all other tensors are constants, whatever their length."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: dict[int, Cause] = {}
        """Last operation that put several samples into each memory."""

    def _samples_axis(self, *_: Any) -> None:
        return None

    def _put(
        self, kind: Kind, outs: list[Tensor], found: list[Shadow], cause: object | None,
        tensors: list[Tensor],
    ) -> None:  # fmt: skip
        super()._put(kind, outs, found, cause, tensors)
        if kind.aliases or not any(s.held and (s.mixed or s.sample.numel() > 1) for s in found):  # type: ignore[union-attr]
            return
        made = Cause(kind.base, self.lines.current())
        for x in outs:
            if (record := self.memory.record(x)) is not None:
                self.makers[record.reference.cdata] = made

    def padded(self, sequences: Any, made: Tensor, **options: Any) -> None:
        """Attributes padded sequences at once, instead of one operation per sequence."""
        shadows = [self.shadow_of(x) for x in sequences]
        if not any(s.held for s in shadows):
            return
        with Undispatched():
            pairs = zip(sequences, shadows, strict=True)
            samples = [at.expanded(s.sample, x.shape) for x, s in pairs]
            found = pad_sequences(samples, padding_value=at.NONE, **options)
            self.memory.write(made, self.made(at.compressed(found)))
        record = self.memory.record(made)
        assert record is not None
        self.makers[record.reference.cdata] = Cause("pad_sequence", self.lines.current())


class _Composites(TorchFunctionMode):
    """Attributes the results of functions that consist of many operations."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not pad_sequences or self.tracer.stopped:
            return function(*args, **kwargs)
        return self._pad(*args, **kwargs)

    def _pad(
        self, sequences: Any, batch_first: bool = False, padding_value: float = 0.0,
        padding_side: str = "right",
    ) -> Tensor:  # fmt: skip
        options = {"batch_first": batch_first, "padding_side": padding_side}
        with Undispatched():
            made: Tensor = pad_sequences(sequences, padding_value=padding_value, **options)
        self.tracer.padded(sequences, made, **options)
        return made

"""What a collated batch must be: every position of its batch axis holds one sample, and each sample one.

The law needs the attribution of each entry (`fastclip.trace.attribution`), whoever has found it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fastclip.trace import attribution as at

PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic)
"""Values that are not opened."""
_DEEPEST = 16


@dataclass(eq=False)
class Leaf:
    """A tensor of a batch, or plain values in a list, or one of them.

    Args:
        path: where it is in the batch. value: it, or what it is made of. packed: the sequences whose
            data it is.
        sample: the attribution of its entries; None: of no sample, or not known.
    """

    path: str
    value: Any
    packed: PackedSequence | None = None
    sample: at.Attribution = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes; of packed sequences the padded ones, [b, t, ...]."""
        if self.packed is not None:
            sizes = self.packed.batch_sizes
            return (int(sizes[0]), len(sizes), *self.packed.data.shape[1:])
        if isinstance(self.value, Tensor):
            return tuple(self.value.shape)
        return (len(self.value),) if isinstance(self.value, list) else ()

    def attribute(self, sample: at.Attribution) -> None:
        """Take the attribution of `value`."""
        if sample is None or not sample.numel() or bool((sample == at.NONE).all()):
            self.sample = None
            return
        if self.packed is not None:
            spread = at.expanded(sample, self.packed.data.shape).contiguous()
            sample = padded(self.packed._replace(data=spread), at.NONE)
        self.sample = sample


@dataclass(eq=False)
class Branch:
    """Parts of a batch. Attributes: listed, they are entries of a list, which may be the batch axis."""

    parts: list[Leaf | Branch]
    listed: bool = False


Node = Leaf | Branch


def padded(packed: PackedSequence, value: float = 0.0) -> Tensor:
    """[b, t, ...] of packed sequences."""
    return pad_packed_sequence(packed, batch_first=True, padding_value=value)[0]


def opened(batch: Any, path: str = "batch", depth: int = 0) -> Node:
    """The leaves of a batch, nested as it is. Objects of other classes show their public attributes."""
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
    """All, in order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


# The law


@dataclass(frozen=True)
class Fault:
    """How a batch breaks the law.

    Args:
        kind: "repeats", "mixes", "axis" (samples lie along axis 1 alone), "order" or "views" (adjacent
            positions that should be of one sample hold several).
        samples: numbers of those that are concerned, as they were drawn. leaf: where it shows.
    """

    kind: str
    samples: tuple[int, ...]
    leaf: Leaf


class Law:
    """Whether a batch may be trained on.

    Args:
        samples: how many were collated. batch_first: they lie along axis 0; else along axis 0 or 1.
        ordered: position i must hold sample i.
        views: so many adjacent positions may hold each sample.
    """

    def __init__(
        self, samples: int, *, batch_first: bool = True, ordered: bool = False, views: int = 1
    ) -> None:
        self.samples, self.ordered, self.views = samples, ordered, views
        self.axes = (0,) if batch_first else (0, 1)

    def fault(self, root: Node) -> Fault | None:
        """The first way in which a batch breaks the law; None: it keeps it."""
        self._sizes = {n for leaf in leaves(root) for n in leaf.shape}
        self._placed: dict[int, dict[int, int]] = {}
        return self._of(root)

    def is_followed(self, root: Node) -> bool:
        """Whether every position of every tensor is known to be of some sample."""
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
        """The sample of each entry of a list, if no two have one."""
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
        """The sample of each run of views, if the axis holds views."""
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
        """Which sample lies at each place of an axis."""
        assert leaf.sample is not None
        others = [a for a in range(len(leaf.shape)) if a != axis]
        held = leaf.sample.masked_fill(leaf.sample == at.UNSEEN, at.NONE)
        found = at.reduced(held, others)
        assert found is not None
        return found.reshape(-1).expand(leaf.shape[axis])

    def _place(self, one: dict[int, int], length: int, leaf: Leaf) -> Fault | None:
        """Tensors of one length hold each sample at one place."""
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
    """Text, or a number that the sizes of the batch say, too."""
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

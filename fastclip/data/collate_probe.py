"""Probe of a collate function by values, which changes some items and sees which entries change.

For every bit of an item's number the function runs once with that half of the items changed, and once
with the other half. An entry that changes in one half of every pair has the bits of its item's number.
An entry that changes in both depends on several items. The law of `collate_law` is then applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.data.collate_items import Repeatable, alike_items, changed_items
from fastclip.data.collate_law import (
    Branch,
    Fault,
    Law,
    Leaf,
    Node,
    copied,
    is_size,
    leaves,
    opened,
    padded,
    rebuilt,
)
from fastclip.trace import attribution as at

_TRIALS = 2
_SEEDS = 7
_OWN, _CHANCE = 0.5, 0.4
"""Part of a position's changing entries that its own sample changes at least, and others at most."""
_FEW = 64
_LARGEST = 2**20
"""Number of entries of a leaf that are compared."""


class _UnlikeError(Exception):
    """Two batches have different structures and cannot be compared entry by entry."""


class Probe:
    """A probe of a collate function with some items.

    Args:
        collate: the function.
        items: at least one item. The function may change them.
        spare: items of other batches.
        law: the law for this batch.
        function: the function with its random state.
        back: restores that state to the start.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], items: Sequence[Any], spare: Sequence[Any],
        law: Law, function: Repeatable, back: Callable[[], None],
    ) -> None:  # fmt: skip
        self.collate, self.items, self.law = collate, list(items), law
        self.changes = [changed_items(self.items, spare, trial) for trial in range(_TRIALS)]
        self.function, self.back = function, back
        self.decided = False
        """Whether some entry was seen to depend on a sample."""

    def fault(self) -> Fault | None:
        """Returns how the batch of these items breaks the law. None: it keeps it, as far as values show.

        Raises:
            Exception: whatever the function raises for its own items, or for changed ones.
        """
        base = self._made(self.items)
        steady = _equal(base, self._made(self.items))
        if not steady:
            return _unknown(base) if self._by_seeds() else None
        try:
            found = self._by_values(base)
        except Exception:  # impossible content: that of another item, unchanged
            self.changes = [[*self.items[1:], self.items[0]]] * _TRIALS
            found = self._by_values(base)
        if found is None or _equal(base, self._made(self.items, seed=1)):
            return found
        return found if self._by_seeds() else None

    def _by_values(self, base: Node) -> Fault | None:
        """Probes with the same random numbers for all content."""
        try:
            found = self._by_entries(base)
        except _UnlikeError:
            found = Fault("repeats", (), next(leaves(base)))
        if found is None or self.law.ordered:
            return found
        if self._by_rows(base):
            return None
        whole = found.kind == "mixes" and _rows(base, self.law) == len(self.items)
        if whole and repeated_samples(base, self.law) > alike_items(self.items):
            return Fault("repeats", (), found.leaf)
        return found

    def _made(self, items: list[Any], seed: int | None = None) -> Node:
        """Makes the batch with the same random numbers in every call, or with those of a seed."""
        self.back()
        if seed is not None:
            self.function.seed(seed)
        root = opened(self.collate([rebuilt(item, copied, fresh=True) for item in items]))
        for leaf in leaves(root):
            leaf.value = _thinned(leaf.value)
        return root

    def _changed(self, which: list[int], trial: int) -> list[Any] | None:
        """Returns the items, some of them changed. None if none is."""
        other = self.changes[trial]
        here = {i for i in which if other[i] is not None}
        if not here:
            return None
        return [other[i] if i in here else item for i, item in enumerate(self.items)]

    def _halves(self) -> Iterator[tuple[int, int, list[int]]]:
        for bit in range(max(1, (len(self.items) - 1).bit_length())):
            for side in (1, 0):
                yield bit, side, [i for i in range(len(self.items)) if (i >> bit & 1) == side]

    # Entry by entry

    def _by_entries(self, base: Node) -> Fault | None:
        """Applies the law, if the positions of items do not depend on their content."""
        first = list(leaves(base))
        hits = [_Hits(leaf.shape) for leaf in first]
        for bit, side, which in self._halves():
            moved = [torch.zeros(leaf.shape, dtype=torch.bool, device="cpu") for leaf in first]
            for trial in range(_TRIALS):
                items = self._changed(which, trial)
                if items is not None:
                    now = self._like(base, items)
                    for hit, seen, x, y in zip(hits, moved, first, now, strict=True):
                        changed, blind = _compared(x, y, self.law.axes)
                        seen |= changed
                        hit.cannot_say(blind)
            for hit, seen in zip(hits, moved, strict=True):
                hit.note(bit, side, seen)
        return self._judged(base, first, [hit.found() for hit in hits])

    def _judged(self, base: Node, first: list[Leaf], found: list[Tensor]) -> Fault | None:
        for leaf, sample in zip(first, found, strict=True):
            leaf.sample = sample if bool((sample != at.NONE).any()) else None
            self.decided |= leaf.sample is not None
        return self.law.fault(base)

    def _like(self, base: Node, items: list[Any]) -> list[Leaf]:
        now = self._made(items)
        if not _alike(base, now):
            raise _UnlikeError
        return list(leaves(now))

    # Sample by sample

    def _by_rows(self, base: Node) -> bool:
        """Whether an item changes one sample at most, at any position, and each sample has one item.

        This holds if the order depends on the content of items, or if some are left out.
        """
        size = _rows(base, self.law)
        taken: Counter[Any] = Counter()
        seen = False
        whole = Counter(_contents(base, size, self.law)[0])
        for i in range(len(self.items)):
            changed = False
            for trial in range(_TRIALS):
                items = self._changed([i], trial)
                if items is None:
                    continue
                try:
                    now = self._made(items)
                except Exception:  # an impossible item
                    continue
                gone, new, rest = _differences(base, now, size, self.law)
                if gone.total() > 1 or new.total() > 1 or rest:
                    return False
                if (gone or new) and not changed:
                    seen = changed = True
                    taken.update(gone)
        self.decided |= seen
        return seen and all(taken[sample] <= whole[sample] for sample in taken)

    # Over many random numbers

    def _by_seeds(self) -> Fault | None:
        """Applies the law by how often entries change, if random numbers depend on the items.

        An item on which another one's random numbers depend (a mask of 15 percent) changes few of its
        entries. An item that is mixed in, or that replaces it in half of the calls, changes half.
        """
        base = self._made(self.items)
        size, first = _rows(base, self.law), list(leaves(base))
        if repeated_samples(base, self.law) > alike_items(self.items):
            return _unknown(base)
        axes = [_axis(leaf, size, self.law) for leaf in first]
        shares = [_Shares(1 if axis is None else size) for axis in axes]
        for seed in range(_SEEDS):
            now = self._made(self.items, seed=seed)
            for share in shares:
                share.next_seed()
            for bit, side, which in self._halves():
                items = self._changed(which, 0)
                other = now if items is None else self._made(items, seed=seed)
                if not (_alike(base, now) and _alike(now, other)) or _rows(now, self.law) != size:
                    return _unknown(base)
                for share, axis, x, y in zip(shares, axes, leaves(now), leaves(other), strict=True):
                    seen = _moved(x, y, self.law.axes)
                    share.note(
                        bit, side, seen.reshape(1, -1) if axis is None else _by_row(seen, axis)
                    )
        samples = [
            share.found().reshape([-1 if k == axis else 1 for k in range(len(leaf.shape))])
            for share, axis, leaf in zip(shares, axes, first, strict=True)
        ]
        found = self._judged(base, first, samples)
        known = any(
            leaf.sample is not None
            and leaf.sample.numel() == size
            and bool((leaf.sample >= 0).all())
            for leaf in first
        )
        return found or (None if known else _unknown(base))


def _unknown(root: Node) -> Fault:
    """Returns the fault of a batch about which nothing is known."""
    return Fault("unknown", (), next(leaves(root), Leaf("batch", None)))


class _Hits:
    """The entries of a leaf that changed in each run."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.number = torch.zeros(shape, dtype=at.KIND, device="cpu")
        self.moved = torch.zeros(shape, dtype=torch.bool, device="cpu")
        self.several = torch.zeros(shape, dtype=torch.bool, device="cpu")
        self.blind = torch.zeros(shape, dtype=torch.bool, device="cpu")
        self._one: Tensor | None = None

    def cannot_say(self, blind: Tensor | None) -> None:
        """Excludes entries that could not be compared in some run."""
        if blind is not None:
            self.blind |= blind

    def note(self, bit: int, side: int, seen: Tensor) -> None:
        """Notes the entries that changed. Side 1 of a bit comes first, then side 0."""
        if side:
            self._one = seen
            self.number |= seen.to(at.KIND) << bit
        else:
            assert self._one is not None
            self.several |= seen & self._one
        self.moved |= seen

    def found(self) -> Tensor:
        found = self.number.masked_fill(self.several, at.SEVERAL)
        return found.masked_fill(~self.moved | self.blind, at.NONE)


class _Shares:
    """The number of entries of each position of an axis that changed in each run, over several seeds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._counts: dict[tuple[int, int], Tensor] = {}
        self._live = torch.zeros(size, dtype=torch.float64, device="cpu")
        self._any: Tensor | None = None

    def next_seed(self) -> None:
        if self._any is not None:
            self._live += self._any.double().sum(1)
        self._any = None

    def note(self, bit: int, side: int, seen: Tensor) -> None:
        """Notes the entries that changed.

        Args:
            seen: bool [size, entries].
        """
        self._any = seen if self._any is None else self._any | seen
        before = self._counts.get((bit, side), 0.0)
        self._counts[bit, side] = before + seen.double().sum(1)

    def found(self) -> Tensor:
        self.next_seed()
        top = torch.stack(list(self._counts.values())).amax(0)
        number = torch.zeros(self.size, dtype=at.KIND, device="cpu")
        several = torch.zeros(self.size, dtype=torch.bool, device="cpu")
        for bit in {bit for bit, _ in self._counts}:
            one, zero = self._counts[bit, 1], self._counts[bit, 0]
            several |= torch.minimum(one, zero) > _CHANCE * top
            number |= (one > zero).to(at.KIND) << bit
        unknown = (top < _OWN * self._live) | (top == 0)
        return number.masked_fill(several, at.SEVERAL).masked_fill(unknown, at.NONE)


def _by_row(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x.reshape(-1, 1)


# Two batches


def _thinned(x: Any) -> Any:
    """Thins a large tensor evenly, except along its first two axes."""
    if not isinstance(x, Tensor) or x.numel() <= _LARGEST or x.layout is not torch.strided:
        return x
    x = x.flatten(2) if x.dim() > 2 else x
    return x[..., :: -(-x.numel() // _LARGEST)]


def _values(leaf: Leaf) -> Any:
    """Returns the content of a leaf, as a dense tensor on the CPU, a list, or one value."""
    if leaf.packed is not None:
        return padded(leaf.packed).detach().cpu()
    x = leaf.value
    if isinstance(x, Tensor):
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x
        return x.as_subclass(Tensor).cpu()
    return x


def _alike(a: Node, b: Node, *, exactly: bool = False) -> bool:
    """Whether two batches have the same structure and lengths of lists.

    Args:
        exactly: also the same shapes.
    """
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        if len(a.shape) != len(b.shape) or isinstance(a.value, Tensor) != isinstance(
            b.value, Tensor
        ):
            return False
        return a.shape == b.shape or not (exactly or isinstance(a.value, list))
    if isinstance(a, Branch) and isinstance(b, Branch):
        return len(a.parts) == len(b.parts) and all(
            _alike(x, y, exactly=exactly) for x, y in zip(a.parts, b.parts, strict=True)
        )
    return False


def _equal(a: Node, b: Node) -> bool:
    if not _alike(a, b, exactly=True):
        return False
    pairs = zip(leaves(a), leaves(b), strict=True)
    return not any(bool(_moved(x, y, ()).any()) for x, y in pairs)


def _moved(a: Leaf, b: Leaf, axes: Sequence[int]) -> Tensor:
    """Returns which entries of `a` differ in `b`, bool [shape of a]."""
    return _compared(a, b, axes)[0]


def _compared(a: Leaf, b: Leaf, axes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Returns which entries of `a` differ in `b`, and which have no counterpart, bool [shape of a].

    If one is longer (padding), their common part is compared, from the start or from the end.

    Raises:
        _UnlikeError: the number of samples differs.
    """
    x, y = _values(a), _values(b)
    if isinstance(x, list):
        pairs = zip(x, y, strict=True)
        found = [_unequal(p, q) for p, q in pairs]
        return torch.tensor(found, dtype=torch.bool, device="cpu").reshape(len(x)), None
    if not isinstance(x, Tensor):
        return torch.tensor(_unequal(x, y), dtype=torch.bool, device="cpu"), None
    if x.shape == y.shape:
        return _differ(x, y), None
    if axes and x.dim() and all(x.shape[k] != y.shape[k] for k in axes if k < x.dim()):
        raise _UnlikeError
    both = []
    for front in (True, False):
        seen = torch.zeros(x.shape, dtype=torch.bool, device="cpu")
        blind = torch.ones(x.shape, dtype=torch.bool, device="cpu")
        _cut(seen, y, front).copy_(_differ(_cut(x, y, front), _cut(y, x, front)))
        _cut(blind, y, front).fill_(False)
        both.append((seen, blind))
    return min(both, key=lambda each: int(each[0].sum()))


def _cut(x: Tensor, other: Tensor, front: bool) -> Tensor:
    """Cuts a tensor to the length of another one."""
    for axis, (n, m) in enumerate(zip(x.shape, other.shape, strict=True)):
        if n > m:
            x = x.narrow(axis, 0 if front else n - m, m)
    return x


def _differ(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        return torch.ones(x.shape, dtype=torch.bool, device="cpu")
    different = x != y
    if x.is_floating_point() or x.is_complex():
        different &= ~(x.isnan() & y.isnan())
    return different


def _unequal(x: Any, y: Any) -> bool:
    try:
        return not (x is y or bool(x == y) or (x != x and y != y))
    except Exception:  # classes of the user's own
        return True


# Samples


def _rows(root: Node, law: Law) -> int:
    """Number of positions of the batch axis."""
    found = list(_lengths(root, law))
    if law.samples in found or not found:
        return law.samples
    return Counter(found).most_common(1)[0][0]


def _lengths(root: Node, law: Law) -> Iterator[int]:
    if isinstance(root, Branch):
        if root.listed:
            yield len(root.parts)
        for part in root.parts:
            yield from _lengths(part, law)
    else:
        yield from (root.shape[axis] for axis in law.axes if axis < len(root.shape))


def _contents(
    root: Node,
    size: int,
    law: Law,
    limits: Sequence[tuple[int, ...] | None] = (),
    front: bool = True,
    most: int | None = None,
) -> tuple[list[Any], list[Leaf]]:
    """Returns the content of each sample, and the leaves that belong to no sample.

    Args:
        limits: the part of each leaf that counts, from the front or from the end.
        most: number of entries of a sample that suffice.
    """
    samples: list[list[Any]] = [[] for _ in range(size)]
    rest: list[Leaf] = []
    limit = {id(x): n for x, n in zip(leaves(root), limits, strict=True)} if limits else {}

    def collect(node: Node) -> None:
        if isinstance(node, Branch):
            if node.listed and len(node.parts) == size and not _all_of_samples(node, size, law):
                for sample, part in zip(samples, node.parts, strict=True):
                    sample.extend(_content(_values(leaf)) for leaf in leaves(part))
            else:
                for part in node.parts:
                    collect(part)
            return
        axis, value = _axis(node, size, law), _values(node)
        if axis is None:
            rest.append(node)
        elif isinstance(value, list):
            for sample, x in zip(samples, value, strict=True):
                sample.append(x if x == x else "nan")
        else:
            for k, n in enumerate(limit.get(id(node)) or ()):
                if k != axis and value.shape[k] > n:
                    value = value.narrow(k, 0 if front else value.shape[k] - n, n)
            for sample, x in zip(samples, value.unbind(axis), strict=True):
                sample.append(_content(x, most))

    collect(root)
    return [tuple(sample) for sample in samples], rest


def _all_of_samples(node: Branch, size: int, law: Law) -> bool:
    return all(_axis(leaf, size, law) is not None for leaf in leaves(node))


def _axis(leaf: Leaf, size: int, law: Law) -> int | None:
    return next((a for a in law.axes if a < len(leaf.shape) and leaf.shape[a] == size), None)


def _content(value: Any, most: int | None = None) -> Any:
    if isinstance(value, Tensor):
        if most is not None and value.numel() > most:
            value = value.reshape(-1)[:: value.numel() // most]
        value = value.contiguous()
        return tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(map(str, value)) if isinstance(value, list) else str(value)


def _differences(a: Node, b: Node, size: int, law: Law) -> tuple[Counter[Any], Counter[Any], bool]:
    """Returns the samples that only `a` has, those that only `b` has, and whether the rest changed."""
    first, second = list(leaves(a)), list(leaves(b))
    limits: list[tuple[int, ...] | None] = []
    if len(first) == len(second):
        limits = [
            tuple(map(min, x.shape, y.shape)) if len(x.shape) == len(y.shape) else None
            for x, y in zip(first, second, strict=True)
        ]
    best: tuple[Counter[Any], Counter[Any], bool] | None = None
    for front in (True, False):
        mine, rest = _contents(a, size, law, limits, front)
        theirs, other = _contents(b, _rows(b, law), law, limits, front)
        before, after = Counter(mine), Counter(theirs)
        found = before - after, after - before, _rest_differs(rest, other, a, b)
        if best is None or found[0].total() < best[0].total():
            best = found
    assert best is not None
    return best


def _rest_differs(mine: list[Leaf], theirs: list[Leaf], a: Node, b: Node) -> bool:
    """Whether the leaves of no sample changed, except for text and for numbers that are sizes."""
    if len(mine) != len(theirs):
        return True
    sizes = [{n for leaf in leaves(root) for n in leaf.shape} for root in (a, b)]
    for x, y in zip(mine, theirs, strict=True):
        if isinstance(x.value, list) and isinstance(y.value, list):
            if any(map(_unequal, x.value, y.value)):
                return True
        elif isinstance(x.value, Tensor) and x.shape and isinstance(y.value, Tensor):
            if x.shape == y.shape and bool(_moved(x, y, ()).any()):
                return True
        elif _unequal(_values(x), _values(y)):
            of_sizes = all(
                is_size(leaf.value, known) for leaf, known in zip((x, y), sizes, strict=True)
            )
            if not of_sizes:
                return True
    return False


def repeated_samples(root: Node, law: Law) -> int:
    """Number of samples of a batch that are equal to another one."""
    size = _rows(root, law)
    for most in (_FEW, None):  # few entries often show that samples differ
        samples, _ = _contents(root, size, law, most=most)
        alike = len(samples) - len(set(samples)) if any(samples) else 0
        if not alike:
            return 0
    return alike

"""The few samples of a call's inputs in a dry run, and changes of the other samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip.core.torch_names import TreeSpec
from fastclip.errors import BatchSizeError
from fastclip.samples.inputs import (
    INPUT,
    NESTED,
    Cuts,
    Drawn,
    Way,
    another_sample,
    batch_sizes_of,
    flatten_inputs,
    is_array,
    is_batched,
    is_list,
    join_samples,
    readings,
    rebuild,
    rows_of,
    same,
    samples_differ,
    shorter,
    take_samples,
    tensors_of,
    way_of,
    ways_to_cut,
)
from fastclip.samples.state import is_object

MOST_SAMPLES = 8
_LOOKED_AT = 64
"""Number of samples of a batch that are searched for distinct ones."""


class TakenSamples:
    """Inputs that are cut to few samples.

    Args:
        args, kwargs: the inputs of the call. drawn: gives likely numbers of samples.
    """

    def __init__(self, args: tuple, kwargs: dict, drawn: Drawn = tuple) -> None:
        self.args, self.kwargs, self.drawn = args, kwargs, drawn
        self._leaves, self._structure = flatten_inputs(args, kwargs)
        self._cuts: Cuts = ()
        self._pool: list[Any] = []

    @property
    def way(self) -> Way:
        """The nesting and the types of the inputs."""
        return way_of(self._leaves, self._structure)

    def ways(self, axis: int, known: Callable[[Way], Cuts | None], most: int) -> Iterator[Cuts]:
        """Ways to cut them, likely ones first, at most so many for each reading. Each way sets the
        reading until the next one is asked for.

        Args:
            axis: of the samples. known: results of other calls, in which a shared input may have had
                another size than the batch.
        """
        likely = self.drawn()
        sizes = sorted(batch_sizes_of(self.args, self.kwargs, axis), key=lambda n: n not in likely)
        for leaves, structure, size in self._readings(axis):
            if any(map(_is_empty, leaves)):
                continue
            self._leaves, self._structure = leaves, structure
            cuts = known(self.way)
            held = {
                rows_of(x, a) for x, a in zip(leaves, cuts or (), strict=False) if a is not None
            }
            if (
                cuts is not None
                and len(held) == 1
                and held <= ({*sizes} if size is None else {size})
            ):
                yield cuts
            ways = ways_to_cut(leaves, sizes if size is None else [size], axis)
            other = size not in likely and any(n in likely for n in sizes)
            yield from islice((x for x in ways if not (other and self.in_lists(x))), most)

    def _readings(self, axis: int) -> Iterator[tuple[list[Any], TreeSpec, int | None]]:
        return readings(self.args, self.kwargs, axis, self.drawn)

    def read_as(self, way: Way, axis: int) -> None:
        """Read them this way again."""
        for leaves, structure, _ in self._readings(axis):
            if way_of(leaves, structure) == way:
                self._leaves, self._structure = leaves, structure

    def has_none(self, axis: int) -> bool:
        """Whether the sampled batch is empty and has empty lists, from which no sample can be made."""
        return (
            0 in self.drawn()
            and batch_sizes_of(self.args, self.kwargs, axis) == [0]
            and any(map(_is_empty, flatten_inputs(self.args, self.kwargs, 0)[0]))
        )

    def cut(self, cuts: Cuts, real: list[int] | None = None, synthetic: bool = False) -> int:
        """Take samples from the inputs cut this way; returns how many there are to choose from.

        Args:
            real: numbers of the samples that may be run; one (or a sample of zeros) if None.
            synthetic: add a sample made of the first one's values in another order.
        """
        self._cuts = cuts
        real = real or [0]
        self._pool = [
            leaf if axis is None else take_samples(leaf, axis, real)
            for leaf, axis in zip(self._leaves, cuts, strict=True)
        ]
        if synthetic:
            self._pool = [
                leaf if axis is None else join_samples(leaf, another_sample(leaf, axis), axis)
                for leaf, axis in zip(self._pool, cuts, strict=True)
            ]
        return len(real) + synthetic

    def in_lists(self, cuts: Cuts) -> bool:
        """Whether, cut this way, only lists of tensors hold the samples, one in each entry."""
        cut = [x for x, a in zip(self._leaves, cuts, strict=True) if a is not None]
        return all(is_list(x) and next(tensors_of(x), None) is not None for x in cut)

    @property
    def has_lists(self) -> bool:
        """Whether samples come in a list or an array."""
        pairs = zip(self._leaves, self._cuts, strict=True)
        return any(a is not None and is_batched(x) for x, a in pairs)

    def is_changed_by(self, change: Callable[[Any, int], Any]) -> bool:
        """Whether `change` changes the samples that are run."""
        pairs = zip(self._pool, self._cuts, strict=True)
        return any(a is not None and not same(change(x, a), x) for x, a in pairs)

    def check_unnested(self) -> None:
        """Check that no input is a nested tensor, which has no batch axis.

        Raises:
            BatchSizeError: an input is a nested tensor.
        """
        for number, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor) and leaf.is_nested:
                name = f"{INPUT.capitalize()}{number}"
                raise BatchSizeError(f"{name}: {NESTED}", doc="unsupported-layer")

    @property
    def unread(self) -> str:
        """For a message, the inputs from which no samples can be taken."""
        unread = []
        for x in self._leaves:
            if isinstance(x, Tensor) and x.layout != torch.strided:
                unread.append(f"a tensor of layout {x.layout}, which is not dense")
            elif is_object(x) and not isinstance(x, PackedSequence):
                kind = type(x).__name__
                unread.append(
                    f"an object of class {kind}, which is no dict or dataclass of tensors"
                )
        return f", and they hold {', '.join(dict.fromkeys(unread))}" if unread else ""

    @property
    def leaves(self) -> list[Any]:
        """The inputs, by number."""
        return self._leaves

    def distinct(self, cuts: Cuts, most: int = MOST_SAMPLES) -> list[int]:
        """Numbers of the first samples of the real inputs that differ from one another."""
        cut = [(x, a) for x, a in zip(self._leaves, cuts, strict=True) if a is not None]
        found: list[int] = []
        for i in range(min(self.rows(cuts), _LOOKED_AT)):
            if len(found) < most and all(samples_differ(cut, i, j) for j in found):
                found.append(i)
        return found

    def rows(self, cuts: Cuts) -> int:
        """Number of samples in the real inputs, cut this way."""
        found = (rows_of(x, a) for x, a in zip(self._leaves, cuts, strict=True) if a is not None)
        return next(samples for samples in found if samples is not None)


def _is_empty(leaf: Any) -> bool:
    return is_batched(leaf) and not len(leaf)


# -------------------------------------------------------------------------------------------------
# Changes of the other samples of a batch. They make edge samples, which a first batch may not have: very
# large values, zeros, full masks, padding; or non-finite values.


Change = Callable[[Tensor], Tensor]
"""Of samples along the first axis."""
_LARGE = 1e4


def _is_mask(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def _is_of_numbers(x: Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and not _is_mask(x)


def _large(x: Tensor) -> Tensor:
    """Whole numbers may be categories."""
    if not x.is_floating_point() or _is_mask(x):
        return x
    return torch.where(x == x.round(), x, x * _LARGE)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _full(x: Tensor) -> Tensor:
    """Masks that hide nothing."""
    return torch.ones_like(x) if x.numel() and _is_mask(x) and bool(x.any()) else x


def _half(x: Tensor) -> Tensor:
    """The second half of every sample is hidden, or zero."""
    x = x.clone()
    if x.dim() > 1:
        x[:, x.shape[1] // 2 :] = 0
    return x


def _nan(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan) if _is_of_numbers(x) else x


def _infinite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.inf) if _is_of_numbers(x) else x


def _shorter(x: Tensor) -> Tensor:
    """Make entries of lists and arrays shorter."""
    return x


SPECIAL: tuple[Change, ...] = (_large, _zeros, _full, _half)
IN_LISTS: tuple[Change, ...] = (*SPECIAL, _shorter)
"""The same if samples come in lists, perhaps of different lengths."""
NOT_FINITE: tuple[Change, ...] = (_nan, _infinite)


def of_others(change: Change, kept: Collection[int], x: Any, axis: int) -> Any:
    """An input with all samples changed except those that are kept."""
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x)
        padded = of_others(change, kept, padded, 1)
        return pack_padded_sequence(padded, lengths, enforce_sorted=False)
    if is_batched(x):
        if change is _shorter:
            return shorter(x, {*range(len(x))} - {*kept})
        if is_list(x):
            return type(x)(e if i in kept else _entry(change, e) for i, e in enumerate(x))
        with suppress(TypeError, ValueError):  # of objects, texts, bytes in another order
            return of_others(change, kept, torch.from_numpy(x.copy()), 0).numpy()
        return x
    if type(x) is not Tensor:
        return x
    index = torch.tensor([*kept], dtype=torch.int64, device=x.device)
    found = change(x.movedim(axis, 0)).movedim(0, axis)
    return found.index_copy(axis, index, x.index_select(axis, index))


def _entry(change: Change, entry: Any) -> Any:
    """One sample of a list, in which tensors, arrays and numbers are changed."""
    leaves, structure = flatten_inputs((entry,), {})
    found = [_leaf(change, x) for x in leaves]
    if all(x is y for x, y in zip(leaves, found, strict=True)):
        return entry
    return rebuild(found, structure)[0][0]


def _leaf(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf[None])[0]
    if isinstance(leaf, float):
        return float(change(torch.tensor([leaf], dtype=torch.float64, device="cpu")))
    if is_list(leaf) and all(isinstance(x, float) for x in leaf):
        return type(leaf)(_leaf(change, x) for x in leaf)
    if is_array(leaf):
        with suppress(TypeError, ValueError):
            return change(torch.from_numpy(leaf.copy())[None])[0].numpy()
    return leaf

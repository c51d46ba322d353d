"""A model's inputs: nested, in objects, as lists; and their possible batch axes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from itertools import product
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip.core.torch_names import (
    TreeSpec,
    coo_indices,
    coo_values,
    register_pytree_node,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from fastclip.errors import BatchSizeError

# -------------------------------------------------------------------------------------------------
# The memory of a tensor: a sparse tensor has none of its own, but consists of dense ones.


def parts_of(x: Tensor) -> list[Tensor]:
    """The dense tensors that hold the numbers of `x`; for a dense tensor, itself."""
    if x.layout == torch.strided:
        return [x]
    with torch.no_grad():
        if x.layout == torch.sparse_coo:
            return [coo_indices(x), coo_values(x)]
        if x.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [x.crow_indices(), x.col_indices(), x.values()]
        if x.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x]


# -------------------------------------------------------------------------------------------------
# Samples that come as a list, a tuple or an array of NumPy's: boxes of images, texts, lengths.
#
# Such an input has one entry per sample, of any kind. So it is cut by number, and its entries are not
# opened. Dry runs on a few samples show which list has as many entries as the batch by coincidence.


_PLAIN = (bool, int, float, str, bytes, type(None))
_HELD = (Tensor, list, tuple, dict)
_SHORT = 4
"""Plain values in a list that are settings (height and width); more of them are data."""


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array with an axis."""
    return type(value).__module__ == "numpy" and len(getattr(value, "shape", ())) > 0


def is_list(value: Any) -> bool:
    """Whether it is a list or a tuple, but not a named tuple."""
    return type(value) in (list, tuple)


def is_batched(value: Any) -> bool:
    """Whether it can be cut by number. Lists are leaves only if they hold samples, or data."""
    return is_list(value) or is_array(value)


def is_data(value: Any) -> bool:
    """Whether it is a list of plain values only, and longer than a setting."""
    long = is_list(value) and len(value) > _SHORT
    return long and all(type(x) in _PLAIN for x in value)


def take(value: Any, samples: list[int]) -> Any:
    """Copies of these entries, so in-place changes of one do not affect another."""
    if is_array(value):
        return value[samples]
    return type(value)(own(value[i]) for i in samples)


def join(first: Any, second: Any) -> Any:
    """The entries of one, then those of the other."""
    if is_array(first):
        return first[[*range(len(first)), *[0] * len(second)]]  # copies of the first
    return first + second


def differ(value: Any, i: int, j: int) -> bool:
    """Whether two entries are not the same."""
    return not same(value[i], value[j])


def same(one: Any, other: Any) -> bool:
    """Whether two inputs, or two samples of one, hold the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return one is other or (alike and bool(torch.equal(one, other)))
    if is_array(one):
        return one.shape == other.shape and bool((one == other).all())
    mine, structure = tree_flatten(one)
    others, theirs = tree_flatten(other)
    if structure != theirs:
        return False
    if len(mine) == 1 and mine[0] is one:
        return one is other or _equal(one, other)
    return all(map(same, mine, others))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # objects of tensors, for which == gives several values
        return False


def shorter(value: Any, which: set[int]) -> Any:
    """Make these entries shorter: numbers by 1, entries with a length by their last part."""
    if is_array(value):
        if value.dtype.kind not in "biu":
            return value
        value = value.copy()
        for i in which:
            value[i] = value[i] & 0 if value.dtype.kind == "b" else _less(value[i])
        return value
    return type(value)(_shorter(x) if i in which else x for i, x in enumerate(value))


def _less(value: Any) -> Any:
    return value - (value > 0)


def _shorter(sample: Any) -> Any:
    if isinstance(sample, bool):
        return False
    if isinstance(sample, int) or (isinstance(sample, float) and sample == 1.0):
        return max(sample - 1, 0)
    if isinstance(sample, (str, bytes)) or is_data(sample):
        return sample[:-1]
    leaves, structure = tree_flatten(sample)
    sizes = [len(x) for x in leaves if _is_long(x)]
    if not sizes:
        changed = [_shorter(x) if isinstance(x, (int, str)) else x for x in leaves]
        return tree_unflatten(changed, structure)
    return tree_unflatten(
        [x[:-1] if _is_long(x) and len(x) == sizes[0] else x for x in leaves], structure
    )


def _is_long(x: Any) -> bool:
    return is_array(x) or (isinstance(x, Tensor) and x.dim() > 0)


def own(sample: Any) -> Any:
    """A copy that shares no tensors and lists with the original."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if is_array(leaf):
            return leaf.copy()
        if not hasattr(leaf, "__dict__"):
            return leaf
        twin = copy.copy(leaf)
        held = {n: x for n, x in vars(leaf).items() if isinstance(x, _HELD) or is_array(x)}
        vars(twin).update({n: own(x) for n, x in held.items()})
        return twin

    return tree_map(of_leaf, sample)


# -------------------------------------------------------------------------------------------------
# Inputs in objects of a script's own classes: their fields are opened, and put into a bare object again.
#
# An object that was not opened would hold the numbers of the whole batch in every dry run.


_DEEPEST_OBJECT, _LONGEST = 5, 64
"""Depth and length up to which objects and containers inside an object are searched."""
_OTHERS = frozenset({"builtins", "functools", "torch", "numpy", "fastclip"})
"""Packages with objects that hold no samples, or must not be opened."""


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of an object by name, if there are tensors, arrays or lists among them; else None."""
    kind: Any = type(value)
    if kind.__module__.split(".")[0] in _OTHERS or isinstance(
        value, (Tensor, nn.Module, Enum, type)
    ):
        return None
    if callable(value) or not _can_be_made(kind) or not _holds(fields := _fields(value), 0):
        return None
    return fields


def bare(kind: Any) -> Any:
    """An object of this class that holds nothing."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class of Python's own (SimpleNamespace)
        return kind.__new__(kind)


@cache
def _can_be_made(kind: type) -> bool:
    try:
        bare(kind)
    except Exception:
        return False
    return True


@cache
def _slots(kind: type) -> tuple[str, ...]:
    found = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _fields(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def _holds(value: Any, depth: int) -> bool:
    """Whether there may be samples in it."""
    if isinstance(value, (Tensor, PackedSequence)) or is_array(value):
        return True
    if depth > _DEEPEST_OBJECT or isinstance(value, nn.Module):
        return False
    if isinstance(value, Mapping):
        return any(_holds(x, depth + 1) for x in [*value.values()][:_LONGEST])
    if is_list(value):
        several = len(value) > 1 and isinstance(value[0], (bool, int, float, str))
        return several or any(_holds(x, depth + 1) for x in value[:_LONGEST])
    if type(value).__module__.split(".")[0] in _OTHERS or callable(value):
        return False
    return _holds(_fields(value), depth + 1)


# -------------------------------------------------------------------------------------------------


Way = tuple[TreeSpec, tuple[type, ...]]
"""The nesting and the types of inputs; older versions of torch cannot hash a structure."""
Cuts = tuple[int | None, ...]
"""For each input, by its number: the axis that holds samples, or None."""
Drawn = Callable[[], Collection[int]]
"""Gives the numbers of samples that a sampled batch may have; empty if that is not known."""
_LEAVES = frozenset((Tensor, nn.Parameter, bool, int, float, str, type(None)))
_LEAF = tree_flatten(None)[1]
_STRUCTURES: dict[tuple, TreeSpec] = {}
"""Of arguments that are all leaves: by the number of positional ones, and the names of the others."""
_MOST = 256
_DEEPEST = 4
"""Depth up to which objects in objects are opened."""
INPUT = "input "
"""With its number, the name of an input of the model."""
NESTED = (
    "expected a dense tensor, got a nested tensor, whose samples have no axis. Pad it with "
    "torch.nested.to_padded_tensor and use a mask."
)


class _Fields:
    """A dataclass or mapping that torch's pytree does not know, opened: its type and its fields."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


def _rebuild(fields: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    value = bare(kind)
    for name, field in zip(names, fields, strict=True):
        object.__setattr__(value, name, field)
    return value


register_pytree_node(
    _Fields, lambda node: (list(node.fields.values()), (node.kind, tuple(node.fields))), _rebuild
)


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def _opened(
    value: Any, is_leaf: Callable[[Any], bool] = _is_packed, objects: bool = False,
    within: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Dataclasses and mappings opened, and other `objects`; one `within` itself is unchanged."""

    def open_leaf(leaf: Any) -> Any:
        known = is_dataclass(leaf) or isinstance(leaf, Mapping)
        if known and not isinstance(leaf, type) and hasattr(leaf, "__dict__"):
            fields: dict[str, Any] | None = vars(leaf)
        elif not objects or is_leaf(leaf) or len(within) == _DEEPEST:
            return leaf
        else:
            fields = fields_of(leaf)
        if fields is None or any(leaf is x for x in within):
            return leaf
        inside = (*within, leaf)
        return _Fields(
            type(leaf), {n: _opened(x, is_leaf, objects, inside) for n, x in fields.items()}
        )

    return tree_map(open_leaf, value, is_leaf=is_leaf)


def _of_leaves(args: tuple, kwargs: dict) -> tuple[list[Any], TreeSpec] | None:
    """The result of `flatten` for arguments that are leaves, as most are; None for others."""
    leaves = [*args, *kwargs.values()]
    if not _LEAVES.issuperset(map(type, leaves)):
        return None
    names = len(args), *kwargs
    structure = _STRUCTURES.get(names)
    if structure is None:
        found, structure = tree_flatten((args, kwargs))
        if len(_STRUCTURES) == _MOST or any(map(is_not, leaves, found)):
            return None
        _STRUCTURES[names] = structure
    return leaves, structure


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested structure, and its structure for tree_unflatten.

    Opens dataclasses and mappings that torch does not know; a PackedSequence is one leaf.
    """
    if type(value) in _LEAVES:
        return [value], _LEAF
    if type(value) is tuple and [*map(type, value)] == [tuple, dict]:
        found = _of_leaves(*value)
        if found is not None:
            return found
    return tree_flatten(_opened(value), is_leaf=_is_packed)


def flatten_inputs(
    args: tuple, kwargs: dict, samples: int | None = None
) -> tuple[list[Any], TreeSpec]:
    """The same of a call's inputs, in which a list of data is one leaf.

    Args:
        samples: a list of as many entries is a leaf, too, with one sample per entry.
    """

    def leaves_of(value: Any) -> Callable[[Any], bool]:
        outer = (value, value[0])
        return lambda node: (
            _is_packed(node)
            or (
                is_list(node)
                and ((len(node) == samples and not any(node is x for x in outer)) or is_data(node))
            )
        )

    found = _of_leaves(args, kwargs)
    if found is not None:
        return found
    value = (args, kwargs)
    opened = _opened(value, leaves_of(value), objects=True)
    return tree_flatten(opened, is_leaf=leaves_of(opened))


def inside(entry: Any) -> list[Any]:
    """The leaves of an entry of a list, in objects, too."""
    return flatten_inputs((entry,), {})[0]


def _may_hold_lists(args: tuple, kwargs: dict) -> bool:
    flat = (Tensor, bool, int, float, str, type(None))
    return not all(isinstance(x, flat) for x in (*args, *kwargs.values()))


def readings(
    args: tuple, kwargs: dict, axis: int, drawn: Drawn = tuple
) -> Iterator[tuple[list[Any], TreeSpec, int | None]]:
    """The inputs flattened, the likeliest way first. A way is for one number of samples, or None. A list
    of as many entries holds one sample per entry, or is opened like any other.

    Args:
        drawn: gives likely numbers of samples, which come first.
    """
    plain = flatten_inputs(args, kwargs)
    if _may_hold_lists(args, kwargs):
        likely = drawn()
        for size in sorted(batch_sizes_of(args, kwargs, axis), key=lambda size: size not in likely):
            leaves, structure = flatten_inputs(args, kwargs, size)
            if structure != plain[1]:
                yield leaves, structure, size
            if size in likely:
                yield *plain, size
    yield *plain, None


@dataclass(frozen=True)
class Reading:
    """The inputs of a call, flattened in one way."""

    args: tuple
    kwargs: dict
    leaves: list[Any]
    structure: TreeSpec
    way: Way


def way_of(leaves: list[Any], structure: TreeSpec) -> Way:
    """The key of alike calls. It includes the types, because a structure treats None like a tensor."""
    return structure, tuple(Tensor if isinstance(x, Tensor) else type(x) for x in leaves)


def rebuild(leaves: list[Any], structure: TreeSpec) -> Any:
    """The structure that was flattened, with these leaves."""
    return tree_unflatten(leaves, structure)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested structure; of a PackedSequence its data."""
    for leaf in flatten(value)[0]:
        leaf = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(leaf, Tensor):
            yield leaf


def is_dense(leaf: Any) -> bool:
    """Whether samples can be taken from the tensor: it is neither sparse nor nested."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def rows_of(leaf: Any, axis: int) -> int | None:
    """Number of samples in one input if they lie along `axis`; None if it has no such axis.

    A list of samples has them in its entries, whatever the axis of tensors.
    """
    if is_batched(leaf):
        return len(leaf)
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.shape[axis] if is_dense(leaf) and leaf.dim() > axis else None


def batch_sizes_of(args: tuple, kwargs: dict, axis: int) -> list[int]:
    """The possible numbers of samples in a model's inputs, the likeliest first.

    These are the sizes of its inputs along `axis`, in order; the size of a list comes before those of
    its tensors. The size 1 is last, because a leading 1 may broadcast over the batch. Empty lists alone
    mean no samples.
    """
    sizes: list[int] = []
    without: list[int] = []

    def note(node: Any) -> bool:
        if is_list(node):
            outer = node is opened or node is opened[0]
            if not outer and not is_data(node) and next(tensors_of(node), None) is not None:
                sizes.append(len(node))
            elif not outer and not node:
                without.append(0)
            return not outer and is_data(node)
        if not is_batched(node) and (size := rows_of(node, axis)) is not None:
            sizes.append(size)
        return _is_packed(node)

    opened = _opened((args, kwargs), lambda node: _is_packed(node) or is_data(node), objects=True)
    tree_flatten(opened, is_leaf=note)
    return sorted(dict.fromkeys(sizes), key=lambda size: size == 1) or without[:1]


def ways_to_cut(leaves: list[Any], sizes: list[int], own_axis: int) -> Iterator[Cuts]:
    """The axis of each input that holds samples (None: it has none), likely ways first.

    An input without samples may have the batch's size by coincidence, so every subset of the inputs is a
    way. A state may hold its samples along axis 1, which comes last. If axis 1 is the model's own,
    labels and features next to it have theirs along axis 0, which is tried at once.

    Args:
        leaves: the inputs. sizes: possible numbers of samples, the likeliest first.
    """
    for axes in ((0,), (0, 1)) if own_axis == 0 else ((own_axis, 0),):
        for size in sizes:
            options = [
                [
                    axis
                    for axis in (axes[:1] if is_batched(leaf) else axes)
                    if rows_of(leaf, axis) == size
                ]
                for leaf in leaves
            ]
            for cuts in product(*([*option, None] for option in options)):
                if own_axis in cuts:
                    yield cuts


def take_samples(leaf: Any, axis: int, samples: list[int]) -> Any:
    """These samples of an input along `axis`; zeros if it has none."""
    if is_batched(leaf):
        return take(leaf, samples)
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf)
        index = torch.tensor(samples, dtype=torch.int64, device="cpu")
        return pack_padded_sequence(
            padded[:, index.to(padded.device)], lengths[index], enforce_sorted=False
        )
    if not leaf.shape[axis]:
        shape = list(leaf.shape)
        shape[axis] = len(samples)
        return leaf.new_zeros(shape)
    return leaf.index_select(axis, torch.tensor(samples, dtype=torch.int64, device=leaf.device))


def join_samples(first: Any, second: Any, axis: int) -> Any:
    """The samples of one input, then those of the other."""
    if is_batched(first):
        return join(first, second)
    if not isinstance(first, PackedSequence):
        return torch.cat([first, second], axis)
    (one, n), (other, m) = (pad_packed_sequence(leaf) for leaf in (first, second))
    padded = one.new_zeros(max(len(one), len(other)), one.shape[1] + other.shape[1], *one.shape[2:])
    padded[: len(one), : one.shape[1]] = one
    padded[: len(other), one.shape[1] :] = other
    return pack_padded_sequence(padded, torch.cat([n, m]), enforce_sorted=False)


def samples_differ(cut: list[tuple[Any, int]], i: int, j: int) -> bool:
    """Whether two samples of these inputs, each cut along its axis, are not the same."""
    for leaf, axis in cut:
        if is_batched(leaf):
            if differ(leaf, i, j):
                return True
            continue
        one, other = (take_samples(leaf, axis, [n]) for n in (i, j))
        if isinstance(leaf, PackedSequence):
            one, other = one.data, other.data
        if one.shape != other.shape or not torch.equal(one, other):
            return True
    return False


def another_sample(samples: Any, axis: int) -> Any:
    """A sample [1 along axis] with the first one's values in another order, which keeps it valid."""
    first = take_samples(samples, axis, [0])
    if isinstance(first, PackedSequence) or is_batched(first):
        return first
    other = first.flip([d for d in range(first.dim()) if d != axis])
    if first.is_floating_point() and torch.equal(other, first):
        ramp = torch.linspace(0, 1, first.numel(), dtype=first.dtype, device=first.device)
        other = first + ramp.view(first.shape) + 0.5
    return other


def own_axis(name: str, cuts: Cuts) -> int:
    """The axis of an input of the model, by its name; 0 for a layer that counts its samples itself."""
    number = name.removeprefix(INPUT)
    return (cuts[int(number)] or 0) if name != number else 0


# -------------------------------------------------------------------------------------------------
# Lists with one entry per sample of the sampled batch, which may be confused with other sizes.


_FEW = 4
"""So few arguments of a call, or entries of a dictionary, are never samples."""


def check_drawn(
    args: tuple, kwargs: dict, samples: int | None, drawn: Callable[[], Collection[int]]
) -> int | None:
    """`samples`, unless rows of the tensors in such a list would be taken for the samples.

    Args:
        samples: the assumed number of samples. drawn: gives the possible numbers of the sampled batch.

    Raises:
        BatchSizeError: naming the list.
    """
    if all(isinstance(x, Tensor) for x in (*args, *kwargs.values())) and len(args) <= _FEW:
        return samples
    numbers = drawn()
    if samples in numbers or not numbers:
        return samples
    given: dict[str, Any] = {"arguments": args}
    given |= {f"input {i}": x for i, x in enumerate(args)} | kwargs
    for name, value in given.items():
        for kind, length in _held(value, value is args):
            if length in numbers:
                raise BatchSizeError(
                    f"{name}: the data loader drew {length} samples, the number of entries of this "
                    f"{kind}, but the {samples} rows of its tensors would be clipped as samples. Pad "
                    "and stack the entries to one tensor with one row per sample."
                )
    return samples


def unclear(entries: int, samples: int) -> BatchSizeError:
    """The error for a list: its entries may be the samples, or the rows of its tensors may be."""
    return BatchSizeError(
        f"The model's input is a list of {entries} entries whose tensors have {samples} rows, and "
        "either may be the samples. Pad and stack the entries to one tensor with the samples along the "
        "batch axis."
    )


def tells(outputs: list[Any]) -> bool:
    """Whether outputs for 2 and for 3 samples may hold so many samples, along any axis."""
    shapes = [[tuple(x.shape) for x in tensors_of(out)] for out in outputs]
    return bool(shapes) and (shapes[0] != shapes[-1] or not any(shapes[0]))


def in_lists(error: BatchSizeError) -> BatchSizeError:
    """The same error, for a model with samples in lists of tensors only."""
    return BatchSizeError(
        f"{error}. If the samples are the entries of a list, pad and stack them to one tensor with one "
        "row per sample."
    )


def has_time_first(model: nn.Module) -> bool:
    """Whether a layer in it takes its samples along axis 1, as nn.LSTM does by default."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())


def time_first(error: BatchSizeError) -> BatchSizeError:
    """The same error, for a model with layers that take their samples along axis 1."""
    return BatchSizeError(
        f"{error}. If the samples lie along axis 1 of the inputs, [t, b, ...], pass batch_first=False "
        "to make_private."
    )


def _held(value: Any, few: bool = False) -> Iterator[tuple[str, int]]:
    """Lists, tuples and dictionaries of tensors in it, with their numbers of entries."""
    mapping = isinstance(value, Mapping)
    entries = list(value.values()) if mapping else list(value) if is_list(value) else []
    inside = [found for x in entries for found in _held(x)]
    if (inside or any(isinstance(x, Tensor) for x in entries)) and (
        len(entries) > _FEW or not (mapping or few)
    ):
        yield type(value).__name__, len(entries)
    if not few:
        yield from inside

"""A model's inputs as they come: nested, by keyword, packed; where their samples may lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from itertools import product
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastclip._torch import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from fastclip.samples import row_lists
from fastclip.samples.objects import bare, fields_of
from fastclip.samples.row_lists import is_data, is_list, is_rows

Way = tuple[TreeSpec, tuple[type, ...]]
"""How inputs are nested, and of what kinds they are; older torches cannot hash a structure."""
Cuts = tuple[int | None, ...]
"""For each input, by its number: the axis that holds samples, or None."""
Drawn = Callable[[], Collection[int]]
"""Gives the numbers of rows that the data loader may have drawn; none where that is not known."""
_LEAVES = frozenset((Tensor, nn.Parameter, bool, int, float, str, type(None)))
_LEAF = tree_flatten(None)[1]
_STRUCTURES: dict[tuple, TreeSpec] = {}
"""Of arguments that are all leaves: by how many have no name, and the names of the others."""
_MOST = 256
_DEEPEST = 4
"""Objects in objects are opened so far."""
INPUT = "input "
"""With its number: what an input of the model is called."""
NESTED = (
    "expected a dense tensor, got a nested one, whose samples have no axis; pad them "
    "(torch.nested.to_padded_tensor) and use a mask, or pack them (torch.nn.utils.rnn.pack_sequence)"
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
    """Dataclasses and mappings opened, and other `objects`; one `within` itself is left."""

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
    """What `flatten` gives of arguments that are leaves, as most are; None of others."""
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
    """The leaves of a nested structure and how to put it together again with tree_unflatten.

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
    args: tuple, kwargs: dict, rows: int | None = None
) -> tuple[list[Any], TreeSpec]:
    """The same of a call's inputs, in which a list of data is one leaf.

    Args:
        rows: a list of as many entries is one, too: it holds a row in each.
    """

    def leaves_of(value: Any) -> Callable[[Any], bool]:
        outer = (value, value[0])
        return lambda node: (
            _is_packed(node)
            or (
                is_list(node)
                and ((len(node) == rows and not any(node is x for x in outer)) or is_data(node))
            )
        )

    found = _of_leaves(args, kwargs)
    if found is not None:
        return found
    value = (args, kwargs)
    opened = _opened(value, leaves_of(value), objects=True)
    return tree_flatten(opened, is_leaf=leaves_of(opened))


def inside(entry: Any) -> list[Any]:
    """What an entry of a list holds, in objects, too."""
    return flatten_inputs((entry,), {})[0]


def _may_hold_lists(args: tuple, kwargs: dict) -> bool:
    flat = (Tensor, bool, int, float, str, type(None))
    return not all(isinstance(x, flat) for x in (*args, *kwargs.values()))


def readings(
    args: tuple, kwargs: dict, axis: int, drawn: Drawn = tuple
) -> Iterator[tuple[list[Any], TreeSpec, int | None]]:
    """The inputs flattened, the likeliest way first, with the number of rows that it is for, if it is
    for one: a list of as many entries holds a row in each, or is taken apart like any other.

    Args:
        drawn: these numbers come first.
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
    """By what calls are alike: to a structure None is like a tensor, which may take its place."""
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
    """A tensor of which rows can be taken: it is neither sparse nor nested."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def rows_of(leaf: Any, axis: int) -> int | None:
    """Number of samples in one input if they lie along `axis`; None where it has no such axis.

    A list of rows has them in its entries, whatever the axis of tensors.
    """
    if is_rows(leaf):
        return len(leaf)
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.shape[axis] if is_dense(leaf) and leaf.dim() > axis else None


def batch_sizes_of(args: tuple, kwargs: dict, axis: int) -> list[int]:
    """What the number of samples in a model's inputs may be, the likeliest first.

    These are the sizes along `axis` of its inputs, in order, that of a list with tensors before theirs,
    but 1 last: a leading 1 may broadcast over the batch. Empty lists alone tell of no samples.
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
        if not is_rows(node) and (size := rows_of(node, axis)) is not None:
            sizes.append(size)
        return _is_packed(node)

    opened = _opened((args, kwargs), lambda node: _is_packed(node) or is_data(node), objects=True)
    tree_flatten(opened, is_leaf=note)
    return sorted(dict.fromkeys(sizes), key=lambda size: size == 1) or without[:1]


def ways_to_cut(leaves: list[Any], sizes: list[int], own_axis: int) -> Iterator[Cuts]:
    """The axis of each input that holds samples (None: it has none), likely ways first.

    An input without samples may have the batch's size by accident, so every subset of the
    inputs is a way. A state may hold its samples along axis 1, which comes last; where that is the
    model's own, labels and features beside it have theirs along axis 0, which is tried at once.

    Args:
        leaves: the inputs. sizes: what the number of samples may be, the likeliest first.
    """
    for axes in ((0,), (0, 1)) if own_axis == 0 else ((own_axis, 0),):
        for size in sizes:
            options = [
                [
                    axis
                    for axis in (axes[:1] if is_rows(leaf) else axes)
                    if rows_of(leaf, axis) == size
                ]
                for leaf in leaves
            ]
            for cuts in product(*([*option, None] for option in options)):
                if own_axis in cuts:
                    yield cuts


def take_rows(leaf: Any, axis: int, rows: list[int]) -> Any:
    """These rows of an input along `axis`; zeros where it has none."""
    if is_rows(leaf):
        return row_lists.take(leaf, rows)
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf)
        index = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return pack_padded_sequence(
            padded[:, index.to(padded.device)], lengths[index], enforce_sorted=False
        )
    if not leaf.shape[axis]:
        shape = list(leaf.shape)
        shape[axis] = len(rows)
        return leaf.new_zeros(shape)
    return leaf.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=leaf.device))


def join_rows(first: Any, second: Any, axis: int) -> Any:
    """The rows of one input, then those of the other."""
    if is_rows(first):
        return row_lists.join(first, second)
    if not isinstance(first, PackedSequence):
        return torch.cat([first, second], axis)
    (one, n), (other, m) = (pad_packed_sequence(leaf) for leaf in (first, second))
    padded = one.new_zeros(max(len(one), len(other)), one.shape[1] + other.shape[1], *one.shape[2:])
    padded[: len(one), : one.shape[1]] = one
    padded[: len(other), one.shape[1] :] = other
    return pack_padded_sequence(padded, torch.cat([n, m]), enforce_sorted=False)


def rows_differ(cut: list[tuple[Any, int]], i: int, j: int) -> bool:
    """Whether two rows of these inputs, each cut along its axis, are not the same."""
    for leaf, axis in cut:
        if is_rows(leaf):
            if row_lists.differ(leaf, i, j):
                return True
            continue
        one, other = (take_rows(leaf, axis, [n]) for n in (i, j))
        if isinstance(leaf, PackedSequence):
            one, other = one.data, other.data
        if one.shape != other.shape or not torch.equal(one, other):
            return True
    return False


def another_row(rows: Any, axis: int) -> Any:
    """A row [1 along axis] with the first one's values in another order, so that it is as valid."""
    first = take_rows(rows, axis, [0])
    if isinstance(first, PackedSequence) or is_rows(first):
        return first
    other = first.flip([d for d in range(first.dim()) if d != axis])
    if first.is_floating_point() and torch.equal(other, first):
        ramp = torch.linspace(0, 1, first.numel(), dtype=first.dtype, device=first.device)
        other = first + ramp.view(first.shape) + 0.5
    return other


def own_axis(name: str, cuts: Cuts) -> int:
    """Of an input of the model, by its name, or of a layer that counts its rows itself."""
    number = name.removeprefix(INPUT)
    return (cuts[int(number)] or 0) if name != number else 0

"""The tensors of collated items, each in a memory of its own, so that the trace tells them apart."""

from __future__ import annotations

import copy
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from fastclip._torch import Native, memory_of
from fastclip.data.batch_law import PLAIN
from fastclip.trace.tracer import Tracer

_DEEPEST = 16


def tensors_of(item: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors of an item, those of objects of unknown classes included."""
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
    """An item of other leaves; containers in which nothing changes are the same.

    Args:
        of_leaf: what stands for a tensor, an array or any other value that is not opened. fresh: all
            lists and dicts are copies.
    """

    def other(part: Any) -> Any:
        return rebuilt(part, of_leaf, fresh=fresh, depth=depth + 1)

    if depth == _DEEPEST or isinstance(item, (Tensor, *PLAIN)):
        return of_leaf(item)
    try:
        return _rebuilt(item, other, of_leaf, fresh)
    except Exception:  # a class of the user's own that is not made like its base
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
    """A leaf in a memory of its own, where it has one."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def seeded(tracer: Tracer, items: list[Any]) -> tuple[list[Any], bool]:
    """Tell a tracer which sample each tensor is of.

    A tensor that has its memory for itself is the same object. Any other is another one with the same
    numbers at the same place, but of its own for the tracer. What all items hold is of no sample.

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
            for x in tensors_of(item):  # of objects that are not opened for a copy
                if x.numel() and _region(x) not in common and tracer.memory.record(x) is None:
                    alone = users[_memory(x)] == 1  # type: ignore[index]
                    if alone and x.numel() * x.element_size() == x.untyped_storage().nbytes():
                        tracer.seed_all(x, sample)
                    else:
                        whole = False
    return made, whole


def elsewhere(x: Tensor) -> Tensor:
    """The same numbers, type and attributes in what torch takes for another memory."""
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
    """Identifies a tensor's memory; None where it has none of its own (sparse, nested)."""
    try:
        return None if x.layout is not torch.strided else memory_of(x)
    except (NotImplementedError, RuntimeError):
        return None


def _region(x: Tensor) -> Any:
    if _memory(x) is None:
        return id(x)
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()

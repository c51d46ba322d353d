"""What tells whether two processes read the same rows in the same order, where a data set can say it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastclip._torch import tree_leaves
from fastclip.parallel.digest import digest

_ROWS = 256
"""Of a data set of Hugging Face that are looked at, evenly spaced."""
_MOST, _BYTES = 2**21, 2**30
"""Entries of a list, rows of a table and bytes of an array that are looked at, evenly spaced."""


def told_of(dataset: Any, around: tuple[int, ...] = ()) -> str:
    """A digest of its rows: of tensors, subsets and joined sets of them, and of Hugging Face data sets.

    Of others their type and length, the tensors, arrays, tables and lists that they are, or hold,
    with an entry for each row, and the data sets that they hold: reading rows may change them
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
    for name, values in _by_row(dataset, length):
        found.update(name.encode())
        for part in _parts(values):
            found.update(part)
    around = (*around, id(dataset))
    for name, held in sorted(getattr(dataset, "__dict__", {}).items()):
        inner = isinstance(held, Dataset) or hasattr(held, "_fingerprint")
        if inner and id(held) not in around:
            found.update(f"{name} {told_of(held, around)}".encode())
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format") and length != "?":
        for part in _parts(_some_rows(dataset)):
            found.update(part)
    return f"{type(dataset).__name__} {length} {found.hexdigest()[:16]}"


def _some_rows(dataset: Any) -> list[Any]:
    """Of a data set of Hugging Face, evenly spaced, as they are stored.

    Its fingerprint says how it was made, and is another one in each process where a function that it
    was mapped by cannot be hashed, as of trainers that tokenize.
    """
    length = len(dataset)
    places = np.unique(np.linspace(0, length - 1, min(_ROWS, length)).astype(np.int64))
    table = dataset.with_format("arrow")[places.tolist()]
    return [[name, table.column(name).to_pylist()] for name in sorted(table.column_names)]


def _by_row(dataset: Any, length: Any) -> Iterator[tuple[str, Any]]:
    """What a data set is, or holds, with an entry for each of its rows."""
    for name, values in (("", dataset), *held(getattr(dataset, "__dict__", {}))):
        table = hasattr(values, "iloc") and hasattr(values, "to_numpy")
        known = table or type(values) in (list, tuple) or isinstance(values, (Tensor, np.ndarray))
        if known and getattr(values, "shape", (0,)) != () and len(values) == length:
            step = 1
            if isinstance(values, np.ndarray):
                step = max(1, values.nbytes // _BYTES)
            elif not isinstance(values, Tensor) and length:
                leaves = [0] if table else tree_leaves(values[0])
                size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
                step = max(1, length * len(leaves) // _MOST, length * size // _BYTES)
            few = values if step == 1 else (values.iloc if table else values)[::step]
            yield name, few.to_numpy() if table else few


def held(by_name: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a data set holds, by name, and the columns of mappings among that (a tokenizer's)."""
    for name, values in sorted(by_name.items()):
        yield name, values
        if isinstance(values, Mapping):
            yield from ((f"{name}.{key}", column) for key, column in values.items())


def _parts(values: Any) -> Iterator[bytes]:
    """Of strings what follows the last slash: files may lie in another folder on another machine."""
    if isinstance(values, Tensor):
        yield digest([values]).encode()
    elif isinstance(values, np.ndarray) and values.dtype != object:
        yield f"{values.dtype} {values.shape}".encode()
        yield np.ascontiguousarray(values).tobytes()
    elif isinstance(values, np.ndarray):
        yield from _parts(values.reshape(-1).tolist())
    else:
        for leaf in tree_leaves(list(values)):
            if isinstance(leaf, (Tensor, np.ndarray)):
                yield from _parts(leaf)
            elif isinstance(leaf, str):
                yield f"{leaf.rpartition('/')[2]!r} ".encode()
            else:
                known = isinstance(leaf, (int, float, bytes, np.generic))
                yield f"{leaf if known else type(leaf).__name__!r} ".encode()

"""Lists with an entry for each row that was drawn, where something else may be taken for the samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fastclip.errors import BatchSizeError
from fastclip.samples.inputs import tensors_of
from fastclip.samples.row_lists import is_list

_FEW = 4
"""Arguments of a call, or entries of a dictionary, that are no rows, however many were drawn."""


def check_drawn(
    args: tuple, kwargs: dict, rows: int | None, drawn: Callable[[], Collection[int]]
) -> int | None:
    """`rows` again; refuses a call in which rows of what lies in such a list are taken for the samples.

    Args:
        rows: taken for samples. drawn: gives the numbers of rows that the loader may have drawn.

    Raises:
        BatchSizeError: naming the list, and the ways out.
    """
    if all(isinstance(x, Tensor) for x in (*args, *kwargs.values())) and len(args) <= _FEW:
        return rows
    numbers = drawn()
    if rows in numbers or not numbers:
        return rows
    given: dict[str, Any] = {"arguments": args}
    given |= {f"input {i}": x for i, x in enumerate(args)} | kwargs
    for name, value in given.items():
        for kind, length in _held(value, value is args):
            if length in numbers:
                raise BatchSizeError(
                    f"{name}: the data loader drew {length} rows, as many as this {kind} has entries; "
                    f"but the model computes by {rows} rows of the tensors in it, which would be "
                    "clipped as samples; pad and stack the entries to one tensor with a row for each "
                    "row that was drawn, or let the model compute each entry by itself"
                )
    return rows


def unclear(entries: int, rows: int) -> BatchSizeError:
    """The refusal of a list whose entries may be samples, as may the rows of the tensors in it."""
    return BatchSizeError(
        f"the model's input is a list of {entries} entries whose tensors have {rows} rows, and it "
        "runs with fewer of either, so which of them are samples cannot be told; stack (pad) the "
        "entries to one tensor with its samples along the batch axis, or pass each as an argument"
    )


def tells(outputs: list[Any]) -> bool:
    """Whether outputs of 2 and of 3 rows may be of so many samples, wherever these lie in them."""
    shapes = [[tuple(x.shape) for x in tensors_of(out)] for out in outputs]
    return bool(shapes) and (shapes[0] != shapes[-1] or not any(shapes[0]))


def in_lists(error: BatchSizeError) -> BatchSizeError:
    """The same refusal, of a model whose rows come in lists of tensors alone."""
    return BatchSizeError(
        f"{error} (the samples are the entries of a list, which may be of unlike lengths: pad and stack "
        "them to one tensor with a row for each sample, or pool each entry by itself)"
    )


def has_time_first(model: nn.Module) -> bool:
    """Whether a layer in it takes its samples along axis 1: nn.LSTM, unless it is told otherwise."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())


def time_first(error: BatchSizeError) -> BatchSizeError:
    """The same refusal, of a model some of whose layers take their samples along axis 1."""
    return BatchSizeError(
        f"{error}; if its samples lie along axis 1 of its inputs ([t, b, ...], as nn.LSTM and "
        "nn.MultiheadAttention take them by default), pass batch_first=False to make_private"
    )


def _held(value: Any, few: bool = False) -> Iterator[tuple[str, int]]:
    """Lists, tuples and dictionaries of tensors in it, and how many entries they have."""
    mapping = isinstance(value, Mapping)
    entries = list(value.values()) if mapping else list(value) if is_list(value) else []
    inside = [found for x in entries for found in _held(x)]
    if (inside or any(isinstance(x, Tensor) for x in entries)) and (
        len(entries) > _FEW or not (mapping or few)
    ):
        yield type(value).__name__, len(entries)
    if not few:
        yield from inside

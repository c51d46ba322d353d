"""What recorders are given: names of groups and classes, and a number for every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError

ALL = "all"
CLASS = "class"
LAYER = "layer"
"""Attributes of the recorder's own: everybody, the classes, and the layers of thresholds."""


def names_of(of: str, given: Sequence[str]) -> tuple[str, ...]:
    """Names that tell groups, or classes, apart."""
    found = () if isinstance(given, str) else tuple(given)
    if not found or not all(isinstance(name, str) for name in found):
        raise ArgumentTypeError(
            f"FairnessRecorder expects the names of {of} as a sequence of str, one at least, got "
            f"{given!r}"
        )
    if len(set(found)) != len(found):
        raise ArgumentError(f"FairnessRecorder expects different names of {of}, got {found}")
    return found


def attributes_of(
    given: Mapping[str, Sequence[str]], classes: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Names of the groups of each attribute, none of which is an attribute of the recorder's own."""
    found = {name: names_of(f"the groups of {name!r}", groups) for name, groups in given.items()}
    own = {CLASS: classes, ALL: (ALL,), LAYER: ()}
    for name, groups in found.items():
        if name in own and groups != own[name]:
            raise ArgumentError(f"FairnessRecorder measures {name!r} itself; name it otherwise")
    return found


def chosen(
    where: str, groups: Mapping[str, Any], attributes: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Of what was given, what belongs to the attributes."""
    missing = [name for name in attributes if name not in groups]
    if missing:
        raise ArgumentError(
            f"{where} expects groups of the attributes {tuple(attributes)}, lacks {', '.join(missing)}"
        )
    return {name: groups[name] for name in attributes}


def check_numbers(
    where: str, name: str, values: Any, rows: int, count: int, *, wait: bool
) -> None:  # fmt: skip
    """Refuse what is not a number from 0 to count - 1 for each of the rows.

    Args:
        wait: look at the numbers of another device, too, which has to be waited for.
    """
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        got = f"{values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentTypeError(f"{where} expects {name} as an int64 tensor [{rows}], got {got}")
    check_rows(where, name, values, rows)
    if rows and (wait or values.device.type == "cpu"):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            raise ArgumentError(
                f"{where} expects numbers from 0 to {count - 1} for {name}, got {low} to {high}"
            )


def check_rows(where: str, name: str, values: Tensor, rows: int) -> None:
    """Refuse another shape than [rows]."""
    if tuple(values.shape) != (rows,):
        raise ArgumentError(
            f"{where} expects a value of {name} a row, [{rows}], got {list(values.shape)}"
        )

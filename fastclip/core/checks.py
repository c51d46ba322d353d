"""Range checks of users' numbers. Each error names its argument.

A number is anything that Python counts as one (including NumPy's), or a tensor without dimensions. True
and False are not numbers.
"""

from __future__ import annotations

from numbers import Integral, Real

from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError


def positive(name: str, value: object) -> float:
    """Returns `value` as a positive finite float."""
    number = _number(name, value, "a positive number")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"{name} expects a positive finite number, got {value!r}.")
    return number


def not_negative(name: str, value: object) -> float:
    """Returns `value` as a finite float of at least 0."""
    number = _number(name, value, "a number >= 0")
    if not 0 <= number < float("inf"):
        raise ArgumentError(f"{name} expects a finite number >= 0, got {value!r}.")
    return number


def between(
    name: str, value: object, low: float, high: float, *, closed: bool = False, zero: bool = False
) -> float:
    """Returns `value` as a float in (low, high), or (low, high] if `closed`; 0 is allowed if `zero`."""
    bracket = "]" if closed else ")"
    expected = f"a number in ({low:g}, {high:g}{bracket}" + " or 0" * zero
    number = _number(name, value, expected)
    allowed = (closed and number == high) or (zero and number == 0)
    if not (low < number < high or allowed):
        raise ArgumentError(f"{name} expects {expected}, got {value!r}.")
    return number


def whole(name: str, value: object, least: int) -> int:
    """Returns `value` as an integer of at least `least`."""
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ArgumentTypeError(
            f"{name} expects an integer, got {value!r} ({type(value).__name__})."
        )
    if number < least:
        raise ArgumentError(f"{name} expects an integer of at least {least}, got {value}.")
    return int(number)


def keep(owner: object, **numbers: float) -> None:
    """Replaces the fields of a frozen dataclass by checked numbers."""
    for name, number in numbers.items():
        object.__setattr__(owner, name, number)


def _plain(value: object) -> object:
    """Returns the number of a tensor without dimensions; other values are unchanged."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _number(name: str, value: object, expected: str) -> float:
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ArgumentTypeError(
            f"{name} expects {expected}, got {value!r} ({type(value).__name__})."
        )
    return float(number)

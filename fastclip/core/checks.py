"""Ranges of the numbers that users give; each error names its argument.

A number is whatever Python counts as one (numpy's included), or a tensor without dimensions; True and
False are none.
"""

from __future__ import annotations

from numbers import Integral, Real

from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError


def positive(name: str, value: object) -> float:
    """`value` as a positive finite float."""
    number = _number(name, value, "a positive number")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"{name} expects a positive finite number, got {value!r}.")
    return number


def not_negative(name: str, value: object) -> float:
    """`value` as a finite float of at least 0."""
    number = _number(name, value, "a number >= 0")
    if not 0 <= number < float("inf"):
        raise ArgumentError(f"{name} expects a finite number >= 0, got {value!r}.")
    return number


def between(
    name: str, value: object, low: float, high: float, *, closed: bool = False, zero: bool = False
) -> float:
    """`value` as a float in (low, high), or in (low, high] where `closed`; or 0 where `zero`."""
    bracket = "]" if closed else ")"
    expected = f"a number in ({low:g}, {high:g}{bracket}" + " or 0" * zero
    number = _number(name, value, expected)
    allowed = (closed and number == high) or (zero and number == 0)
    if not (low < number < high or allowed):
        raise ArgumentError(f"{name} expects {expected}, got {value!r}.")
    return number


def whole(name: str, value: object, least: int) -> int:
    """`value` as an integer of at least `least`."""
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ArgumentTypeError(
            f"{name} expects an integer, got {value!r} ({type(value).__name__})."
        )
    if number < least:
        raise ArgumentError(f"{name} expects an integer of at least {least}, got {value}.")
    return int(number)


def keep(owner: object, **numbers: float) -> None:
    """Put checked numbers in the place of what a frozen dataclass was given."""
    for name, number in numbers.items():
        object.__setattr__(owner, name, number)


def _plain(value: object) -> object:
    """A tensor without dimensions as the number that it holds."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _number(name: str, value: object, expected: str) -> float:
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ArgumentTypeError(
            f"{name} expects {expected}, got {value!r} ({type(value).__name__})."
        )
    return float(number)

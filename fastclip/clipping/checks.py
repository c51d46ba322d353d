"""Ranges of the numbers that strategies are made of; each error names its argument."""

from __future__ import annotations

from numbers import Real

from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError


def positive(name: str, value: object) -> float:
    """`value` as a positive finite float."""
    number = _number(name, value, "a positive number")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"{name} expects a positive finite number, got {value!r}")
    return number


def between(name: str, value: object, low: float, high: float, *, closed: bool = False) -> float:
    """`value` as a float in (low, high), or in (low, high] where `closed`."""
    bracket = "]" if closed else ")"
    expected = f"a number in ({low:g}, {high:g}{bracket}"
    number = _number(name, value, expected)
    if not (low < number < high or (closed and number == high)):
        raise ArgumentError(f"{name} expects {expected}, got {value!r}")
    return number


def whole(name: str, value: object, least: int) -> int:
    """`value` as an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"{name} expects an integer, got {value!r} ({type(value).__name__})"
        )
    if value < least:
        raise ArgumentError(f"{name} expects an integer of at least {least}, got {value}")
    return value


def _number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        if isinstance(value, Tensor) and value.dim() == 0:
            return _number(name, value.item(), expected)
        raise ArgumentTypeError(
            f"{name} expects {expected}, got {value!r} ({type(value).__name__})"
        )
    return float(value)

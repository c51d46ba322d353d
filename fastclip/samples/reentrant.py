"""By which function torch's reentrant checkpoints are run, while somebody looks at what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastclip._torch import CheckpointFunction, current_task

_APPLIED: list[tuple[Callable[..., Any], int]] = []
"""The functions, and the backward pass that each was entered in."""


@contextmanager
def applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, reentrant checkpoints are run by this function; the one entered last, of several."""
    entered = (apply, current_task())
    _APPLIED.append(entered)
    _apply_the_last()
    try:
        yield
    finally:  # in whatever order they are left
        if entered in _APPLIED:
            _APPLIED.remove(entered)
        _apply_the_last()


def _apply_the_last() -> None:
    if current_task() == -1:  # what a backward pass that failed has left
        _APPLIED[:] = [entered for entered in _APPLIED if entered[1] == -1]
    if _APPLIED:
        CheckpointFunction.apply = staticmethod(_APPLIED[-1][0])  # type: ignore[method-assign, assignment]
    elif "apply" in CheckpointFunction.__dict__:
        del CheckpointFunction.apply

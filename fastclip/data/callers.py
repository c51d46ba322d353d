"""Who is drawing: a sampler is told nothing of the loader that reads it, which stands above it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def calling(kind: type, method: str | None = None) -> Any:
    """The nearest caller that is a method of a `kind`, by its `self`; None where there is none.

    Args:
        method: the name of that method; None for any.
    """
    found = _frame(kind, method)
    return None if found is None else found.f_locals["self"]


def given_to(kind: type, method: str, name: str) -> Any:
    """An argument of the nearest caller that is this method of a `kind`; None where there is none."""
    found = _frame(kind, method)
    return None if found is None else found.f_locals.get(name)


def _frame(kind: type, method: str | None) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if method is None or frame.f_code.co_name == method:
            who = frame.f_locals.get("self")
            if isinstance(who, kind):
                return frame
        frame = frame.f_back
    return None

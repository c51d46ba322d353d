"""Who is drawing: a sampler is told nothing of the loader that reads it, which stands above it."""

from __future__ import annotations

import sys
from typing import Any


def calling(kind: type, method: str | None = None) -> Any:
    """The nearest caller that is a method of a `kind`, by its `self`; None where there is none.

    Args:
        method: the name of that method; None for any.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if method is None or frame.f_code.co_name == method:
            who = frame.f_locals.get("self")
            if isinstance(who, kind):
                return who
        frame = frame.f_back  # type: ignore[assignment]  # typeshed: the outermost frame has none
    return None

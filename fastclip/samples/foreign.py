"""Errors of others in what this package does beside a user's call: what failed, and where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fastclip.errors import FastclipError, UnsupportedLayerError
from fastclip.memory import no_memory
from fastclip.trace.findings import line_of


def is_foreign(error: BaseException) -> bool:
    """Whether it is neither this package's own nor a want of memory."""
    own = isinstance(error, FastclipError) or not isinstance(error, Exception)
    return not own and not no_memory(error)


def described(error: BaseException) -> str:
    """What failed, and the user's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = line_of(frames[-1]) if frames else "unknown line"
    return f"{type(error).__name__} at {line}: {error}"


@contextmanager
def of_samples(label: str) -> Iterator[None]:
    """Gradients of samples are computed inside, of what is called so.

    Raises:
        UnsupportedLayerError: torch has no such gradients.
    """
    try:
        yield
    except Exception as error:
        if not is_foreign(error):
            raise
        raise UnsupportedLayerError(
            f"{label}: the gradients of its samples cannot be computed ({described(error)}). Use dense "
            "tensors and other functions there, or freeze the parameters"
        ) from error

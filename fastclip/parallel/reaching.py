"""What is said where another rank does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastclip.errors import StepError


@contextmanager
def reaching() -> Iterator[None]:
    """Other ranks are asked, or told, something inside.

    Raises:
        StepError: one of them cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        raise StepError(
            "another rank of this training cannot be reached (it has ended, failed, or does something "
            f"else): nothing of this step is released; continue from the last checkpoint ({error})"
        ) from error

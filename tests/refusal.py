"""What a refusal of the engine must look like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastclip.errors import FastclipError


@contextmanager
def refused(way_out: str, error: type[Exception] = FastclipError) -> Iterator[None]:
    """The block raises fastclip's own error, a ValueError or RuntimeError too, naming a way out.

    Args:
        way_out: regular expression that the message must contain.
    """
    with pytest.raises(error) as caught:
        yield
    assert isinstance(caught.value, (ValueError, RuntimeError))
    assert re.search(way_out, str(caught.value)), str(caught.value)

"""Private models of these tests are traced."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _traced(traced: None) -> None:
    """Where FASTCLIP_TRACE is set."""

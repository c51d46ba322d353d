"""Private models of these tests are traced."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def traced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where FASTCLIP_TRACE is set."""
    monkeypatch.setenv("FASTCLIP_TRACE", "1")

"""What is remembered of launches does not grow without end."""

from __future__ import annotations

import pytest

from fastclip.ops.triton import runtime
from fastclip.ops.triton.runtime import Known


def test_it_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_MOST_KNOWN", 3)
    found: Known[int] = Known()
    for key in range(3):
        found[key] = key
    assert dict(found) == {0: 0, 1: 1, 2: 2}
    found[3] = 3
    assert dict(found) == {3: 3}

"""No test leaves a mode."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.trace.run import modes


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    while modes():  # of a test that has failed
        torch._C._pop_torch_dispatch_stack(None)
    yield
    if modes():  # of a run that a cycle keeps
        gc.collect()
    assert modes() == 0

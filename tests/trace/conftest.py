"""No test leaves a mode."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fastclip.core.torch_names import dispatch_modes


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    while dispatch_modes():  # of a test that has failed
        torch._C._pop_torch_dispatch_stack(None)
    yield
    if dispatch_modes():  # of a run that a cycle keeps
        gc.collect()
    assert dispatch_modes() == 0

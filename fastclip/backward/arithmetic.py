"""How norms and clipped sums are computed, whatever the training loop has set for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.ops import full_float32

_AS_IT_IS = nullcontext()


def uncast(g: Tensor) -> AbstractContextManager[Any]:
    """Inside, the caller's autocast (a backward pass in its block) is off where this tensor lies."""
    kind = g.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


@contextmanager
def arithmetic(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Norms and clipped sums of these parameters are computed inside."""
    # The settings of float32 products are raised once for all norms and sums of a pass.
    with torch.no_grad(), full_float32(), ExitStack() as stack:
        for device in {parameter.device.type for parameter in parameters}:
            # The caller's autocast (a backward pass inside its block) is not for norms and sums.
            stack.enter_context(torch.autocast(device, enabled=False))
        yield

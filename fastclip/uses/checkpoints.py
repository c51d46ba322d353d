"""Reentrant checkpoints, run as torch's others are: as exact, as sparing, and followed.

A reentrant one detaches its arguments and returns values without a history, so that what they were
derived from is lost, and no gradient can be asked for through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastclip._torch import CheckpointFunction
from fastclip.samples.reentrant import applied_by


@contextmanager
def followed_checkpoints() -> Iterator[None]:
    """Inside, checkpoints keep the history of values, reentrant or not."""
    before = CheckpointFunction.apply

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        given = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if not given or not torch.is_grad_enabled():  # nothing in it gets a gradient
            return before(run_function, preserve_rng_state, *args)
        return checkpoint(
            run_function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    with applied_by(apply):
        yield

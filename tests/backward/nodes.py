"""What the tests of layers that are single nodes share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from fastclip.backward import bare
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)

C = 0.3
STEPS = 6
"""After so many all that may be bare is."""
OF_ALL_MAKERS = [
    pytest.mark.skipif(not bare.SERVES, reason=bare.WHY_NOT),
    pytest.mark.usefixtures("node_makers"),
]
"""Marks of a module whose tests run with nodes of C++ and of Python."""


def step(private: nn.Module, x: Tensor, **kwargs: Any) -> None:
    sample_loss(private(x)).mean().backward(**kwargs)


def warm(model: nn.Module, x: Tensor, steps: int = STEPS) -> tuple[nn.Module, Any]:
    """A private model whose next steps are bare."""
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    for _ in range(steps):
        optimizer.zero_grad()
        step(private, x)
    optimizer.zero_grad()
    return private, optimizer


def check(model: nn.Module, optimizer: Any, x: Tensor, twin: nn.Module) -> None:
    """What is summed is what samples give one at a time, clipped."""
    grads = per_sample_gradients(twin, x)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10
    assert_sums(summed(trained), clipped_sum(grads, C), 1e-10)


def private_paused(private: nn.Module) -> Any:
    return private.grad_state.pause()

"""What a loop does with the batch before the model, and with numbers that Python has read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip.errors import GraphError
from tests.trace.test_lifecycle import Run


def cut_and_mixed(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], dtype=torch.bool)
    mask[1:3] = True
    return torch.where(mask, x.roll(1, 0), x)


def halves(x: Tensor) -> Tensor:
    a, b = x.split(len(x) // 2)
    return torch.cat([0.9 * a + 0.1 * b, 0.9 * b + 0.1 * a])


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "cut and mixed": cut_and_mixed,
    "halves": halves,
    "centered": lambda x: x - x.mean(0),
    "interpolated": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "scaled by the largest": lambda x: x / x.abs().amax(),
    "numbered": lambda x: x * torch.arange(1.0, len(x) + 1)[:, None],
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_before_the_model(name: str) -> None:
    """Dry runs judge the model, not what it is given: the labels, and so the loss, are each sample's own."""
    run = Run()
    for x, y in run.loader:
        with pytest.raises(GraphError, match="before the model: .* at test_batches.py:"):
            run.loss(MIXED[name](x), y).backward()
        break


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "centered in itself": lambda x: x - x.mean(1, keepdim=True),
    "noisy": lambda x: x + torch.randn_like(x),
    "scaled by constants": lambda x: x / torch.tensor([1.0, 2, 3, 4]),
}


@pytest.mark.parametrize("name", OWN)
def test_own_before_the_model(name: str) -> None:
    run = Run()
    for x, y in run.loader:
        x = OWN[name](x)
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
    run.check_traced()

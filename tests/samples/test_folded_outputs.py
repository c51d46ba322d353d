"""Outputs in which positions are folded with the samples: logits [b * t, v], whichever comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apart import D, Hidden, T
from tests.oracle import make_private, relative_error
from tests.refusal import refused

Use = Callable[[Tensor], Tensor]


class Folded(Hidden):
    """Returns a number a class for every position, all in one axis."""

    def __init__(self, last: Use, *, time_first: bool) -> None:
        super().__init__(lambda m, h: h, "nothing")
        self.last, self.time_first = last, time_first

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.second(torch.tanh(self.first(x))))
        return (out.transpose(0, 1) if self.time_first else out).reshape(-1, D)

    def losses(self, out: Tensor) -> Tensor:
        """Of the rows, [b]."""
        out = out.view(T, -1, D).transpose(0, 1) if self.time_first else out.view(-1, T, D)
        return out.flatten(1).cos().sum(1)


COUPLED: dict[str, Use] = {
    "centred": lambda h: h - h.mean(0),
    "a little": lambda h: h - 1e-7 * h.mean(0),
    "detached": lambda h: h / h.detach().abs().max(),
    "other places": lambda h: h + h.roll(1, 0),
    "number of rows": lambda h: h / len(h),
    "by the number": lambda h: h * torch.arange(len(h))[:, None, None],
}


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("case", COUPLED)
def test_coupled_behind_the_last_layer(case: str, time_first: bool) -> None:
    private = make_private(Folded(COUPLED[case], time_first=time_first).double())[1]
    with refused("computed from itself alone|row of the batch alike"):
        private(torch.randn(8, T, D, dtype=torch.float64))


@pytest.mark.parametrize("b", [1, 2, 8])
@pytest.mark.parametrize("time_first", [False, True])
def test_apart_is_exact(time_first: bool, b: int) -> None:
    model: Any = Folded(lambda h: h * h.mean(1, keepdim=True), time_first=time_first).double()
    x = torch.randn(b, T, D, dtype=torch.float64)
    used = [*model.first.parameters(), *model.second.parameters()]
    expected = 0.0
    for row in x:
        grads = torch.autograd.grad(model.losses(model(row[None])).sum(), used)
        norm = nn.utils.get_total_norm(grads)
        expected = expected + torch.cat([g.flatten() for g in grads]) / max(1.0, float(norm))
    _, private, optimizer, _ = make_private(model, optimizer_params=used)
    model.losses(private(x)).mean().backward()
    found = torch.cat([p.summed_grad.flatten() for p in used])
    assert relative_error(found, expected) < 1e-10
    optimizer.step()

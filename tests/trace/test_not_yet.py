"""What couples samples and does not show yet: weights that are zero, ways that chance seldom takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.oracle import make_private
from tests.trace.standalone import traced

B, D = 8, 4


class Widened(nn.Module):
    """What others say comes in by weights that are zero as training begins."""

    def __init__(self, through: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.through = nn.Linear(D, D), nn.Linear(2 * D, D), through
        self.conv = nn.Conv1d(2 * D, D, 1)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        with torch.no_grad():
            self.head.weight[:, D:] = 0
            self.conv.weight[:, D:] = 0
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.through(self, h, h.roll(1, 0).detach())


THROUGH: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "layer": lambda m, h, o: m.head(torch.cat([h, o], 1)),
    "product": lambda m, h, o: torch.cat([h, o], 1) @ m.head.weight.T,
    "derived": lambda m, h, o: torch.cat([h, o], 1) @ m.head.weight.T.clone(),
    "convolution": lambda m, h, o: m.conv(torch.cat([h, o], 1)[..., None])[..., 0],
    "adapter": lambda m, h, o: h + m.up(m.down(o)),
    "batched": lambda m, h, o: torch.cat([h, o], 1)[:, None] @ m.head.weight.T.expand(B, -1, -1),
}


@pytest.mark.parametrize("name", THROUGH)
def test_weights_that_are_zero_yet(name: str) -> None:
    """Their gradients follow from the other samples, and in the next step they hide nothing."""
    torch.manual_seed(0)
    net, x = Widened(THROUGH[name]), torch.randn(B, D)
    found = traced(net, lambda: (net(x) ** 2).sum(), [x])
    assert found.verdict == "coupled", found.report


SELDOM: dict[str, Callable[[], bool]] = {
    "torch": lambda: torch.rand(()).item() < 1e-9,
    "python": lambda: random.random() < 1e-9,
    "numpy": lambda: np.random.rand() < 1e-9,
}


@pytest.mark.parametrize("name", SELDOM)
def test_ways_that_chance_seldom_takes(name: str) -> None:
    seldom, net, x = SELDOM[name], nn.Linear(D, D), torch.randn(B, D)

    def loss() -> Tensor:
        h = net(x)
        return ((h - h.mean(0) if seldom() else h) ** 2).sum()

    found = traced(net, loss, [x])
    assert found.verdict == "path", found.report
    assert {read.of for read in found.report.reads} == {"chance"}
    assert traced(net, lambda: (net(x) ** 2).sum(), [x]).verdict == "proven"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


DRAWN: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "seeded anew": (False, lambda h: h * torch.rand(B, 1, generator=seeded())),
    "seeded anew, in place": (False, lambda h: h * torch.empty(B, D).normal_(generator=seeded())),
    "everybody's, seeded": (False, lambda h: torch.manual_seed(3) and F.dropout(h)),
    "everybody's": (True, F.dropout),
    "noise": (True, lambda h: h + torch.randn(B, 1)),
    "seeded anew, of positions": (True, lambda h: h * torch.rand(D, generator=seeded())),
}


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_that_are_drawn_again(name: str) -> None:
    """The same in each step, they say which number a sample has in the batch."""
    fresh, f = DRAWN[name]
    torch.manual_seed(0)
    plain = nn.Linear(D, D)
    _, private, optimizer, _ = make_private(plain, batch_size=B, loss_reduction="sum")
    errors = []
    for _ in range(2):
        optimizer.zero_grad()
        try:
            (f(private(torch.randn(B, D))) ** 2).sum().backward()
            optimizer.step()
        except GraphError as error:
            errors.append(str(error))
    assert [("position in the batch" in e) for e in errors] == [True] * (not fresh), errors

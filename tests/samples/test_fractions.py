"""Fractions of several samples that Python reads: without effect, or an error in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import Batch, check_exact, make_private
from tests.refusal import refused

B, D = 4, 5
Does = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, does: Does) -> None:
        super().__init__()
        self.first, self.head, self.does = nn.Linear(D, D), nn.Linear(D, 2), does

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.does(self.first(x)))


SEEN: list[float] = []


def noted(h: Tensor) -> Tensor:
    SEEN.append(h.mean().item())
    return h


def checked(h: Tensor) -> Tensor:
    if not -1e3 < h.detach().abs().max().item() < 1e9:
        raise ValueError("the numbers are too large")
    return h


COUPLED: dict[str, Does] = {
    "above a bound that all batches keep": lambda h: 2 * h if h.mean().item() > -50 else h,
    "below one": lambda h: h if h.norm().item() < 1e2 else h / 2,
    "as a factor": lambda h: h * (1 + 1e-9 * h.mean().item()),
    "as a number of rounds": lambda h: h * sum(1.0 for _ in range(int(min(h.std().item(), 3)))),
}
APART: dict[str, Does] = {
    "noted": noted,
    "checked": checked,
    "of the weights": lambda h: h if torch.ones(2).mean().item() > 0 else 2 * h,
}


@pytest.mark.parametrize("how", COUPLED)
def test_one_with_an_effect_is_an_error(how: str) -> None:
    """Though no batch that a look makes of this one shows it."""
    torch.manual_seed(0)
    private = make_private(Net(COUPLED[how]).double())[1]
    with refused("depends on another sample"):
        private(torch.randn(B, D, dtype=torch.float64))


@pytest.mark.parametrize("how", APART)
def test_one_without_is_exact(how: str) -> None:
    torch.manual_seed(0)
    batch = Batch((torch.randn(B, D, dtype=torch.float64),))
    check_exact(Net(APART[how]), batch, dtype=torch.float64)

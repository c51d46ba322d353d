"""What one batch leaves on the modules: refused where the next one's outputs follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import UnsupportedLayerError
from tests.oracle import check_exact, make_private

B, T, D = 4, 3, 5


class Carries(nn.Module):
    """Adds what an earlier batch has left, and leaves something itself."""

    left: Tensor | None = None

    def __init__(self, leaves: Callable[[Tensor], Tensor], reads: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(D, generator=generator, dtype=torch.float64))
        self.leaves, self.reads = leaves, reads

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        if self.reads and self.left is not None:
            out = out + self.left
        self.left = self.leaves(out.detach())
        return out.tanh()


def batch() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LEAVES = {
    "a statistic": lambda out: out.mean(),
    "a vector": lambda out: out.mean((0, 1)),
    "the first row": lambda out: out[0],
    "the rows": lambda out: out,
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_reaches_the_next_batch_is_refused(what: str) -> None:
    private = make_private(Carries(LEAVES[what]))[1]
    with pytest.raises(UnsupportedLayerError, match=r"\['left'\] keep numbers of one batch"):
        private(batch())


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_only_left_is_exact(what: str) -> None:
    check_exact(Carries(LEAVES[what], reads=False), batch(), dtype=torch.float64)


class Held:
    """An object of somebody's own class, which the model holds."""

    def __init__(self, mean: Tensor | None = None) -> None:
        self.mean = mean


def moving(held: Held, x: Tensor) -> Tensor:
    before = held.mean
    assert before is not None
    held.mean = before + 1e-9 * x.mean((0, 1))
    return before


def first(held: Held, x: Tensor) -> Tensor:
    if held.mean is None:
        held.mean = x.mean((0, 1))
    return held.mean


def banked(bank: Any, x: Tensor) -> Tensor:
    before = torch.stack(list(bank)).mean(0) if bank else torch.zeros(D, dtype=x.dtype)
    bank.append(x.mean((0, 1)))
    return before


def nested(held: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    before = held["of"]["x"].clone()
    held["of"]["x"] += x.mean((0, 1))
    return before


ZERO = torch.zeros(D, dtype=torch.float64)
BANKS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a statistic that hardly moves": (lambda: Held(ZERO), moving),
    "the first batch's": (Held, first),
    "an object in a list": (lambda: [Held(ZERO)], lambda held, x: moving(held[0], x)),
    "a list": (list, banked),
    "a deque": (lambda: deque(maxlen=2), banked),
    "a dict in a dict": (lambda: {"of": {"x": ZERO.clone()}}, nested),
}


class Bank(nn.Module):
    """Subtracts what an object or a container holds of earlier batches."""

    def __init__(
        self, held: Any, take: Callable[[Any, Tensor], Tensor], reads: bool = True
    ) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(D, D).double(), held
        self.take, self.reads = take, reads

    def forward(self, x: Tensor) -> Tensor:
        before = self.take(self.held, x.detach())
        return self.layer(x - before if self.reads else x)


@pytest.mark.parametrize("case", BANKS)
def test_what_is_held_for_the_next_batch_is_refused(case: str) -> None:
    make, take = BANKS[case]
    private = make_private(Bank(make(), take))[1]
    with pytest.raises(UnsupportedLayerError, match=r"'held.*keep numbers of one batch"):
        private(batch())


@pytest.mark.parametrize("case", BANKS)
def test_what_is_held_and_not_read_is_exact(case: str) -> None:
    make, take = BANKS[case]
    check_exact(Bank(make(), take, reads=False), batch(), dtype=torch.float64)


def test_a_look_leaves_nothing_in_objects() -> None:
    held = Held()
    model = Bank(held, first, reads=False)
    make_private(model)[1](batch())
    assert held.mean is not None
    assert torch.equal(held.mean, batch().mean((0, 1)))


def test_constants_that_are_left_are_exact() -> None:
    ones = torch.ones(D, dtype=torch.float64)
    model = Carries(lambda out: ones)
    model.left = ones
    check_exact(model, batch(), dtype=torch.float64)

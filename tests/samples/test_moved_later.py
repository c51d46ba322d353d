"""Rows that a router moves in a later batch, or where its parameters are as they are: exact at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.apart import step
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, D = 4, 3
LARGE = 1.25
"""From this size on, rows go to the second expert."""


class Experts(nn.Module):
    """Rows of x [b, d] whose first number is large go to the second of two experts."""

    def __init__(self, rows: Callable[[Experts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.gain, self.rows = nn.Parameter(torch.ones(1)), rows
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.gain
        return self.head(torch.tanh(self.rows(self, h, (h[:, 0].abs() > LARGE).long())))


def mask(model: Experts, h: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for e, expert in enumerate(model.experts):
        out[chosen == e] = expert(h[chosen == e])
    return out


def ordered(model: Experts, h: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.argsort(stable=True)
    parts = h[order].split(torch.bincount(chosen, minlength=2).tolist())
    made = [expert(part) for expert, part in zip(model.experts, parts, strict=True)]
    return torch.cat(made)[order.argsort()]


def one_by_one(model: Experts, h: Tensor, chosen: Tensor) -> Tensor:
    found = [model.experts[e](row[None]) for e, row in zip(chosen.tolist(), h, strict=True)]
    return torch.cat(found)


def truncated(model: Experts, h: Tensor, chosen: Tensor) -> Tensor:
    few = model.experts[0](h[: 2 * B + 1])
    return torch.cat([few, h[len(few) :]])


def build(rows: Callable[[Experts, Tensor, Tensor], Tensor]) -> Experts:
    torch.manual_seed(0)
    return Experts(rows).double()


def batch(*first: float) -> Tensor:
    """Rows whose first numbers are these."""
    x = torch.randn(len(first), D, dtype=torch.float64)
    x[:, 0] = torch.tensor(first, dtype=torch.float64) + torch.arange(len(first)) / 1000
    return x


SMALL = [0.1] * B


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [mask, ordered, one_by_one], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "batches",
    [
        [SMALL, [0.1, 0.1, 2.0, 0.1]],
        [SMALL, [2.0] * B, [0.1, 2.0, 0.1, 2.0]],
        [[1.2] * B, [1.2, 0.1, 1.2]],
        [[1.2] * B, [1.2, 2.0, 1.2, 1.2]],
        [[0.1] * 20, [*[0.1] * 19, 2.0]],
    ],
    ids=["one row", "all of them, then some", "stirred alone", "both", "behind the first rows"],
)
def test_rows_that_move_later(rows: Callable, batches: list[list[float]]) -> None:
    """In the very pass in which an expert is first seen to hold other rows than the batch."""
    model = build(rows)
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for numbers in batches:
        x = batch(*numbers)
        twin = build(rows)
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        backward(private, x)
        grads = per_sample_gradients(twin, x)
        assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)
        optimizer.step()


def test_rows_that_are_left_out() -> None:
    """A layer that takes the first rows of a large batch alone: their number decides."""
    private, optimizer = make_private(build(truncated))[1:3]
    step(private, optimizer, batch(*SMALL))
    with refused("independently of the others"):
        step(private, optimizer, batch(*3 * SMALL))

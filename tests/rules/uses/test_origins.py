"""Derived values that are parts of one parameter, or rows of it: exact, and never a [b, parameter]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.rules.derived import DerivedGraph
from fastclip.rules.reuse import Geometry, _disjoint, geometry_of
from tests.oracle import DTYPES, backward, check_exact, make_private

B, T, D = 4, 5, 6
IDS = torch.tensor([[2, 0, 2, 7, -1]])


class Whole(nn.Module):
    """Parameters, and a function of them and of x [b, t, d]."""

    def __init__(
        self, function: Callable[[Whole, Tensor], Tensor], *shapes: tuple[int, ...]
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes
        )
        self.function = function
        self.head = nn.Linear(D, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self, x))


def chunks(m: Whole, x: Tensor) -> Tensor:
    q, k, v = m.weights[0].chunk(3)
    return F.linear(x, q) * F.linear(x, k).tanh() + F.linear(x, v)


def columns(m: Whole, x: Tensor) -> Tensor:
    one, two = m.weights[0].split([2, 4], dim=1)
    return F.linear(x[..., :2], one) + F.linear(x[..., 2:], two).tanh()


def interleaved(m: Whole, x: Tensor) -> Tensor:
    q, k, v = (m.weights[0].view(2, 3, 3, D)[:, i].reshape(6, D) for i in range(3))
    return F.linear(x, q) * F.linear(x, k) + F.linear(x, v)


def turned(m: Whole, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.weights[0].t()).tanh(), m.weights[0].T.contiguous())


def turned_and_plain(m: Whole, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.weights[0].t()).tanh(), m.weights[0])


def experts(m: Whole, x: Tensor) -> Tensor:
    total = 0
    for e in (2, 0, 2):
        total = total + F.linear(F.linear(x, m.weights[0][e]).tanh(), m.weights[1][e, :, 1:9])
    return total


def overlapping(m: Whole, x: Tensor) -> Tensor:
    return F.linear(x, m.weights[0][:D]) * F.linear(x, m.weights[0][3 : 3 + D])


def part_and_whole(m: Whole, x: Tensor) -> Tensor:
    return F.linear(x, m.weights[0][:D]) + F.linear(x, m.weights[0]).tanh().sum(-1, keepdim=True)


def viewed(m: Whole, x: Tensor) -> Tensor:
    return F.linear(x, m.weights[0].view(D, D))


def table(m: Whole, x: Tensor) -> Tensor:
    return x + m.weights[0][:, 1 : T + 1]


def positions(m: Whole, x: Tensor) -> Tensor:
    return x * F.embedding(torch.arange(T), m.weights[0])


def repeated_positions(m: Whole, x: Tensor) -> Tensor:
    return x + F.embedding(IDS % 9, m.weights[0], padding_idx=7) + m.weights[0][IDS[0]].unsqueeze(0)


def rows_of_part(m: Whole, x: Tensor) -> Tensor:
    return x + m.weights[0][1:, 1:7].index_select(0, IDS[0].clamp(0, 3))


def expanded_positions(m: Whole, x: Tensor) -> Tensor:
    rows = F.embedding(torch.tensor([1, 3]), m.weights[0])  # [2, d]
    return x.unsqueeze(1).mul(rows[:, None].expand(2, T, D)).sum(1)


def grid(m: Whole, x: Tensor) -> Tensor:
    return x + m.weights[0][IDS[0]].flatten(1)


DIRECT = {
    chunks: [(3 * D, D)],
    columns: [(D, D)],
    turned: [(D, D)],
    turned_and_plain: [(D, D)],
    experts: [(3, 8, D), (3, D, 10)],
    overlapping: [(3 + D, D)],
    part_and_whole: [(2 * D, D)],
    viewed: [(D * D,)],
    table: [(1, 9, D)],
    positions: [(9, D)],
    repeated_positions: [(9, D)],
    rows_of_part: [(7, 8)],
    expanded_positions: [(7, D)],
    grid: [(9, 2, 3)],
}
"""Functions of which nothing goes through the general way back; the shapes of their parameters."""


def _x(b: int = B) -> Tensor:
    return torch.randn(b, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", DIRECT, ids=lambda f: f.__name__)
def test_exact_without_the_general_way_back(
    function: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unused(self: DerivedGraph, contributions: list) -> None:
        raise AssertionError("per-sample gradients of a whole parameter were made")

    monkeypatch.setattr(DerivedGraph, "pull_back", unused)
    for dtype in DTYPES:
        check_exact(Whole(function, *DIRECT[function]), _x(), dtype=dtype)
    check_exact(Whole(function, *DIRECT[function]), _x(1), dtype=torch.float64, C=0.1)


def cut_from_a_copy(m: Whole, x: Tensor) -> Tensor:
    whole = m.weights[0].t().contiguous().view(-1)
    return F.linear(x, whole[: D * D].view(D, D))


def changed_copy(m: Whole, x: Tensor) -> Tensor:
    own = m.weights[0].clone()
    first = own[0]
    first.mul_(2.0)
    return F.linear(x, own)


def repeated_part(m: Whole, x: Tensor) -> Tensor:
    return x + m.weights[0][:1].expand(T, D)


def turned_rows(m: Whole, x: Tensor) -> Tensor:
    rows = m.weights[0][torch.arange(D)]  # [d, d], as many rows as columns
    return x + rows.t()[:T] + m.weights[1][IDS[0]].transpose(1, 2).flatten(1)


def turned_repetition(m: Whole, x: Tensor) -> Tensor:
    rows = m.weights[0][torch.tensor([1])].expand(D, D)
    return x + rows.t()[:T]


GENERAL = {
    turned_rows: [(9, D), (9, 2, 3)],
    turned_repetition: [(9, D)],
    interleaved: [(18, D)],
    cut_from_a_copy: [(D, 7)],
    changed_copy: [(D, D)],
    repeated_part: [(3, D)],
}


@pytest.mark.parametrize("function", GENERAL, ids=lambda f: f.__name__)
def test_what_is_no_part_is_pulled_back(function: Callable) -> None:
    check_exact(Whole(function, *GENERAL[function]), _x(), dtype=torch.float64)


@pytest.mark.parametrize("function", [chunks, experts, repeated_positions, turned_and_plain])
def test_a_batch_of_nobody(function: Callable) -> None:
    model = Whole(function, *DIRECT[function])
    _, private, optimizer, _ = make_private(model)
    backward(private, _x())
    optimizer.step()
    optimizer.zero_grad()
    backward(private, _x(0), loss_reduction="sum")
    for weight in model.weights:
        assert weight.summed_grad is None or not weight.summed_grad.any()


@pytest.mark.parametrize(
    ("cut", "apart"),
    [
        (lambda w: w.chunk(2, 1), True),
        (lambda w: (w[:, ::2], w[:, 1::2]), True),
        (lambda w: (w[:3], w[2:]), False),
        (lambda w: (w[:, ::2], w[:, ::3]), False),
        (lambda w: (w.view(2, 2, 2, 6)[:, 0], w.view(2, 2, 2, 6)[:, 1]), True),
        (lambda w: (w[1], w[:, 1]), False),
    ],
)
def test_common_entries_of_parts(cut: Callable, apart: bool) -> None:
    whole = torch.zeros(8, 6, dtype=torch.float64)
    parts = sorted((geometry_of(part, whole) for part in cut(whole)), key=lambda g: g.offset)
    assert _disjoint(tuple(parts), whole.numel()) is apart
    assert all(isinstance(part, Geometry) for part in parts)

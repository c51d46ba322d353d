"""Rows that a mask selects are followed, also where all rows of the first batch select as many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)

T, D = 4, 4


class Masked(nn.Module):
    """Positions of x [b, t, d] where the mask [b, t] is true are changed, by `how`."""

    def __init__(self, how: Callable[[Masked, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.pair = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.weight, self.gain = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.how = how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        out = h.clone()
        out[mask] = self.how(self, h[mask]).tanh()
        return self.head(out)


class Losses(nn.Module):
    """What each row of the mask selects, summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), nn.Linear(D, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        each = self.layer(self.first(x)[mask].tanh()).square().sum(-1)
        return each.new_zeros(len(x)).index_add(0, mask.nonzero()[:, 0], each)[:, None]


class Repeated(nn.Module):
    """Each row is repeated as often as its mask is true."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), nn.Linear(D, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        row = torch.repeat_interleave(torch.arange(len(x)), mask.sum(1))
        made = self.layer(self.first(x).mean(1)[row]).tanh()
        return made.new_zeros(len(x), 5).index_add(0, row, made)


class Experts(nn.Module):
    """Every position goes to one of two experts, and then once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            rows = h.reshape(-1, D)
            chosen, out = (rows[:, 0] > 0).long(), torch.zeros_like(rows)
            for e, expert in enumerate(self.experts):
                (mine,) = (chosen == e).nonzero(as_tuple=True)
                if len(mine):
                    out = out.index_add(0, mine, expert(rows[mine]))
            h = h + 0.1 * out.view(h.shape)
        return self.head(h)


class Ends(nn.Module):
    """As many positions of each row as a Python number says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, n = self.first(x), mask.sum(1).tolist()
        flat = torch.cat([h[i, :k] for i, k in enumerate(n)])
        return self.head(torch.stack([y.sum(0) for y in self.layer(flat).tanh().split(n)]))


class Packed(nn.Module):
    """The same, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm, self.head = nn.Linear(D, D), nn.LSTM(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=self.layer(packed.data).tanh())
        return self.head(self.lstm(packed)[1][0][0])


def _batch(counts: list[int]) -> tuple[Tensor, Tensor]:
    mask = torch.stack([torch.randperm(T) < n for n in counts])
    return torch.randn(len(counts), T, D, dtype=torch.float64), mask


def _signs(counts: list[int]) -> Tensor:
    """Positions whose first number is large and above 0, at so many places of each row."""
    x, mask = _batch(counts)
    x[..., 0] = torch.where(mask, 3.0, -3.0)
    return x


def _train(build: Callable[[], nn.Module], batches: list) -> None:
    torch.manual_seed(0)
    model, twin = build().double(), build().double()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for inputs in batches:
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        backward(private, inputs)
        wanted = clipped_sum(per_sample_gradients(twin, inputs), 0.1)
        assert_sums(summed(params), wanted, 1e-10)
        optimizer.step()


COUNTS = [
    [[1] * 4, [2, 0, 1, 1], [4, 0, 0, 0]],
    [[2] * 4, [3, 1, 2, 2], [1, 3, 3, 1]],
    [[1] * 12, [2, 0] * 6, [4, 0, 0] * 4],
]
HOW = {
    "layer": lambda model, rows: model.layer(rows),
    "product": lambda model, rows: rows @ model.weight,
    "entries": lambda model, rows: rows * model.gain,
    "module": lambda model, rows: model.pair(rows),
}


WHOLE = {"losses": Losses, "repeated": Repeated, "ends": Ends}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("counts", COUNTS, ids=["one", "two", "many rows"])
@pytest.mark.parametrize("how", [*HOW, *WHOLE])
def test_as_many_in_every_row_at_first(how: str, counts: list[list[int]]) -> None:
    """Later batches hold as many entries, but of other samples."""
    torch.manual_seed(1)
    build = WHOLE[how] if how in WHOLE else lambda: Masked(HOW[how])
    _train(build, [_batch(each) for each in counts])


@pytest.mark.parametrize("counts", [[[0] * 4, *COUNTS[0]], [[0] * 4, *COUNTS[1]], COUNTS[0]])
def test_experts_that_look_like_routers(counts: list[list[int]]) -> None:
    """An expert that happens to return what it got of every row puts nothing back in its place."""
    torch.manual_seed(1)
    _train(Experts, [_signs(each) for each in counts])


@pytest.mark.parametrize("counts", [[[2] * 4, [3, 1, 2, 2], [1, 3, 3, 1]], [[1] * 4, [4, 2, 1, 1]]])
def test_packed_rows_of_one_length_at_first(counts: list[list[int]]) -> None:
    torch.manual_seed(1)
    _train(Packed, [_batch(each) for each in counts])

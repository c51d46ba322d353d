"""What follows from the longest row of the batch shows where all rows are of one length, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import Batch, check_exact, make_private
from tests.refusal import refused

B, T, D = 4, 5, 6
Pool = Callable[[Tensor, Tensor], Tensor]


def inside(lengths: Tensor) -> Tensor:
    """Whether a position is in its row, [b, T, 1]."""
    return (torch.arange(T) < lengths[:, None])[..., None].double()


POOLS: dict[str, tuple[Pool, bool]] = {
    "as far as the longest": (lambda h, n: h[:, : int(n.max())].mean(1), False),
    "by the longest": (lambda h, n: (h * inside(n)).sum(1) / n.max(), False),
    "by all": (lambda h, n: (h * inside(n)).sum(1) / n.double().mean(), False),
    "by its own": (lambda h, n: (h * inside(n)).sum(1) / n[:, None], True),
    "as far as the longest, by its own": (
        lambda h, n: (h * inside(n))[:, : int(n.max())].sum(1) / n[:, None], True,
    ),
    "over everything": (lambda h, n: h.mean(1), True),
}  # fmt: skip


class Pooled(nn.Module):
    """Pools rows of these lengths."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.layer, self.pool = nn.Linear(D, D), pool

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.pool(torch.tanh(self.layer(x)), lengths)


class Loss(Pooled):
    """The mean over all positions in rows, or over rows' own means."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        losses = torch.tanh(self.layer(x)).square() * inside(lengths)
        return self.pool(losses, lengths).mean()


@pytest.mark.parametrize("case", POOLS)
def test_rows_of_one_length(case: str) -> None:
    pool, apart = POOLS[case]
    x, lengths = torch.randn(B, T, D, dtype=torch.float64), torch.full((B,), T)
    if apart:
        check_exact(Pooled(pool), Batch((x, lengths)), dtype=torch.float64)
        return
    private = make_private(Pooled(pool).double())[1]
    with refused("independently of the others"):
        private(x, lengths)


@pytest.mark.parametrize("case", [case for case, (_, apart) in POOLS.items() if not apart])
def test_behind_dropout(case: str) -> None:
    pool, _ = POOLS[case]
    private = make_private(Pooled(lambda h, n: pool(F.dropout(h), n)).double())[1]
    with refused("independently of the others"):
        private(torch.randn(B, T, D, dtype=torch.float64), torch.full((B,), T))


@pytest.mark.parametrize("case", ["by all", "by its own"])
def test_a_loss_inside(case: str) -> None:
    pool, apart = POOLS[case]
    private = make_private(Loss(pool).double())[1]
    loss = private(torch.randn(B, T, D, dtype=torch.float64), torch.full((B,), T))
    if apart:
        loss.backward()
        return
    with refused("one loss per sample"):
        loss.backward()


class Words(nn.Module):
    """Finds the lengths of its rows itself: ids that stand for nothing end them."""

    def __init__(self, pool: Pool, filler: int, told: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, D), nn.Linear(D, D)
        self.pool, self.nothing = pool, torch.tensor(filler)
        if told:
            self.pad_token_id = filler

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != self.nothing).sum(1)
        return self.pool(torch.tanh(self.layer(self.table(ids))), lengths)


@pytest.mark.parametrize("case", ["by the longest", "by its own"])
@pytest.mark.parametrize("filler", [0, 1, 8])
def test_lengths_that_ids_tell(filler: int, case: str) -> None:
    pool, apart = POOLS[case]
    ids = torch.randint(2, 8, (B, T))
    if apart:
        check_exact(Words(pool, filler, told=True), Batch((ids,)), dtype=torch.float64)
        return
    private = make_private(Words(pool, filler, told=filler > 0).double())[1]
    with refused("independently of the others"):
        private(ids)

"""Products with a parameter on either side, against one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.uses.functions import B, D, T, batch, check_autocast, check_rule

P = Sequence[Tensor]

CASES = {
    "linear": (lambda p, x: F.linear(x, p[0], p[1]), (3, D), (3,)),
    "linear-without-bias": (lambda p, x: F.linear(x, weight=p[0]), (3, D)),
    "x @ W": (lambda p, x: x @ p[0], (D, 3)),
    "W @ x": (lambda p, x: p[0] @ x, (3, T)),
    "torch.matmul(W, x)": (lambda p, x: torch.matmul(p[0], x.transpose(1, 2)), (3, D)),
    "W @ x, grouped": (lambda p, x: p[0] @ x.view(-1, T, 2, 3).transpose(1, 2), (2, 7, T)),
    "x @ W, grouped": (lambda p, x: x.view(-1, T, 2, 3).transpose(1, 2) @ p[0], (2, 3, 4)),
    "x @ W, one group": (lambda p, x: x.view(-1, T, 2, 3).transpose(1, 2) @ p[0], (1, 1, 3, 4)),
    "x @ w": (lambda p, x: x @ p[0], (D,)),
    "w @ x": (lambda p, x: p[0] @ x, (T,)),
    "mv": (lambda p, x: torch.mv(x[:, 0], p[0]).unsqueeze(1), (D,)),
    "mm": (lambda p, x: torch.mm(x[:, 0], p[0]), (D, 3)),
    "mm, time-major": (lambda p, x: torch.mm(p[0], x[:, 0].t()).t(), (3, D)),
    "addmm": (lambda p, x: torch.addmm(p[1], x[:, 1], p[0], beta=0.5, alpha=2), (D, 3), (3,)),
    "addmm method": (lambda p, x: p[1].addmm(x[:, 1], p[0]), (D, 3), (1, 3)),
    "baddbmm": (
        lambda p, x: torch.baddbmm(p[0], x, x.transpose(1, 2), beta=2, alpha=0.5), (T, T)
    ),
    "einsum": (lambda p, x: torch.einsum("btd,dp->bpt", x, p[0]), (D, 3)),
    "einsum, heads": (lambda p, x: torch.einsum("b t d, h d p -> b h t p", x, p[0]), (2, D, 3)),
    "einsum, out": (
        lambda p, x: torch.einsum("bthd,dph->btp", x.view(-1, T, 2, 3), p[0]), (3, 4, 2)
    ),
    "einsum, ellipsis": (lambda p, x: torch.einsum("...d,pd", x, p[0]), (3, D)),
    "einsum, three": (lambda p, x: torch.einsum("btd,bsd,d->bts", x, x, p[0]), (D,)),
    "einsum, two private": (lambda p, x: torch.einsum("btd,dr,rp->btp", x, *p), (D, 2), (2, 3)),
    "einsum, by entry": (lambda p, x: torch.einsum("btd,td->btd", x, p[0]), (T, D)),
    "einsum, list": (lambda p, x: torch.einsum("btd,dp->btp", [x, p[0]]), (D, 3)),
    "tensordot": (lambda p, x: torch.tensordot(x, p[0], dims=([1, 2], [1, 0])), (D, T, 3)),
    "tensordot, 1": (lambda p, x: torch.tensordot(x, p[0], 1), (D, 3)),
    "bilinear": (lambda p, x: F.bilinear(x, x.cos(), p[0], p[1]), (3, D, D), (3,)),
    "folded": (lambda p, x: F.linear(x.reshape(-1, D), p[0], p[1]).view(-1, T, 3), (3, D), (3,)),
    "folded outside": (
        lambda p, x: (x.transpose(0, 1).reshape(-1, D) @ p[0]).view(T, -1, 3).transpose(0, 1),
        (D, 3),
    ),
    "folded twice": (
        lambda p, x: (
            (x.view(-1, T, 2, 3).permute(2, 0, 1, 3).reshape(-1, 3) @ p[0])
            .view(2, -1, T, 4).transpose(0, 1)
        ),
        (3, 4),
    ),
    "folded bmm": (
        lambda p, x: torch.einsum("nd,dph->nph", x.reshape(-1, D), p[0]).view(-1, T, 2, 3), (D, 2, 3)
    ),
    "time-major": (lambda p, x: F.linear(x.transpose(0, 1), *p).transpose(0, 1), (3, D), (3,)),
    "time-major matmul": (lambda p, x: (x.permute(1, 2, 0).mT @ p[0]).transpose(0, 1), (D, 3)),
    "in place afterwards": (lambda p, x: F.linear(x, *p).mul_(2).add_(x.sum(-1, True)), (3, D), (3,)),
    "in place, relu": (lambda p, x: F.relu(F.linear(x, *p), inplace=True), (3, D), (3,)),
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    function, *shapes = CASES[case]
    check_rule(function, *shapes)


@pytest.mark.parametrize("case", ["linear", "x @ W, grouped", "addmm", "einsum, three"])
def test_autocast(case: str) -> None:
    function, *shapes = CASES[case]
    check_autocast(function, *shapes)


def test_rows_that_are_not_contiguous() -> None:
    x = batch(B, D, T).transpose(1, 2)
    check_rule(lambda p, x: x.flip(1)[:, ::2] @ p[0], (D, 3), x=x)

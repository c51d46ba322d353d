"""Functions that move a parameter's entries among those of a batch, against one sample at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.rules.uses.functions import D, T, batch, check_autocast, check_rule

IDS = torch.tensor([0, 2, 2, 1, 0])


def set_first(p: list[Tensor], x: Tensor) -> Tensor:
    out = x * 2
    out[:, 0] = p[0]
    return out


def set_some(p: list[Tensor], x: Tensor) -> Tensor:
    out = x * 2
    out[:, IDS[:2]] = p[0]
    return out


def copied(p: list[Tensor], x: Tensor) -> Tensor:
    out = x * 2
    out[:, 1].copy_(p[0])
    return out


CASES = {
    "expand": (lambda p, x: torch.cat([p[0].expand(len(x), -1, -1), x], 1), (1, 2, D)),
    "repeat": (lambda p, x: torch.cat([x, p[0].repeat(len(x), 2, 1)], 1), (3, D)),
    "tile": (lambda p, x: x + p[0].tile(len(x), 1, 2), (T, 3)),
    "repeat, folded": (
        lambda p, x: (x.reshape(-1, D) + p[0].repeat(len(x), 1)).view(-1, T, D), (T, D)
    ),
    "repeat_interleave": (
        lambda p, x: (x.transpose(0, 1) + p[0].repeat_interleave(len(x), 1)).transpose(0, 1), (T, 1, D)
    ),
    "stack": (lambda p, x: torch.stack([x[:, :1].sum(1), p[0].expand_as(x[:, 0])], 1), (D,)),
    "setitem": (set_first, (D,)),
    "setitem, several": (set_some, (2, D)),
    "copy_": (copied, (D,)),
    "where": (lambda p, x: torch.where(x > 0, x, p[0]), (D,)),
    "masked_fill": (lambda p, x: x.masked_fill(x > 0, p[0].sum() * 2), (D,)),
    "select by the batch": (lambda p, x: x + p[0][(x > 0).long().sum(-1)], (D + 1, D)),
    "several indices": (
        lambda p, x: x + p[0][(x > 0).long(), (x.cos() > 0).long(), :1].squeeze(-1), (2, 2, 3)
    ),
    "index of columns": (lambda p, x: x + p[0][:, (x > 0).long().sum(-1)].permute(1, 2, 0), (D, D + 1)),
    "gather": (
        lambda p, x: x + p[0].expand(len(x), T, D).gather(2, (x > 0).long()), (T, D)
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    function, *shapes = CASES[case]
    check_rule(function, *shapes, x=_spread())


@pytest.mark.parametrize("case", ["repeat", "setitem", "several indices"])
def test_autocast(case: str) -> None:
    function, *shapes = CASES[case]
    check_autocast(function, *shapes, x=_spread())


def _spread() -> Tensor:
    return 3 * batch()

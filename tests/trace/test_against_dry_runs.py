"""The verdicts of dry runs and of the trace on the same models, and where they differ, why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import FastclipError
from tests.oracle import make_private, sample_loss
from tests.trace.standalone import traced

B, T, D = 6, 4, 5
Use = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """[b, t, d], a few layers, and a way to use them."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.other, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.recurrent = nn.LSTM(D, D, batch_first=True)
        self.attention = nn.MultiheadAttention(D, 1, batch_first=True)
        self.raw = nn.Parameter(torch.randn(1, T, D))
        self.register_buffer("kept", torch.zeros(D))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def expert(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    first = rows[:, 0] > 0
    out = torch.zeros_like(rows)
    out[first], out[~first] = m.layer(rows[first]), m.other(rows[~first])
    return out.view_as(x)


def running(m: Any, x: Tensor) -> Tensor:
    m.kept.mul_(0.9).add_(x.detach().mean((0, 1)))
    return m.layer(x - m.kept)


def hooked(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    h.register_hook(lambda g: g * (1 + h.detach().mean()))
    return m.other(h.tanh())


APART: dict[str, Use] = {
    "layer": lambda m, x: m.layer(x),
    "time first": lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1),
    "folded": lambda m, x: m.other(m.layer(x.flatten(0, 1)).tanh()).view(x.shape),
    "folded, time first": lambda m, x: (
        m.layer(x.transpose(0, 1).flatten(0, 1)).view(T, -1, D).transpose(0, 1)
    ),
    "positions": lambda m, x: m.norm(m.layer(x) + m.raw),
    "recurrent": lambda m, x: m.recurrent(x)[0],
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "dropout": lambda m, x: m.layer(F.dropout(x)),
    "derived": lambda m, x: F.linear(x, F.normalize(m.layer.weight)),
    "loop": lambda m, x: torch.stack([m.layer(row) for row in x]),
}
COUPLED: dict[str, Use] = {
    "mean": lambda m, x: m.layer(x - x.mean(0)),
    "behind the layer": lambda m, x: (h := m.layer(x)) - h.mean(0),
    "detached": lambda m, x: (h := m.layer(x)) * h.detach().std(),
    "others": lambda m, x: m.layer(x) + m.other(x).roll(1, 0),
    "largest": lambda m, x: m.layer(x) - m.layer(x).amax(0),
    "sum so far": lambda m, x: m.layer(x).cumsum(0),
    "recurrent over samples": lambda m, x: m.recurrent(x.transpose(0, 1))[0].transpose(0, 1),
    "attention over samples": lambda m, x: m.attention(*[x.transpose(0, 1)] * 3)[0].mT.mT,
    "by number": lambda m, x: m.layer(x) * torch.arange(1, len(x) + 1)[:, None, None],
    "some alone": lambda m, x: torch.cat([m.layer(x[:2]), m.other(x[2:])]),
    "buffer": running,
    "hook": hooked,
}
DIFFERENCES: dict[str, tuple[Use, bool, str, str]] = {
    "number of rows": (
        lambda m, x: m.layer(x) * (1.01 if len(x) > 3 else 1.0),
        False, "proven", "Python computes with the number of rows, which is no operation",
    ),
    "mask scaled by all of it": (
        lambda m, x: m.layer(x) * (k := F.dropout(torch.ones_like(x))) / k.mean(),
        False, "proven", "chance alone is shared; only its spread follows from the number of rows",
    ),
    "shuffled": (
        lambda m, x: m.layer(x)[torch.randperm(len(x))],
        True, "proven", "each row is one sample's, whichever: what joins it with another is an error",
    ),
    "experts": (
        expert, True, "path", "how many rows an expert gets follows from the batch, and Python sees it",
    ),
    "branch": (
        lambda m, x: m.layer(x) * (2 if x.sum() > 99 else 1),
        False, "path", "the trace has seen one way, and says so",
    ),
    "branch that is taken": (
        lambda m, x: m.layer(x) * (2 if x.mean() > 0 else 1),
        False, "path", "the trace has seen one way, and says so",
    ),
    "chance": (
        lambda m, x: m.layer(x if random.random() > 0.01 else x - x.mean(0)),
        True, "path", "the likely way is apart; every step is traced, so that the other one is seen",
    ),
}  # fmt: skip
"""Name -> use, whether dry runs accept it, the trace's verdict, and why they differ."""


def accepts(use: Use) -> bool:
    """Whether a step of the private model raises nothing; places of both are compared in it."""
    private = make_private(Model(use).double(), batch_size=B)[1]
    try:
        sample_loss(private(torch.randn(B, T, D, dtype=torch.float64))).mean().backward()
    except FastclipError:
        return False
    return True


def verdict(use: Use) -> str:
    net, x = Model(use).double(), torch.randn(B, T, D, dtype=torch.float64)
    return traced(net, lambda: sample_loss(net(x)).mean(), [x]).verdict


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    assert accepts(APART[name])
    assert verdict(APART[name]) in ("proven", "values")


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    assert not accepts(COUPLED[name])
    assert verdict(COUPLED[name]) == "coupled"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_where_they_differ(name: str) -> None:
    use, accepted, of_trace, _ = DIFFERENCES[name]
    assert (accepts(use), verdict(use)) == (accepted, of_trace)

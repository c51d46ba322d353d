"""Rows of a buffer that trained weights meet, and that samples choose by number: a warning names it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import backward, make_private

N, D, H = 20, 6, 8
Does = Callable[["Graph", Tensor], Tensor]


class Graph(nn.Module):
    """What a test does with the numbers of nodes, and a head."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("features", torch.randn(N, D))
        self.register_buffer("links", torch.eye(N) + torch.rand(N, N))
        self.register_buffer("gains", torch.rand(N, H))
        self.register_buffer("fixed", torch.randint(N, (N,)))
        self.held = torch.randn(N + 1, D)
        self.layer, self.head = nn.Linear(D, H), nn.Linear(H, 2)
        self.weight, self.table = nn.Parameter(torch.randn(D, H)), nn.Embedding(N, H)
        self.frozen = nn.Embedding(N, D).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, nodes: Tensor) -> Tensor:
        return self.head(self.does(self, nodes))


FEATURES, LINKS = "buffer 'features'", "buffer 'links'"
NAMED: dict[str, tuple[Does, tuple[str, ...]]] = {
    "a graph": (lambda m, n: (m.links @ m.layer(m.features)).tanh()[n], (FEATURES, LINKS)),
    "a parameter": (lambda m, n: (m.dropout(m.features) @ m.weight).relu()[n], (FEATURES,)),
    "a copy": (lambda m, n: m.layer(F.normalize(m.features))[n], (FEATURES,)),
    "looked up": (lambda m, n: F.embedding(n, m.layer(m.features)), (FEATURES,)),
    "index_select": (lambda m, n: torch.mm(m.features, m.weight).index_select(0, n), (FEATURES,)),
    "gathered": (
        lambda m, n: m.layer(m.features).gather(0, n[:, None].expand(-1, H)),
        (FEATURES,),
    ),
    "spread": (
        lambda m, n: torch.zeros(N, H).index_add(0, m.fixed, m.layer(m.features))[n],
        (FEATURES,),
    ),
    "einsum": (lambda m, n: torch.einsum("ij,jk->ik", m.features, m.weight)[n], (FEATURES,)),
    "an attribute": (lambda m, n: m.layer(m.held)[n], ("attribute 'held'",)),
    "links of a table": (lambda m, n: (m.links @ m.table.weight)[n], (LINKS,)),
}
QUIET: dict[str, Does] = {
    "a frozen table": lambda m, n: m.layer(m.frozen(n)),
    "a frozen table, projected": lambda m, n: m.layer(m.frozen.weight)[n],
    "chosen first": lambda m, n: m.layer(m.features[n]),
    "a table": lambda m, n: m.table(n) * m.gains[n],
    "a table with gains": lambda m, n: F.embedding(n, m.table.weight * m.gains),
    "a table, projected": lambda m, n: F.embedding(n, m.table.weight @ m.gains[:H]),
    "no sample's numbers": lambda m, n: m.table(n) + m.layer(m.features)[m.fixed].mean(0),
    "made in forward": lambda m, n: m.layer(torch.arange(30.0)[:, None].expand(-1, D).sin())[n],
}


def said(does: Does) -> list[str]:
    torch.manual_seed(0)
    private = make_private(Graph(does))[1]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in (4, 8, 16):
            backward(private, torch.arange(1, rows + 1))
            private.zero_grad()
    return [str(w.message) for w in found if "would not be protected" in str(w.message)]


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    does, held = NAMED[name]
    (message,) = said(does)
    assert {*message.split(":")[0].split(" and ")} == {*held}


@pytest.mark.parametrize("name", QUIET)
def test_quiet(name: str) -> None:
    assert not said(QUIET[name])

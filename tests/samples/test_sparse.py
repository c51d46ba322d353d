"""Sparse tensors hold numbers of the batch where their indices or values do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

N, D = 9, 4
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "not coalesced": lambda x: torch.sparse_coo_tensor(
        torch.cat([x.to_sparse().indices()] * 2, 1), torch.cat([x.to_sparse().values() / 2] * 2)
    ),
    "csr": lambda x: x.to_sparse_csr(),
}
SPARSE = ["coo", "csr"]


def adjacency() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(N, N, generator=generator) > 0.5).double()


class Graph(nn.Module):
    """Embeddings that a fixed graph spreads, of which each row takes some: LightGCN."""

    def __init__(self, graph: Tensor, where: str = "buffer") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lin = nn.Embedding(N, D), nn.Linear(D, D)
        if where == "buffer":
            self.register_buffer("graph", graph)
        else:
            self.graph = graph
        self.rebuilt = where == "built in the forward"

    def forward(self, ids: Tensor) -> Tensor:
        graph, own = self.graph, self.table.weight
        if self.rebuilt:
            graph = torch.sparse_coo_tensor(graph.indices(), graph.values(), graph.shape)
        once = graph @ own
        return (own + once + torch.tanh(self.lin(graph @ once)))[ids]


@pytest.mark.parametrize(
    ("layout", "where"),
    [*((n, w) for n in LAYOUTS for w in ("buffer", "attribute")), ("coo", "built in the forward")],
)
def test_a_constant_graph(layout: str, where: str) -> None:
    ids = torch.randint(0, N, (5, 6), generator=torch.Generator().manual_seed(2))
    expected = per_sample_gradients(Graph(adjacency()).double(), ids)
    threshold = norms(expected).median().item()
    model = Graph(LAYOUTS[layout](adjacency()), where)
    for part in (model.table, model.lin):
        part.double()
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model, max_grad_norm=threshold)
    backward(private, ids)
    assert_sums(summed(params), clipped_sum(expected, threshold), 1e-10)


class Coupled(nn.Module):
    """A sparse tensor that the batch reaches, in a way of the case's."""

    def __init__(self, layout: str, use: Callable[[Coupled, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.layout, self.use = nn.Parameter(torch.randn(D, 3)), layout, use
        self.register_buffer("graph", self.sparse(torch.eye(D)))
        self.kept = self.sparse(torch.eye(D))

    def sparse(self, x: Tensor) -> Tensor:
        return LAYOUTS[self.layout](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def of_values(m: Coupled, x: Tensor) -> Tensor:
    return x @ (m.sparse(x.T @ x) @ m.w)


def of_places(m: Coupled, x: Tensor) -> Tensor:
    return x @ (m.sparse((x.T @ x > 0).float()) @ m.w)


def scaled(m: Coupled, x: Tensor) -> Tensor:
    return x @ ((m.kept * x.mean()) @ m.w)


def filled_buffer(m: Coupled, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.graph.values().mul_(1 + x.mean())
    return x @ (m.graph @ m.w)


def new_buffer(m: Coupled, x: Tensor) -> Tensor:
    m.graph = m.graph * x.detach().mean()
    return x @ m.w


def new_data(m: Coupled, x: Tensor) -> Tensor:
    """Of which torch takes no notice where it is CSR."""
    if m.layout == "csr":
        return new_buffer(m, x)
    m.graph.data = (m.graph * x.detach().mean()).data
    return x @ m.w


def filled_attribute(m: Coupled, x: Tensor) -> Tensor:
    out = x @ (m.kept @ m.w)
    with torch.no_grad():
        m.kept.values().copy_(x.mean().expand(D))
    return out


def new_attribute(m: Coupled, x: Tensor) -> Tensor:
    out = x @ (m.kept @ m.w)
    m.kept = m.kept * x.detach().mean()
    return out


USES = [
    of_values,
    of_places,
    scaled,
    filled_buffer,
    new_buffer,
    new_data,
    filled_attribute,
    new_attribute,
]


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("use", USES)
def test_the_batch_reaches_it(use: Callable[[Coupled, Tensor], Tensor], layout: str) -> None:
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(3))
    model = Coupled(layout, use)
    _, private, _, _ = make_private(model)
    with refused("another sample|errors.html#carried-state|couple|changed in place"):
        for _ in range(2):
            backward(private, x)

"""Values of parameters that are made sparse, and products of sparse tensors with parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import backward, check_exact, make_private
from tests.refusal import refused

B, D, K = 4, 6, 5
Does = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """What a test does, with a weight some of whose entries are zero, and a head."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.does, self.head = does, nn.Linear(K, 3)
        weight = torch.randn(K, D, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(weight * (weight > -0.5))
        self.shift = nn.Parameter(torch.rand(K, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.does(self, x))


EXACT: dict[str, Does] = {
    "coo": lambda m, x: torch.sparse.mm(m.weight.to_sparse(), x.T).T,
    "csr": lambda m, x: (m.weight.to_sparse_csr() @ x.T).T,
    "changed": lambda m, x: torch.sparse.mm(m.weight.to_sparse() * 2.0, x.T).T,
    "added": lambda m, x: (
        torch.sparse.addmm(m.shift.expand(-1, len(x)), m.weight.to_sparse(), x.T).T
    ),
    "dense again": lambda m, x: x @ m.weight.to_sparse().to_dense().T,
    "samples": lambda m, x: torch.sparse.mm(x.relu().to_sparse(), m.weight.T),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    check_exact(Net(EXACT[name]), torch.randn(B, D), dtype=torch.float64)


def test_no_samples() -> None:
    model = Net(EXACT["coo"])
    private = make_private(model)[1]
    backward(private, torch.randn(B, D))
    backward(private, torch.randn(0, D), loss_reduction="sum")


def test_a_gradient_that_must_be_sparse() -> None:
    """torch takes no dense one there, and samples' gradients are."""
    model = Net(lambda m, x: torch.sparse.mm(torch.sparse.softmax(m.weight.to_sparse(), 1), x.T).T)
    with refused("weight: the per-sample gradients cannot be computed.*dense"):
        backward(make_private(model)[1], torch.randn(B, D))

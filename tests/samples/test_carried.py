"""What one batch leaves on the modules: refused where the next one's outputs follow from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import UnsupportedLayerError
from tests.oracle import check_exact, make_private

B, T, D = 4, 3, 5


class Carries(nn.Module):
    """Adds what an earlier batch has left, and leaves something itself."""

    left: Tensor | None = None

    def __init__(self, leaves: Callable[[Tensor], Tensor], reads: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(D, generator=generator, dtype=torch.float64))
        self.leaves, self.reads = leaves, reads

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        if self.reads and self.left is not None:
            out = out + self.left
        self.left = self.leaves(out.detach())
        return out.tanh()


def batch() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LEAVES = {
    "a statistic": lambda out: out.mean(),
    "a vector": lambda out: out.mean((0, 1)),
    "the first row": lambda out: out[0],
    "the rows": lambda out: out,
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_reaches_the_next_batch_is_refused(what: str) -> None:
    private = make_private(Carries(LEAVES[what]))[1]
    with pytest.raises(UnsupportedLayerError, match=r"\['left'\] keep numbers of one batch"):
        private(batch())


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_only_left_is_exact(what: str) -> None:
    check_exact(Carries(LEAVES[what], reads=False), batch(), dtype=torch.float64)


def test_constants_that_are_left_are_exact() -> None:
    ones = torch.ones(D, dtype=torch.float64)
    model = Carries(lambda out: ones)
    model.left = ones
    check_exact(model, batch(), dtype=torch.float64)

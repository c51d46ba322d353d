"""Rows with a dimension of no entries: what acts on them has a gradient of zeros, the rest its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.apart import check_exact_as_it_is
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)

B, D = 5, 4
Use = Callable[["Beside", Tensor], Tensor]


class Beside(nn.Module):
    """A layer of all rows beside a use of [b, t, d], summed over t."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.lin, self.conv = nn.Linear(D, 3), nn.Linear(D, 3), Conv1D(3, D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True)
        self.w, self.use = nn.Parameter(torch.randn(3, D)), use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.head(x), self.use(self, y).flatten(1, -2).sum(1)], 1)


USES: dict[str, Use] = {
    "linear": lambda m, y: m.lin(y),
    "linear, folded": lambda m, y: m.lin(y.flatten(0, 1)).view(*y.shape[:2], 3),
    "linear, more dimensions": lambda m, y: m.lin(y[:, None].expand(-1, 2, -1, -1)),
    "twice": lambda m, y: torch.cat([m.lin(y), m.lin(y.new_ones(len(y), 2, D))], 1),
    "Conv1D": lambda m, y: m.conv(y),
    "matmul": lambda m, y: y @ m.w.T,
    "einsum": lambda m, y: torch.einsum("btd,ed->bte", y, m.w),
    "derived": lambda m, y: F.linear(y, F.normalize(m.w)),
    "attention": lambda m, y: m.attention(y, y, y)[0],
    "attention to nothing": lambda m, y: m.attention(y.new_ones(len(y), 2, D), y, y)[0],
}


def batch(t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(B, D, generator=generator), torch.randn(B, t, D, generator=generator)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("lengths", [(0, 0), (3, 0), (0, 3), (0, 40)], ids=str)
def test_exact(use: str, lengths: tuple[int, int]) -> None:
    model = Beside(USES[use]).double()
    params = dict(model.named_parameters())
    inputs = [tuple(x.double() for x in batch(t)) for t in lengths]
    expected = [per_sample_gradients(model, x) for x in inputs]
    threshold = 0.5 * norms(expected[0]).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=threshold, lr=0.0)
    for x, own in zip(inputs, expected, strict=True):
        optimizer.zero_grad()
        backward(private, x)
        assert_sums(summed(params), clipped_sum(own, threshold), 1e-10)
        optimizer.step()


def test_half_precision() -> None:
    model = Beside(USES["linear"])
    _, private, optimizer, _ = make_private(model)
    for t in (0, 3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            backward(private, batch(t))
        zeros = model.lin.weight.summed_grad == 0
        assert bool(zeros.all()) is (t == 0)
        optimizer.step()


def test_without_a_layer_of_all_rows() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(D, 3), nn.Linear(3, 3)

        def forward(self, y: Tensor) -> Tensor:
            return self.out(self.lin(y).sum(1))

    check_exact_as_it_is(Alone(), batch(0)[1])

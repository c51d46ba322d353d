"""Methods of the model that are called without tensors: they hide which rows are whose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

D = 5


class Stateful(nn.Module):
    """Its batch is set by one method, and its loss computed by another."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along = along
        self.inner = nn.Linear(D, D).double()

    def set_input(self, x: Tensor) -> None:
        self.x = x

    def loss(self) -> Tensor:
        """Of a sample along axis 0, which lies along axis 1 in the layer where `along` is 1."""
        h = self.inner(self.x.transpose(0, self.along)).transpose(0, self.along)
        return h.square().mean((1, 2)).mean()

    def loss_of_forward(self) -> Tensor:
        return self(self.x).square().mean((1, 2)).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, self.along)).transpose(0, self.along)


@pytest.mark.parametrize("along", [0, 1])
def test_a_layer_is_reached(along: int) -> None:
    """Rows along axis 0 would be time steps, where the layer sees time first."""
    model = Stateful(along)
    make_private(model)
    model.set_input(torch.randn(3, 7, D, dtype=torch.float64))
    with refused("Pass the batch to the method as an argument", GraphError):
        model.loss()
    with torch.no_grad():
        model.loss()  # nothing is trained


def test_what_it_calls_with_rows_is_looked_at() -> None:
    model = Stateful(1)
    x = torch.randn(3, 7, D, dtype=torch.float64)

    def losses(out: Tensor, _: object) -> Tensor:
        return out.square().mean((1, 2))

    grads = per_sample_gradients(model, x, losses)
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)
    make_private(model, max_grad_norm=C)
    model.set_input(x)
    model.loss_of_forward().backward()
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)


class Scored(nn.Module):
    """A method that turns gradients on for itself."""

    def __init__(self, couple: bool) -> None:
        super().__init__()
        self.couple, self.inner = couple, nn.Linear(D, D).double()

    def score(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.inner(x)
            return h - h.mean(0) if self.couple else h.cos()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("couple", [False, True])
def test_gradients_that_a_method_turns_on(couple: bool) -> None:
    model, x = Scored(couple), torch.randn(3, D, dtype=torch.float64)
    grads = per_sample_gradients(model, x, lambda out, _: (out.cos()).mean(1))
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)
    make_private(model, max_grad_norm=C)
    if couple:
        with refused("depends on another sample"), torch.no_grad():
            model.score(x)
        return
    with torch.no_grad():
        out = model.score(x)
    out.mean(1).mean().backward()
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)

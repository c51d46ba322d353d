"""Values computed from parameters that are kept: within a forward pass exact, beyond it refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.apart import check_exact_as_it_is, step
from tests.oracle import backward, make_private, sample_loss
from tests.refusal import refused


class Kept(nn.Module):
    """Computes a weight once."""

    def __init__(self, then: Callable[[Tensor], Tensor] = torch.Tensor.contiguous) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)
        self.kept: Tensor | None = None
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.weight / self.weight.norm()
        return self.head(x @ self.then(self.kept))


@pytest.mark.parametrize("then", [torch.Tensor.contiguous, lambda w: w, lambda w: w * 2])
def test_kept_over_two_steps(then: Callable) -> None:
    """Used as it is, or computed with: the weights that it was computed from are no more."""
    model = Kept(then)
    _, private, optimizer, _ = make_private(model)
    x = torch.randn(4, 6)
    step(private, optimizer, x)
    with refused("outside the forward pass that computed it.*Compute it in every forward pass"):
        step(private, optimizer, x)
    model.kept = None
    step(private, optimizer, x)


def normalized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 3))


def test_cached_parametrizations_of_one_pass() -> None:
    def losses(m: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return sample_loss(m(x))

    check_exact_as_it_is(normalized(), torch.randn(4, 6), losses)


def test_cached_within_a_forward_pass() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = normalized()[0]

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                for _ in range(3):
                    x = torch.tanh(self.body(x))
            return x

    check_exact_as_it_is(Loop(), torch.randn(4, 6))


@pytest.mark.parametrize("first", [True, False])
def test_cached_parametrizations_of_two_passes(first: bool) -> None:
    """Also where the model is looked at inside."""
    _, private, optimizer, _ = make_private(normalized())
    x = torch.randn(4, 6)
    if not first:
        step(private, optimizer, x)
    with parametrize.cached():
        step(private, optimizer, x)
        with refused("outside the forward pass that computed it"):
            backward(private, x)

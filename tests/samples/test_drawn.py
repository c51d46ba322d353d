"""Random numbers that a model draws for its rows, and multiplies by a parameter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import backward, make_private, norms, relative_error, row_loss
from tests.refusal import refused

B, D = 4, 3


def uniform(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, dtype=x.dtype)


def normal(x: Tensor) -> Tensor:
    return x.new_empty(len(x), D).normal_()


def gamma(x: Tensor) -> Tensor:
    return torch.distributions.Gamma(*torch.ones(2, dtype=x.dtype)).sample((len(x), 1))


def dirichlet(x: Tensor) -> Tensor:
    return torch.distributions.Dirichlet(torch.ones(D, dtype=x.dtype)).sample((len(x),))


def one_by_one(x: Tensor) -> Tensor:
    return torch.tensor([[torch.rand(()).item()] for _ in x], dtype=x.dtype)


def numpys(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(len(x), 1))


def seeded(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, dtype=x.dtype, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """StyleGAN's layer: x + beta times noise, one draw a row."""

    def __init__(self, noise: Callable[[Tensor], Tensor], beta: Tensor) -> None:
        super().__init__()
        self.first, self.head, self.noise = nn.Linear(D, D), nn.Linear(D, 2), noise
        self.beta = nn.Parameter(beta)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(torch.tanh(h + self.beta * self.noise(h)))


def build(noise: Callable[[Tensor], Tensor], beta: Tensor) -> Noisy:
    torch.manual_seed(0)
    return Noisy(noise, beta).double()


@pytest.mark.parametrize(
    "noise", [uniform, normal, gamma, dirichlet, one_by_one], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("beta", [torch.zeros(1), torch.ones(D)], ids=["scalar", "features"])
def test_exact_under_the_draws_of_the_step(noise: Callable, beta: Tensor) -> None:
    model, x = build(noise, beta), torch.randn(B, D, dtype=torch.float64)
    twin = build(noise, beta)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        torch.manual_seed(seed)
        backward(private, x)
        torch.manual_seed(seed)
        out, parameters = twin(x), dict(twin.named_parameters())
        rows = [
            torch.autograd.grad(
                row_loss(out[i : i + 1]).sum(), parameters.values(), retain_graph=True
            )
            for i in range(B)
        ]
        grads = dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True))
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-10


@pytest.mark.parametrize(
    ("noise", "why"), [(numpys, "torch.rand"), (seeded, "treat every row of the batch alike")]
)
def test_numbers_of_a_rows_own(noise: Callable, why: str) -> None:
    _, private, _, _ = make_private(build(noise, torch.ones(1)))
    with refused(why):
        backward(private, torch.randn(B, D, dtype=torch.float64))


def counted(x: Tensor) -> Tensor:
    return x * (1.01 if len(x) > 3 else 1.0)


def placed(x: Tensor) -> Tensor:
    return torch.cat([x[:3], 1.01 * x[3:]])


def steeper(x: Tensor) -> Tensor:
    """Only its gradient follows from how many there are."""
    return x * len(x) - (x * (len(x) - 1)).detach()


class Dropped(nn.Module):
    """What random numbers of the model's own must not hide."""

    def __init__(self, coupling: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.coupling = nn.Linear(D, D), nn.Linear(D, 2), coupling

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.coupling(F.dropout(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("coupling", [counted, placed, steeper], ids=lambda f: f.__name__)
def test_couplings_behind_dropout(coupling: Callable) -> None:
    _, private, _, _ = make_private(Dropped(coupling).double())
    with refused("the number of rows|its number in the batch"):
        backward(private, torch.randn(8, D, dtype=torch.float64))

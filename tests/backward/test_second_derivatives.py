"""Gradients of gradients through the private model: refused, with the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused


class Token(nn.Module):
    """A parameter that is expanded to the batch, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * self.token).sin())


class Own(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() @ self.gain


MODELS = {"mlp": mlp, "token": lambda: Token().double(), "own": lambda: Own().double()}


def linear() -> nn.Module:
    """The gradient by its input is its weight: no output or input is part of it."""
    return nn.Sequential(nn.Linear(6, 3).double())


@pytest.mark.parametrize("build", [mlp, linear])
@pytest.mark.parametrize("beside", [True, False])
def test_penalty_of_a_critic(build: Callable[[], nn.Module], beside: bool) -> None:
    """Of the plain sum of the outputs (WGAN-GP), whose own gradient is a constant."""
    private, x = make_private(build())[1], rows().requires_grad_()
    out = private(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    penalty = (g.norm(dim=1) - 1).square()
    with refused("errors.html#second-backward", GraphError):
        (penalty + out.sum(1) if beside else penalty).mean().backward()
    assert all(p.grad is None and p.summed_grad is None for p in private.parameters())


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_penalty(name: str, wrap: bool) -> None:
    """A gradient taken through the model, in the loss: the penalty alone, or beside the loss."""
    plain, model = MODELS[name](), MODELS[name]()
    plain.load_state_dict(model.state_dict())
    private = make_private(model, wrap_model=wrap)[1]
    net = private if wrap else model
    x = rows().requires_grad_()
    losses = sample_loss(net(x))
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(sample_loss(plain(x)).sum(), x)
    assert relative_error(g.detach(), expected) <= 1e-10
    penalty = (g.norm(dim=1) - 1).square()
    for loss in (penalty.mean(), (losses + penalty).mean()):
        with refused("errors.html#second-backward", GraphError):
            loss.backward(retain_graph=True)
        assert all(p.grad is None and p.summed_grad is None for p in model.parameters())
    x = rows()
    expected = clipped_sum(per_sample_gradients(plain, x), 1.0)
    backward(net, x)  # and the next pass is as ever
    assert_sums(summed(dict(model.named_parameters())), expected, 1e-10)


def test_hessian_of_the_input() -> None:
    private = make_private(mlp())[1]
    with refused("errors.html#second-backward", GraphError):
        torch.autograd.functional.hessian(lambda x: sample_loss(private(x)).sum(), rows())


def test_a_frozen_part_can_be_differentiated_twice() -> None:
    """Only private layers cannot."""
    frozen = mlp(6).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(6, 3).double())
    private, x = make_private(model)[1], rows().requires_grad_()
    h = frozen(x)
    (g,) = torch.autograd.grad(sample_loss(h).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    assert second.any()
    backward(private, rows())


class Slope(nn.Module):
    """The way out: the difference of the outputs at two inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x + 1e-2) - self.net(x)) / 1e-2 - 1


def test_a_penalty_of_differences() -> None:
    net, x = mlp(), rows()
    grads = per_sample_gradients(Slope(net), x)
    C = norms(grads).median().item()
    params = {f"net.{n}": p for n, p in net.named_parameters()}
    _, private, optimizer, _ = make_private(net, max_grad_norm=C)
    sample_loss(Slope(private)(x)).mean().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-8
    assert_sums(summed(params), clipped_sum(grads, C), 1e-8)

"""What another optimizer trains by the private model's loss is refused: nobody clips its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.errors import ArgumentError, ParameterLeakError
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

WAY_OUT = "Make one module of it"
ROWS = 4


class Centred(nn.Module):
    """The mean distance to a centre of its own."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, out: Tensor, _: Tensor | None = None) -> Tensor:
        return (out - self.centre).square().sum(1).mean()


def private_model(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    _, private, _, _ = make_private(mlp(), batch_size=ROWS, **kwargs)  # type: ignore[arg-type]
    return private


def test_a_criterion_with_weights_of_its_own() -> None:
    with refused(WAY_OUT, ArgumentError):
        private_model(criterion=Centred())
    frozen = Centred()
    frozen.requires_grad_(False)
    private_model(criterion=frozen)


def test_the_criterion_may_be_a_part_of_the_model() -> None:
    model = nn.ModuleDict({"net": mlp(), "loss": Centred()})
    make_private(model, batch_size=ROWS, criterion=model["loss"])


def temperature(out: Tensor) -> Tensor:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    return (out * scale).square().sum(1).mean()


def penalty(out: Tensor) -> Tensor:
    return out.square().mean() + nn.Parameter(torch.ones(2, 2)).square().sum()


@pytest.mark.parametrize("loss", [Centred(), temperature, penalty])
def test_a_loss_that_trains_something_else(loss: Callable[[Tensor], Tensor]) -> None:
    private = private_model()
    with refused(WAY_OUT, ParameterLeakError):
        loss(private(rows(ROWS))).backward()


def test_a_loss_that_comes_later() -> None:
    private = private_model()
    for _ in range(4):
        private(rows(ROWS)).square().mean().backward()
    with refused(WAY_OUT, ParameterLeakError):
        Centred()(private(rows(ROWS))).backward()


@pytest.mark.parametrize("keyword", [False, True])
def test_a_part_in_front(keyword: bool) -> None:
    private, front = private_model(), nn.Linear(6, 6).double()
    x = front(rows(ROWS)).tanh()
    with refused(WAY_OUT, ParameterLeakError):
        (private(input=x) if keyword else private(x)).square().mean().backward()
    assert front.weight.grad is None


def test_one_perturbation_of_all_rows() -> None:
    private = private_model()
    delta = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    with refused(WAY_OUT, ParameterLeakError):
        private(rows(ROWS) + delta).square().mean().backward()


def frozen_front(x: Tensor) -> Tensor:
    return nn.Linear(6, 6).double().requires_grad_(False)(x)


def detached_front(x: Tensor) -> Tensor:
    return nn.Linear(6, 6).double()(x).detach()


def attacked(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).requires_grad_()


@pytest.mark.parametrize("front", [frozen_front, detached_front, attacked])
def test_what_trains_nothing_else_is_exact(front: Callable[[Tensor], Tensor]) -> None:
    private = private_model()
    x = front(rows(ROWS))
    private(x).square().sum(1).mean().backward()
    plain = mlp()
    plain.load_state_dict(private._module.state_dict())
    expected = clipped_sum(
        per_sample_gradients(plain, x.detach(), lambda out, _: out.square().sum(1)), 1.0
    )
    assert_sums(summed(dict(private._module.named_parameters())), expected, 1e-12)


def test_gradients_that_are_not_asked_for() -> None:
    """A pass that is told what to train leaves the centre alone."""
    private, loss = private_model(), Centred()
    loss(private(rows(ROWS))).backward(inputs=list(private.parameters()))
    assert loss.centre.grad is None


def test_a_leaf_that_only_makes_a_checkpoint_run() -> None:
    """Reentrant checkpoints ask for an input that requires a gradient, and give it none."""
    private, dummy = private_model(), torch.ones(1, requires_grad=True)
    out = checkpoint(lambda x, _: private._module[0](x), rows(ROWS), dummy, use_reentrant=True)
    private._module[2](out.tanh()).square().mean().backward()
    assert dummy.grad is None


def test_after_a_pass_that_was_refused() -> None:
    """Another loss may train it, without the private model."""
    private, loss = private_model(), Centred()
    with refused(WAY_OUT, ParameterLeakError):
        loss(private(rows(ROWS))).backward()
    loss(torch.ones(2, 3, dtype=torch.float64)).backward()
    assert loss.centre.grad is not None


def test_two_private_models_of_one_loss() -> None:
    first, second = private_model(), private_model()
    x = rows(ROWS)
    (first(x) + second(x)).square().mean().backward()
    second(first(x).repeat(1, 2)).square().mean().backward()
    for private in (first, second):
        assert all(p.grad is None for p in private.parameters())

"""What a loop does between backward() and step() reaches no raw sums: they are nobody's `p.grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.optimizer.test_optimizers import private_with
from tests.networks import mlp
from tests.oracle import backward, clipped_sum, per_sample_gradients, relative_error, summed

ROWS = 4
Between = Callable[[nn.Module, Any], object]


def start(build: Any = lambda p: torch.optim.SGD(p, lr=0.1)) -> tuple[Any, Any, nn.Module]:
    """A private model, its optimizer, and the model itself."""
    _, private, optimizer = private_with(build)
    return private, optimizer, private._module


def batch(model: nn.Module, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return 5 * torch.randn(ROWS, model[0].in_features, dtype=model[0].weight.dtype)


def released(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The mean of the clipped gradients, of what is trained."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    sums = clipped_sum(per_sample_gradients(twin, x), 1.0)
    return {name: total / ROWS for name, total in sums.items()}


def grads(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


BETWEEN: dict[str, Between] = {
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-6),
    "grad is None": lambda model, _: [setattr(p, "grad", None) for p in model.parameters()],
    "a grad of zeros": lambda model, _: [
        setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()
    ],
    "the inner zero_grad": lambda _, optimizer: optimizer.original_optimizer.zero_grad(False),
    "nothing": lambda *_: None,
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("between", BETWEEN)
def test_nothing_reaches_the_sums(between: str) -> None:
    private, optimizer, model = start()
    x = batch(model)
    expected = released(model, x)
    backward(private, x)
    assert all(p.grad is None for p in model.parameters())
    BETWEEN[between](model, optimizer)
    optimizer.step()
    assert relative_error(grads(model), expected) <= 1e-10


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sums_are_cleared_with_the_gradients(set_to_none: bool) -> None:
    private, optimizer, model = start()
    backward(private, batch(model))
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.summed_grad is None for p in model.parameters())
    assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())
    x = batch(model, 1)
    expected = released(model, x)
    backward(private, x)
    optimizer.step()
    assert relative_error(grads(model), expected) <= 1e-10


def test_a_gradient_that_was_kept_stays_what_it_was() -> None:
    private, optimizer, model = start()
    backward(private, batch(model))
    optimizer.step()
    kept = grads(model)
    before = {name: g.clone() for name, g in kept.items()}
    for seed in (1, 2):
        optimizer.zero_grad()
        backward(private, batch(model, seed))
        optimizer.step()
    assert all(torch.equal(g, before[name]) for name, g in kept.items())


class Replaces(torch.optim.SGD):
    """Puts tensors of its own in the place of the gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = 2 * p.grad
        return super().step(closure)


def test_an_optimizer_that_replaces_gradients() -> None:
    private, optimizer, model = start(lambda p: Replaces(p, lr=0.5))
    for seed in range(2):
        x, before = batch(model, seed), {n: p.detach().clone() for n, p in model.named_parameters()}
        expected = released(model, x)
        backward(private, x)
        optimizer.step()
        optimizer.zero_grad()
        moved = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        assert relative_error(moved, expected) <= 1e-10


def test_parameters_that_join_late() -> None:
    private, optimizer, model = start()
    model[0].requires_grad_(False)
    for seed in range(3):
        if seed == 2:
            model[0].requires_grad_(True)
        x = batch(model, seed)
        expected = released(model, x)
        backward(private, x)
        found = summed(dict(model.named_parameters()))
        assert relative_error(found, {n: ROWS * g for n, g in expected.items()}) <= 1e-10
        optimizer.step()
        found = {n: g for n, g in grads(model).items() if n in expected}
        assert relative_error(found, expected) <= 1e-10
        optimizer.zero_grad()

"""Samples are told by what a model was called with, whatever its `__call__` or a hook makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.errors import UnsupportedLayerError
from tests.oracle import (
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, T, D = 5, 3, 4


class Base(nn.Module):
    """A model of rows [d]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gain)


class Folds(Base):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x.reshape(-1, D)).view_as(x)


class FoldsAndCalls(Base):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.reshape(-1, D)).view_as(x)


class Uses(Base):
    """Its parameters, before forward and after it."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * self.gain) + self.gain


class Layer(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.reshape(-1, D)).view_as(x)


class Couples(Base):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x - x.mean(0))


class CouplesAfter(Base):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).softmax(0)


Hook = Callable[[nn.Module, tuple], Any]


def hooked(hook: Hook) -> nn.Module:
    model = Base()
    model.register_forward_pre_hook(hook)
    model.register_forward_hook(lambda m, args, out: out.view(-1, T, D))
    return model


def folds(m: nn.Module, args: tuple) -> tuple:
    return (args[0].reshape(-1, D),)


def couples(m: nn.Module, args: tuple) -> tuple:
    return (args[0] - args[0].mean(0),)


EXACT: dict[str, Callable[[], nn.Module]] = {
    "folds": Folds, "folds and calls": FoldsAndCalls, "uses": Uses, "a layer": lambda: Layer(D, D),
    "a hook": lambda: hooked(folds),
}  # fmt: skip
COUPLED: dict[str, Callable[[], nn.Module]] = {
    "before": Couples, "after": CouplesAfter, "in a hook": lambda: hooked(couples),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    check_exact(EXACT[name](), torch.randn(B, T, D), dtype=torch.float64)


@pytest.mark.parametrize("name", EXACT)
def test_one_sample(name: str) -> None:
    """Its tokens are no samples."""
    model = EXACT[name]().double()
    backward(make_private(model, max_grad_norm=0.01)[1], 9 * torch.randn(1, T, D).double())
    total = torch.stack([x.norm() for x in summed(dict(model.named_parameters())).values()])
    assert float(total.norm()) <= 0.01 * (1 + 1e-6)


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    with refused("another sample"):
        backward(make_private(COUPLED[name]())[1], torch.randn(B, T, D))


@pytest.mark.parametrize("name", [*EXACT, *COUPLED])
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_model_itself(name: str, wrapped: bool) -> None:
    """Nobody sees what is called there."""
    model = {**EXACT, **COUPLED}[name]()
    private = make_private(model, wrap_model=wrapped)[1]
    x = torch.randn(B, T, D)
    with refused("overrides __call__|pre-hook", UnsupportedLayerError):
        model(x)
    with torch.no_grad():
        model(x)
    private.cleanup()
    backward(model, x)


class Whole(nn.Module):
    """What happens in a part is seen."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.part, self.again = Folds(), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)


@pytest.mark.parametrize("again", [False, True])
def test_a_part(again: bool) -> None:
    check_exact(Whole(again), torch.randn(B, T, D), dtype=torch.float64)


def test_a_part_by_itself() -> None:
    model, x = Whole(), torch.randn(B, T, D)
    private = make_private(model)[1]
    with refused(r"^part \(Folds\) overrides __call__", UnsupportedLayerError):
        private.part(x)


@pytest.mark.parametrize("wrapped", [True, False])
def test_hooks_that_change_nothing(wrapped: bool) -> None:
    seen: list[Any] = []
    model, x = Base().double(), torch.randn(B, D).double()
    grads = per_sample_gradients(model, x)
    model.register_forward_pre_hook(lambda m, args: seen.append(args))
    private = make_private(model, max_grad_norm=1.0, wrap_model=wrapped)[1]
    backward(private if wrapped else model, x)
    assert seen
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 1.0), 1e-10)


def test_a_hook_that_comes_later() -> None:
    model = Base()
    private, x = make_private(model)[1], torch.randn(B, D)
    backward(private, x)
    model.register_forward_pre_hook(couples)
    with refused("another sample"):
        backward(private, x)

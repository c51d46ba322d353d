"""Runs of which only the values count save nothing for gradients, and see what other runs would."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastclip.samples.probing import unsaved
from tests.oracle import check_exact, make_private
from tests.refusal import refused

B, D = 32, 4


def test_nothing_is_saved_of_what_was_computed() -> None:
    w = torch.ones(3, requires_grad=True)
    inside: list[weakref.ref] = []

    def run() -> Tensor:
        y = w.exp()
        inside.append(weakref.ref(y))
        return y.sin()

    out = unsaved(run)
    assert out.requires_grad
    assert [y() for y in inside] == [None]
    with pytest.raises(Exception, match="nothing was saved"):
        out.sum().backward()


def ask(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(z.sin().sum(), z)[0]


def ask_twice(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(z.sin().sum(), z, create_graph=True)
        return torch.autograd.grad(g.sum(), z)[0]


def ask_and_catch(x: Tensor) -> Tensor:
    try:
        return ask(x)
    except Exception:
        return torch.zeros_like(x)


def ask_through_a_checkpoint(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(checkpoint(torch.sin, z, use_reentrant=False).sum(), z)[0]


class Sine(torch.autograd.Function):
    """As somebody writes it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def ask_through_a_function(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(Sine.apply(z).sum(), z)[0]


def ask_by_a_transform(x: Tensor) -> Tensor:
    """It raises where tensors are packed."""
    return torch.func.grad(lambda z: z.sin().sum())(x.detach())


ASKING = [ask, ask_twice, ask_and_catch, ask_through_a_checkpoint, ask_through_a_function]
SAVING = [
    lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    Sine.apply,
]


@pytest.mark.parametrize("part", [*ASKING, ask_by_a_transform])
def test_who_asks_for_gradients_gets_them_in_a_run_that_saves(part: Callable) -> None:
    x = torch.randn(3)
    calls: list[int] = []

    def run() -> Tensor:
        calls.append(1)
        return part(x)

    assert torch.equal(unsaved(run), part(x))
    assert len(calls) == 2


@pytest.mark.parametrize("part", SAVING)
def test_who_only_saves_runs_once(part: Callable) -> None:
    x = torch.randn(3, requires_grad=True)
    calls: list[int] = []

    def run() -> Tensor:
        calls.append(1)
        return part(x)

    assert torch.equal(unsaved(run), x.sin())
    assert len(calls) == 1


def test_an_error_of_the_run_is_its_own() -> None:
    def run() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        unsaved(run)


class Model(nn.Module):
    """Adds what `part` makes of the input; where rows are many, the mean of its group to each one."""

    def __init__(self, part: Callable, group: int = 0) -> None:
        super().__init__()
        self.first, self.head, self.part, self.group = nn.Linear(D, 8), nn.Linear(8, 2), part, group

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.tanh(self.first(x + self.part(x))))
        if self.group and len(x) >= self.group:
            whole = len(x) // self.group * self.group
            means = out[:whole].detach().unflatten(0, (-1, self.group)).mean(1)
            mixed = out[:whole] + means.repeat_interleave(self.group, 0)
            out = torch.cat([mixed, out[whole:]])
        return out


@pytest.mark.parametrize("part", [*ASKING, *SAVING])
def test_models_that_compute_gradients_inside_are_looked_at(part: Callable) -> None:
    check_exact(Model(part), torch.randn(B, D), dtype=torch.float64)


@pytest.mark.parametrize("group", [9, 16, B])
@pytest.mark.parametrize("part", [torch.sin, *ASKING, *SAVING])
def test_rows_that_are_coupled_in_large_batches_alone(part: Callable, group: int) -> None:
    private = make_private(Model(part, group))[1]
    with refused("independently of the others"):
        private(torch.randn(B, D))

"""What a look cannot follow raises an error that names the function or the input, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import BatchSizeError, UnsupportedLayerError
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, T, D = 4, 5, 6
YES = torch.tensor(True)
HIGHER = torch.ops.higher_order


class Model(nn.Module):
    """A layer, what a test does to its output, and a head."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.weight = nn.Parameter(torch.rand(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.does(self, self.first(x)))


def counted(m: Model, h: Tensor) -> Tensor:
    less, more = lambda i, h: i < 2, lambda i, h: (i + 1, h.tanh())
    return HIGHER.while_loop(less, more, (torch.tensor(0), h), ())[1]


GIVEN: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "cond": lambda m, h: HIGHER.cond(YES, torch.tanh, torch.sin, (h,)),
    "cond of a layer": lambda m, h: HIGHER.cond(YES, m.first, torch.sin, (h,)),
    "cond of a parameter": lambda m, h: HIGHER.cond(YES, torch.mm, torch.mm, (h, m.weight)),
    "cond of nothing": lambda m, h: h - HIGHER.cond(YES, lambda: h.mean(0), lambda: h.sum(0), ()),
    "while_loop": counted,
}


@pytest.mark.parametrize("name", GIVEN)
def test_functions_that_are_given(name: str) -> None:
    private = make_private(Model(GIVEN[name]))[1]
    told = rf"^{name.split()[0]} at test_unfollowed\.py:\d+ runs functions"
    for _ in range(2):
        with refused(told, UnsupportedLayerError):
            private(torch.randn(B, D))
    with torch.no_grad():  # where there is nothing to follow
        assert private(torch.randn(B, D)).shape == (B, 3)


def test_functions_that_are_given_in_a_loss() -> None:
    """What they hold without being given it, nobody sees: here all samples."""

    def loss(out: Tensor, target: Any) -> Tensor:
        mean = HIGHER.cond(YES, lambda: out.mean(0) * 1, lambda: out.sum(0) * 1, ())
        return (out * mean.detach()).sum(1)

    with refused("mixes samples: cond"):
        backward(make_private(Model(lambda m, h: h))[1], torch.randn(B, D), loss)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(k, D) for k in (2, 3, 4)], layout=layout)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_nested_inputs(layout: torch.layout, beside: bool, later: bool) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            return super().forward(x)

    private = make_private(Net(D, 3))[1]
    x = torch.randn(3, T, D)
    if later:
        backward(private, (x, x) if beside else x)
    for _ in range(2):
        with refused("^input [01]: expected a dense tensor, got a nested one", BatchSizeError):
            private(*((x, nested(layout)) if beside else (nested(layout),)))


def fails_in_looks(m: Model, h: Tensor) -> Tensor:
    """Unlike a look's own, the user's call runs."""
    if type(m.weight) is not nn.Parameter:
        raise LookupError("what class is this")
    return h


def test_an_error_of_the_looks_own() -> None:
    private = make_private(Model(fails_in_looks))[1]
    with refused(r"LookupError at test_unfollowed\.py:\d+: what class is this"):
        private(torch.randn(B, D))


@pytest.mark.parametrize("when", ["always", "few rows"])
def test_an_error_of_the_users_own(when: str) -> None:
    """A look has nothing to say of a call that fails by itself."""

    def fails(m: Model, h: Tensor) -> Tensor:
        if when == "always" or len(h) < B:
            raise LookupError("not mine")
        return h

    private = make_private(Model(fails))[1]
    with pytest.raises(LookupError if when == "always" else BatchSizeError, match="not mine"):
        private(torch.randn(B, D))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


class Only(nn.Module):
    """Its trained parameter goes where nobody sees it."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.frozen = does, nn.Linear(D, D).requires_grad_(False)
        self.weight = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


ONLY: dict[str, Callable[[Only, Tensor], Tensor]] = {
    "alone": lambda m, x: Scale.apply(x, m.weight),
    "behind a frozen layer": lambda m, x: Scale.apply(m.frozen(x), m.weight),
    "of parameters": lambda m, x: x * Scale.apply(m.frozen.weight, m.weight).sum(0),
}


@pytest.mark.parametrize("name", ONLY)
def test_a_function_of_the_users_alone(name: str) -> None:
    private = make_private(Only(ONLY[name]))[1]
    with refused("parameter 'weight' was used where it could not be followed.*custom autograd"):
        backward(private, torch.randn(B, D))


def test_calls_that_train_nothing_are_looked_at() -> None:
    private = make_private(Only(lambda m, x: Scale.apply(x - x.mean(0), m.weight)))[1]
    with refused("another sample's row"):
        backward(private, torch.randn(B, D))


class Adapted(nn.Module):
    """Without its adapter, what it gives is a reference."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)

    def forward(self, x: Tensor, adapted: bool = True) -> Tensor:
        return self.base(x) + self.adapter(x) if adapted else self.base(x)


def test_a_first_call_that_trains_nothing() -> None:
    model, x = Adapted().double(), torch.randn(B, D).double()
    grads = per_sample_gradients(model, x)
    private = make_private(model, max_grad_norm=2.0)[1]
    private(x, adapted=False)
    backward(private, x)
    found = summed({n: p for n, p in model.named_parameters() if n in grads})
    assert_sums(found, clipped_sum(grads, 2.0), 1e-10)

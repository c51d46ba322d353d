"""Ways for a parameter to be used unseen: followed exactly, or an error; never a lost gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as Native
from torch.utils.checkpoint import checkpoint

from fastclip.errors import FastclipError, ParameterLeakError
from tests.oracle import make_private
from tests.refusal import refused
from tests.zoo.arguments import parameter
from tests.zoo.member import D, Member, check, mean_of_rows, sequence

Use = Callable[["Escape", Tensor], Tensor]


class Escape(nn.Module):
    """A layer, and a function that uses parameters in some way."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.other, self.use = nn.Linear(D, D), nn.Linear(D, D), use
        self.p, self.w = parameter(D), parameter(D, D)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, torch.tanh(self.layer(x)))


class Scale(torch.autograd.Function):
    """x * p, whose gradient it computes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum((0, 1))


@torch.jit.script
def scripted(x: Tensor, p: Tensor) -> Tensor:
    return torch.tanh(x * p)


def in_a_thread(m: Escape, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * m.p))
    thread.start()
    thread.join()
    return found[0]


def natively(m: Escape, x: Tensor) -> Tensor:
    with Native():
        return x * m.p


def derived_natively(m: Escape, x: Tensor) -> Tensor:
    with Native():
        return x * m.p.exp()


def used_natively(m: Escape, x: Tensor) -> Tensor:
    w = m.p.exp()
    with Native():
        return x * w


def taught_by_the_batch(m: Escape, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.p.add_(x.mean((0, 1)))
    return x * m.p


def called_with(weight: Callable[[Escape], Tensor]) -> Use:
    def use(m: Escape, x: Tensor) -> Tensor:
        held = {"weight": weight(m), "bias": m.p}
        return torch.func.functional_call(m.other, held, x)

    return use


def gradient_of_the_input(m: Escape, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((m.other(x) * m.p).tanh().sum(), x, create_graph=True)[0]


def in_a_checkpoint(reentrant: bool, derived: bool = False, given: bool = False) -> Use:
    def use(m: Escape, x: Tensor) -> Tensor:
        value = (lambda: m.p.exp()) if derived else (lambda: m.p)
        if given:
            return checkpoint(lambda h, w: (h * w).tanh(), x, value(), use_reentrant=reentrant)
        return checkpoint(lambda h: (h * value()).tanh(), x, use_reentrant=reentrant)

    return use


def out_of_a_checkpoint(reentrant: bool) -> Use:
    """As T5's position bias: the first block makes it, the others are given it."""

    def block(m: Escape, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = (m.w[0] * m.p).exp()[None, None] if bias is None else bias
        return (m.other(h) + bias).tanh(), bias

    def use(m: Escape, x: Tensor) -> Tensor:
        bias = None
        for _ in range(3):
            x, bias = checkpoint(block, m, x, bias, use_reentrant=reentrant)
        return x * bias.sum((0, 1))

    return use


def through_a_hook(m: Escape, x: Tensor) -> Tensor:
    handle = m.other.register_forward_hook(lambda module, given, out: out * m.p)
    try:
        return m.other(x)
    finally:
        handle.remove()


FOLLOWED: dict[str, Use] = {
    "aten": lambda m, x: torch.ops.aten.mul(x, m.p),
    "aten, derived": lambda m, x: torch.ops.aten.mul(x, m.p.exp()),
    "a method of the base class": lambda m, x: torch._C.TensorBase.mul(x, m.p),
    "torch._C": lambda m, x: torch._C._VariableFunctions.mul(x, m.p),
    "alias": lambda m, x: x * torch.ops.aten.alias(m.p),
    "detached": lambda m, x: x * m.p.detach() + m.p,
    "data": lambda m, x: x * m.p.data + m.p,
    "numpy": lambda m, x: x * torch.from_numpy(m.p.detach().numpy()) + m.p,
    "numbers": lambda m, x: x * float(m.p[0]) + m.p * m.p.tolist()[1],
    "an operator from the other side": lambda m, x: 2 - m.p / (3 + x * x) ** m.w[0],
    "an autograd function of the batch": lambda m, x: Scale.apply(x, m.p.detach()) + m.p,
    "a scripted function of the batch": lambda m, x: scripted(x, m.p.detach()) + m.p,
    "a future": lambda m, x: torch.jit.wait(torch.jit.fork(lambda h: h * m.p, x)),
    "a hook": through_a_hook,
    "a thread": in_a_thread,
    "a checkpoint": in_a_checkpoint(reentrant=False),
    "a derived value in a checkpoint": in_a_checkpoint(reentrant=False, derived=True),
    "a derived value given to a checkpoint": in_a_checkpoint(False, derived=True, given=True),
    "a reentrant checkpoint": in_a_checkpoint(reentrant=True),
    "a derived value in a reentrant checkpoint": in_a_checkpoint(reentrant=True, derived=True),
    "functional_call of parameters": called_with(lambda m: m.w),
    "functional_call of derived values": called_with(lambda m: m.w.exp()),
    "given to a reentrant checkpoint": in_a_checkpoint(reentrant=True, given=True),
    "derived, given to a reentrant checkpoint": in_a_checkpoint(True, derived=True, given=True),
    "a derived value out of a checkpoint": out_of_a_checkpoint(reentrant=False),
    "a derived value out of a reentrant checkpoint": out_of_a_checkpoint(reentrant=True),
}
"""To be exact."""

CAUGHT: dict[str, Use] = {
    "an autograd function": lambda m, x: Scale.apply(x, m.p),
    "an autograd function, derived": lambda m, x: Scale.apply(x, m.p.exp()),
    "a scripted function": lambda m, x: scripted(x, m.p),
    "a scripted function, derived": lambda m, x: scripted(x, m.p.exp()),
    "unseen": natively,
    "unseen, derived": derived_natively,
    "derived, used unseen": used_natively,
    "another class": lambda m, x: x * m.p.as_subclass(Tensor),
    "taught by the batch": taught_by_the_batch,
    "functional_call of another's": lambda m, x: torch.func.functional_call(
        m.other, dict(m.layer.named_parameters()), x
    ),
    "vmap": lambda m, x: torch.vmap(lambda row: row * m.p)(x),
    "vmap, derived": lambda m, x: torch.vmap(lambda row, w: row * w, (0, None))(x, m.p.exp()),
    "grad of a function": lambda m, x: torch.func.vmap(
        torch.func.grad(lambda row: (row * m.p).tanh().sum())
    )(x),
    "grad by a parameter": lambda m, x: (
        x * torch.func.grad(lambda w: (x.detach() * w).tanh().mean())(m.p)
    ),
    "a gradient of the input": gradient_of_the_input,
}
"""To be exact, or refused with an error of fastclip."""


def member(name: str, use: Use) -> Member:
    return Member(name, "escapes", lambda: Escape(use))


def check_or_refused(one: Member, sizes: tuple[int, ...]) -> None:
    try:
        check(one, sizes=sizes)
    except FastclipError as error:
        message = str(error)
    else:
        return
    assert len(message) > 40


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    check(member(name, FOLLOWED[name]), sizes=(3,))


@pytest.mark.parametrize("name", CAUGHT)
def test_caught_or_exact(name: str) -> None:
    try:
        check_or_refused(member(name, CAUGHT[name]), (3,))
    except RuntimeError as error:  # torch.func says itself that it cannot run beside a look
        if "saved tensor hooks" not in str(error):
            raise


@pytest.mark.parametrize("value", [lambda m: m.p, lambda m: m.p.exp()], ids=["itself", "derived"])
@pytest.mark.parametrize(
    "function", [lambda *xs: Scale.apply(*xs), scripted], ids=["own", "scripted"]
)
def test_what_was_met_and_the_way_out(function: Callable, value: Callable) -> None:
    one = member("function", lambda m, x: function(x, value(m)))
    way_out = r"custom autograd function.*errors\.html#untracked-use"
    with refused(way_out, ParameterLeakError):
        check(one, sizes=(3,))


def kept_over_steps(m: Escape, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.p.neg()
    return x * m.kept


def test_a_value_of_an_earlier_step() -> None:
    """Its numbers are those before the step; autograd goes back through them all the same."""
    check_or_refused(member("kept", kept_over_steps), (3, 3))


@pytest.mark.parametrize("derived", [False, True])
def test_a_use_after_the_forward_is_refused(derived: bool) -> None:
    """The loss is no part of the model: what it does with a parameter has no rows to follow."""
    model = member("after", lambda m, x: x * m.p).model()
    _, private, optimizer, _ = make_private(model)

    def step() -> None:
        optimizer.zero_grad()
        out = private(sequence(3))
        value = model.w.exp() if derived else model.w
        (mean_of_rows(lambda y: y, out) + (out @ value).square().mean()).backward()  # type: ignore[arg-type]
        optimizer.step()

    with pytest.raises(FastclipError):
        step()

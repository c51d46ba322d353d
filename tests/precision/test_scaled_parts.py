"""A scaled loss that is part of another: one pass has one scale, in whatever order it was written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip import GradScaler
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

S = 4096.0
WAY_OUT = r"scaler\.scale\(a \+ b\)"


def scaled_first(a: Tensor, make_b: Callable[[], Tensor]) -> Tensor:
    scaled = GradScaler(init_scale=S).scale(a)
    return scaled + make_b()


def scaled_last(a: Tensor, make_b: Callable[[], Tensor]) -> Tensor:
    b = make_b()
    return b + GradScaler(init_scale=S).scale(a)


def deep(a: Tensor, make_b: Callable[[], Tensor]) -> Tensor:
    """The unscaled part lies below other operations."""
    scaled = GradScaler(init_scale=S).scale(a)
    return torch.stack([scaled / 2, (3 * make_b()).sqrt()]).sum()


ORDERS = {"scaled first": scaled_first, "scaled last": scaled_last, "deep": deep}


@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_one_output(order: str) -> None:
    """The gradients of both are added up before they reach the model."""
    model = mlp()
    private = make_private(model)[1]
    out = sample_loss(private(rows()))
    with refused(WAY_OUT, GraphError):
        ORDERS[order](out[:2].sum() / 5, lambda: out[2:].sum() / 5).backward()
    assert all(p.summed_grad is None for p in model.parameters())
    backward(private, rows())  # and the next pass is as ever


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_two_forwards(order: str, first: str) -> None:
    """Either may be reached before the other's scale is known: two views of the same samples."""
    model, x = mlp(), rows()
    private = make_private(model)[1]
    if first == "a":
        a, b = (sample_loss(private(v)).mean() for v in (x, x.sin()))
    else:
        b, a = (sample_loss(private(v)).mean() for v in (x.sin(), x))
    with refused("clipping would be wrong", GraphError):
        ORDERS[order](a, lambda: b).backward()
    assert all(p.summed_grad is None for p in model.parameters())


@pytest.mark.parametrize("swap", [False, True])
def test_two_losses_of_one_call(swap: bool) -> None:
    private = make_private(mlp())[1]
    out = sample_loss(private(rows()))
    losses = [GradScaler().scale(out[:2].sum() / 5), out[2:].sum() / 5]
    with refused(WAY_OUT, GraphError):
        torch.autograd.backward(losses[::-1] if swap else losses)


class Heads(nn.Module):
    """Two outputs, which open the pass one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(), mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_two_outputs(order: str, which: int) -> None:
    model = Heads()
    private = make_private(model)[1]
    out = [sample_loss(o).mean() for o in private(rows())]
    with refused("clipping would be wrong", GraphError):
        ORDERS[order](out[which], lambda: out[1 - which]).backward()
    assert all(p.summed_grad is None for p in model.parameters())


def test_the_output_itself() -> None:
    """A model that returns its loss: nothing lies between it and the sum."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return sample_loss(self.net(x)).mean()

    private = make_private(WithLoss())[1]
    out = private(rows())
    with refused(WAY_OUT, GraphError):
        (GradScaler().scale(out) + out).backward()
    GradScaler().scale(private(rows())).backward()


def test_two_models() -> None:
    """One of them is scaled, the other is not; both orders of their backward passes."""
    for swap in (False, True):
        (_, one, *_), (_, two, *_) = make_private(mlp()), make_private(mlp())
        models = (two, one) if swap else (one, two)
        a, b = (sample_loss(m(rows())).mean() for m in models)
        with refused("clipping would be wrong", GraphError):
            (GradScaler().scale(a) + b).backward()


def test_scaled_within_scaled() -> None:
    """The same scale twice: the gradients hold its square."""
    private = make_private(mlp())[1]
    out, scaler = sample_loss(private(rows())), GradScaler()
    inner = scaler.scale(out[:2].sum() / 5)
    with refused("scaled loss is part of", GraphError):
        scaler.scale(inner + out[2:].sum() / 5).backward()


EXACT: dict[str, Callable[[GradScaler, Tensor], Tensor]] = {
    "whole": lambda s, v: s.scale(v.mean()),
    "sum of scaled": lambda s, v: s.scale(v[:2].sum() / 5) + s.scale(v[2:].sum() / 5),
    "list": lambda s, v: sum(s.scale([v[:2].sum() / 5, v[2:].sum() / 5])),
    "divided afterwards": lambda s, v: s.scale(4 * v.mean()) / 4,
    "a constant added": lambda s, v: s.scale(v.mean()) + 1.0,
    "a scale of one, and unscaled": lambda s, v: (
        GradScaler(init_scale=1.0).scale(v[:2].sum() / 5) + v[2:].sum() / 5
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_stays_exact(name: str) -> None:
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    loss = EXACT[name](GradScaler(init_scale=S), sample_loss(private(x)))
    assert loss.item() == pytest.approx(loss.detach().item())
    loss.backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-12
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)


def test_losses_of_one_call_that_are_all_scaled() -> None:
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    losses, scaler = sample_loss(private(x)), GradScaler(init_scale=S)
    parts = scaler.scale((losses[:2].sum() / 5, losses[2:].sum() / 5))
    torch.autograd.backward(parts, retain_graph=True)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)
    optimizer.step()


def test_a_loss_of_a_plain_model_beside_it() -> None:
    """Its gradients are its own business; those of the private one have their unit."""
    model, plain, x = mlp(), mlp().requires_grad_(False), rows()
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    private = make_private(model, max_grad_norm=C)[1]
    own = x.clone().requires_grad_()
    beside = sample_loss(plain(own)).mean()
    (GradScaler(init_scale=S).scale(sample_loss(private(x)).mean()) + beside).backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)
    assert own.grad is not None

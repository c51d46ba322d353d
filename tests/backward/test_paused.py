"""`engine.paused()`: no part of a model contributes, or leaves anything for what comes after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)

B, D = 4, 6


class Coder(nn.Module):
    """Parts with layers, and one with a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, D)
        self.middle = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.recurrent = nn.GRU(D, D, batch_first=True)
        self.engine: Any = None

    def scaled(self, x: Tensor) -> Tensor:
        return self.middle(x * self.scale.exp())

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.scaled(self.encoder(x))[:, None])[0][:, -1]

    def with_reference(self, x: Tensor) -> Tensor:
        """The output, and what a paused part gave for other numbers before."""
        with nullcontext() if self.engine is None else self.engine.paused():
            reference = self.encoder(x.square()).tanh()
        return self(x) * reference


def _numbers(seed: int, rows: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, D, dtype=torch.float64, generator=generator)


def _made(**options: Any) -> tuple[Coder, Any, nn.Module, Any]:
    torch.manual_seed(0)
    model = Coder().double()
    engine, private, optimizer, _ = make_private(model, max_grad_norm=0.5, lr=0.0, **options)
    return model, engine, private, optimizer


def _twin(model: Coder) -> Coder:
    twin = Coder().double()
    twin.load_state_dict(model.state_dict())
    return twin


def _by_functional_call(model: Coder, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


PARTS: dict[str, Callable[[Coder, Tensor], Tensor]] = {
    "the model in a checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "the model": lambda model, x: model(x),
    "a layer": lambda model, x: model.encoder(x),
    "two layers": lambda model, x: model.middle[0](model.encoder(x).tanh()),
    "a container": lambda model, x: model.middle(x),
    "a method": lambda model, x: model.scaled(x),
    "a recurrent layer": lambda model, x: model.recurrent(x[:, None])[0][:, 0],
    "functional_call": _by_functional_call,
    "a checkpoint": lambda model, x: checkpoint(model.scaled, x, use_reentrant=False),
    "a reentrant checkpoint": lambda model, x: checkpoint(model.scaled, x, use_reentrant=True),
    "a reentrant checkpoint of a layer": lambda model, x: checkpoint(
        model.encoder, x, use_reentrant=True
    ),
}


def _assert_next_step_is_exact(model: Coder, private: nn.Module) -> None:
    x = _numbers(1)
    own = per_sample_gradients(_twin(model), x)
    assert norms(own).min() > 0.5
    sample_loss(private(x)).mean().backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(own, 0.5), 1e-10)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["inside", "backward outside", "forward outside"])
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_left(part: str, where: str) -> None:
    """Other rows than the step's, in forward or in backward: inputs get theirs, parameters nothing."""
    model, engine, private, _ = _made()
    x = _numbers(2, B + 3).requires_grad_()
    with nullcontext() if where == "forward outside" else engine.paused():
        loss = sample_loss(PARTS[part](model, x)).sum()
        if where == "inside":
            loss.backward()
    if where != "inside":
        with engine.paused() if where == "forward outside" else nullcontext():
            loss.backward()
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    twin = _twin(model)
    alone = x.detach().requires_grad_()
    sample_loss(PARTS[part](twin, alone)).sum().backward()
    assert relative_error(x.grad, alone.grad) <= 1e-10
    _assert_next_step_is_exact(model, private)


@pytest.mark.parametrize("part", ["a layer", "a container", "a method", "a recurrent layer"])
def test_a_part_that_was_paused_trains(part: str) -> None:
    """The same part called by itself after the block contributes, all of it."""
    model, engine, _, _ = _made()
    twin, call = _twin(model), PARTS[part]
    with engine.paused():
        sample_loss(call(model, _numbers(2, B + 3).requires_grad_())).mean().backward()
    x = _numbers(1)
    sample_loss(call(model, x)).mean().backward()

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = twin

        def forward(self, x: Tensor) -> Tensor:
            return call(self.model, x)

    own = {
        n.removeprefix("model."): g for n, g in per_sample_gradients(Alone(), x).items() if g.any()
    }
    parameters = dict(model.named_parameters())
    assert_sums(summed({n: parameters[n] for n in own}), clipped_sum(own, 0.5), 1e-10)


def test_between_the_layers_of_a_pass() -> None:
    """A paused call between two parts that are called by themselves is not in their pass."""
    model, engine, _, _ = _made()
    x = _numbers(1)
    hidden = model.encoder(x)
    with engine.paused():
        model.encoder(_numbers(2, B + 3)).sum().backward()
    sample_loss(model.middle(hidden)).mean().backward()
    plain = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Tanh())).double()
    plain[0].load_state_dict(model.encoder.state_dict())
    plain[1].load_state_dict(model.middle.state_dict())
    parameters = {"0." + n: p for n, p in model.encoder.named_parameters()}
    parameters |= {"1." + n: p for n, p in model.middle.named_parameters()}
    assert_sums(summed(parameters), clipped_sum(per_sample_gradients(plain, x), 0.5), 1e-10)


def test_one_loss_of_both() -> None:
    """A paused output in the loss of a pass that trains contributes nothing to it (a GAN's critic)."""
    model, engine, private, _ = _made()
    x = _numbers(1)
    own = per_sample_gradients(_twin(model), x)
    with engine.paused():
        other = private(_numbers(2))
    (sample_loss(private(x)) + sample_loss(other)).mean().backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(own, 0.5), 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_in_a_checkpoint(reentrant: bool) -> None:
    """What was paused when it was first computed is so when a checkpoint computes it again, later."""
    model, engine, private, _ = _made()
    x = _numbers(2, B + 3).requires_grad_()
    with engine.paused():
        out = checkpoint(private, x, use_reentrant=reentrant)
    sample_loss(out).sum().backward()
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())
    alone = x.detach().requires_grad_()
    sample_loss(_twin(model)(alone)).sum().backward()
    assert relative_error(x.grad, alone.grad) <= 1e-10
    _assert_next_step_is_exact(model, private)


def test_inside_of_a_method() -> None:
    """A method that pauses first, and trains then, trains."""
    model, engine, _, _ = _made()
    twin = _twin(model)
    model.engine = engine
    x = _numbers(1)
    reference = twin.encoder(x.square()).tanh().detach()
    rows = []
    for i in range(B):
        loss = sample_loss(twin(x[i : i + 1]) * reference[i : i + 1]).sum()
        rows.append(torch.autograd.grad(loss, list(twin.parameters())))
    names = [n for n, _ in twin.named_parameters()]
    own = {n: torch.stack(each) for n, each in zip(names, zip(*rows, strict=True), strict=True)}
    sample_loss(model.with_reference(x)).mean().backward()
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(own, 0.5), 1e-10)


def test_a_copy_is_not_paused() -> None:
    """A copy that is made inside the block is trained outside of it as any other."""
    _, engine, private, _ = _made()
    with engine.paused():
        copied = copy.deepcopy(private)
    assert not copied.grad_state.paused

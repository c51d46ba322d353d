"""A layer that is changed after a step: what was true of it before is believed no longer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import ArgumentError
from tests.oracle import backward, make_private, relative_error, sample_loss
from tests.refusal import refused


def trained() -> tuple[nn.Module, nn.Linear, nn.Linear, Tensor, Callable[[], None]]:
    """A private model that has made a step, its layers, rows of it, and what begins the next step."""
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    _, model, optimizer, *_ = make_private(raw)
    x = torch.randn(4, 3)
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()
    return model, raw[0], raw[1], x, optimizer.zero_grad


def replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))


def add(layer: nn.Linear) -> None:
    layer.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("change", [replace, add])
def test_other_parameters(change: Callable[[nn.Linear], None]) -> None:
    model, first, _, x, _ = trained()
    change(first)
    with refused("make_private again"):
        backward(model, x)


def test_a_method_of_its_own() -> None:
    model, first, _, x, _ = trained()
    first.extra = 1  # no method
    backward(model, x)
    first.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * x})
    with refused("make_private after the change"):
        backward(model, x)


def test_frozen_and_thawed() -> None:
    model, first, last, x, clear = trained()
    assert first.bias is not None
    for frozen in (True, False):
        first.bias.requires_grad_(not frozen)
        backward(model, x)
        assert (first.bias.summed_grad is None) == frozen
        assert first.weight.summed_grad is not None
        assert last.bias.summed_grad is not None
        clear()


@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks", "functorch"])
@pytest.mark.parametrize("trained", [(), (0,)])
def test_nothing_to_train(trained: tuple[int, ...], mode: str) -> None:
    """All that the optimizer holds is frozen, whatever else the model trains; nothing is changed."""
    bare = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    for number in trained:
        bare[number].requires_grad_(True)
    held = [*bare[1].parameters()]
    with refused("optimizer are frozen.*errors.html#no-trainable-parameters", ArgumentError):
        make_private(bare, optimizer_params=held, grad_sample_mode=mode)
    assert "forward" not in vars(bare[1])
    assert "_forward_counter" not in vars(bare[1].weight)


def test_all_are_frozen_later() -> None:
    """Then the model runs as any other, and a step releases nothing."""
    bare, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.randn(4, 3).double()
    engine, private, optimizer, _ = make_private(copy.deepcopy(bare), noise_multiplier=1.0)
    private.requires_grad_(False)
    given = x.clone().requires_grad_()
    out = private(given)
    assert torch.equal(out, bare(x))
    out.sum().backward()
    optimizer.step()
    assert torch.equal(private(x), bare(x))
    assert len(engine.accountant) == 0


def test_unfrozen_gradually() -> None:
    """What is frozen at make_private stays so; what is frozen afterwards may be trained later."""
    torch.manual_seed(0)
    bare, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.randn(4, 3).double()
    frozen = copy.deepcopy(bare)
    frozen[0].requires_grad_(False)
    _, model, *_ = make_private(frozen, optimizer_params=[*frozen.parameters()])
    frozen[0].requires_grad_(True)
    with refused("freeze them between make_private and the first step"):
        backward(model, x)
    model, (_, private, optimizer, _) = bare, make_private(copy.deepcopy(bare), max_grad_norm=0.1)
    for trained in (False, True):
        private._module[0].requires_grad_(trained)
        optimizer.zero_grad()
        backward(private, x)
        parameters = [*model[int(not trained) :].parameters()]
        rows = [torch.autograd.grad(sample_loss(model(row[None])).sum(), parameters) for row in x]
        truth = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
        assert relative_error(optimizer.per_sample_norms, truth) <= 1e-10

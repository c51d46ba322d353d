"""In Opacus' modes no optimizer but the private one steps on the model: what is in p.grad is raw."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import StepError
from tests.opacus_runs import HANDLE, MODES, B, C, D, backward, moved, rows, start, weights
from tests.refusal import refused

WAY_OUT = "the optimizer that make_private returned"
OTHERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
    "Adam": lambda p: torch.optim.Adam(p, lr=1.0),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1.0),
}


def only(parameters: Any, mode: str = "hooks", **options: Any) -> tuple:
    """(net, model, optimizer) whose private optimizer has what `parameters(net)` gives."""
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    model, optimizer, _ = FastPrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(parameters(net), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.randn(32, D)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, grad_sample_mode=mode, **options,
    )  # fmt: skip
    return net, model, optimizer


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_comes_later(mode: str, kind: str) -> None:
    net, model, optimizer, _ = start(mode)
    other = OTHERS[kind](model.parameters())
    before = weights(net)
    backward(model)
    with refused(WAY_OUT, StepError):
        other.step(lambda: backward(model))
    assert moved(net, before) == [0] * 4
    optimizer.step()
    assert 0 < max(moved(net, before)) <= C * (1 + 1e-5)
    with refused(WAY_OUT, StepError):  # the gate was open, but for the private one's inner step
        other.step(lambda: backward(model))


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_encoder_private_and_head_not(mode: str, frozen: bool) -> None:
    """The head moved by its raw gradient, whether it was trainable when make_private was called."""
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    net[2].requires_grad_(not frozen)
    head = torch.optim.SGD(net[2].parameters(), lr=1.0)
    model, optimizer, _ = FastPrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net[0].parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.randn(32, D)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, grad_sample_mode=mode, poisson_sampling=False,
    )  # fmt: skip
    net[2].requires_grad_(True)
    before = weights(net)
    if not frozen:
        backward(model)
        optimizer.step()
    with refused("2.weight.*" + WAY_OUT, StepError):
        head.step()
    assert moved(net, before)[2:] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_it_is_said_at_make_private(mode: str) -> None:
    with pytest.warns(
        UserWarning, match=r"2 trainable parameters .* are not in the private optimizer"
    ):
        only(lambda net: net[0].parameters(), mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "trainable")
        only(lambda net: net.parameters(), mode)


@pytest.mark.parametrize("wrap_model", [HANDLE, True])
def test_after_cleanup_anybody_may_train(wrap_model: bool) -> None:
    net, model, _ = only(
        lambda net: net.parameters(), wrap_model=wrap_model, poisson_sampling=False
    )
    other = torch.optim.SGD(net.parameters(), lr=1.0)
    backward(model if wrap_model else net)
    with refused("cleanup", StepError):
        other.step()
    model.cleanup()
    before = weights(net)
    backward(net)
    other.step()
    assert min(moved(net, before)) > 0


def test_a_model_that_was_dropped() -> None:
    """Its parameters' numbers may be another tensor's; what is trained without privacy is not ours."""
    net, model, optimizer, _ = start()
    del net, model, optimizer
    gc.collect()
    for _ in range(50):
        plain = nn.Linear(D, 6)
        plain(rows()).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=1.0).step()


def test_optimizers_of_other_models() -> None:
    """Plain ones, another private model's, a module around the private one."""
    net, model, optimizer, _ = start()
    other_net, other, other_optimizer, _ = start()
    around = nn.Linear(2, 1)
    plain = torch.optim.SGD(around.parameters(), lr=1.0)
    before, other_before, weight = weights(net), weights(other_net), around.weight.detach().clone()
    (around(model(rows())).mean() + around(other(rows())).mean()).backward()
    optimizer.step()
    plain.step()
    other_optimizer.step()
    assert min(*moved(net, before), *moved(other_net, other_before)) > 0
    assert not torch.equal(weight, around.weight)


class Split(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: an optimizer inside steps on a part of the parameters."""

    def __init__(self, parameters: list[nn.Parameter], more: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        halves = parameters[::2], [*parameters[1::2], *more]
        self.parts = [torch.optim.SGD(half, lr=1.0) for half in halves]
        self.fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("no memory")
        for part in self.parts:
            part.step()


def split(more: Callable[[nn.Module], Any]) -> tuple:
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    inner = Split(list(net[0].parameters()), list(more(net)))
    model, optimizer, _ = FastPrivacyEngine().make_private(
        module=net, optimizer=inner, data_loader=DataLoader(TensorDataset(rows()), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, grad_sample_mode="hooks", poisson_sampling=False,
    )  # fmt: skip
    return net, model, optimizer, inner


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_an_optimizer_inside_the_inner_one() -> None:
    net, model, optimizer, inner = split(lambda net: [])
    before = weights(net)
    backward(model)
    optimizer.step()
    assert 0 < min(moved(net, before)[:2]) <= max(moved(net, before)) <= C * (1 + 1e-5)
    with refused(WAY_OUT, StepError):
        inner.parts[0].step()
    optimizer.zero_grad()
    backward(model)
    inner.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step()
    with refused(WAY_OUT, StepError):
        inner.parts[0].step()


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_an_optimizer_inside_that_holds_more() -> None:
    """What is not in the private optimizer's list has a raw gradient still."""
    net, model, optimizer, _ = split(lambda net: net[2].parameters())
    before = weights(net)
    backward(model)
    with refused("2.weight|0.bias", StepError):
        optimizer.step()
    assert moved(net, before)[2:] == [0, 0]

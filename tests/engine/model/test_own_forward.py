"""A forward that was set on the object, not on its class, as Accelerate's hooks and many patches do."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip import FastPrivacyEngine
from fastclip.errors import UnsupportedLayerError
from fastclip.rules import find_rule
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    relative_error,
    sample_loss,
    summed,
)
from tests.precision.test_compile import fresh
from tests.refusal import refused

__all__ = ["fresh"]
TOLERANCE = 1e-10


class Net(nn.Module):
    """A part, layers, and a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5))
        self.scale, self.head = nn.Parameter(torch.rand(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x) * self.scale)


def closure(module: nn.Module) -> None:
    """As patches are written in a few lines."""
    plain = module.forward
    module.forward = lambda x, gain=2.0: gain * plain(x).sin()


def method(module: nn.Module) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return 2.0 * type(self).forward(self, x).sin()

    module.forward = MethodType(forward, module)


def hook(module: nn.Module) -> None:
    """As Accelerate does."""
    module._old_forward = plain = module.forward

    def forward(module: Any, x: Tensor) -> Tensor:
        return 2.0 * module._old_forward(x).sin()

    module.forward = functools.update_wrapper(functools.partial(forward, module), plain)


class Patched:
    """A callable that holds the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return 2.0 * type(self.module).forward(self.module, x).sin()


def callable_object(module: nn.Module) -> None:
    module.forward = Patched(module)


WAYS = {"closure": closure, "method": method, "hook": hook, "object": callable_object}
PLACES: dict[str, Callable[[Net], nn.Module]] = {
    "model": lambda m: m, "part": lambda m: m.part, "layer": lambda m: m.part[0],
    "norm": lambda m: m.part[2], "activation": lambda m: m.part[1],
}  # fmt: skip


def truth(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Samples' gradients one at a time, of the model itself, which a copy may not be."""
    names = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(sample_loss(model(x[i : i + 1])).sum(), [*names.values()])
        for i in range(len(x))
    ]
    return {
        name: torch.stack(own) for name, own in zip(names, zip(*rows, strict=True), strict=True)
    }


def check(model: nn.Module, private: nn.Module, optimizer: Any, x: Tensor, grads: dict) -> None:
    params = dict(model.named_parameters())
    C = norms(grads).median().item()
    for _ in range(4):  # the first ones are traced, in later ones layers may be bare
        optimizer.zero_grad()
        backward(private, x)
        assert_sums(summed(params), clipped_sum(grads, C), TOLERANCE)
    assert all(p.grad is None for p in params.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_run_and_given_back(way: str, place: str) -> None:
    """Equal to one sample at a time; what was set is there again after cleanup()."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(7, 6).double()
    module = PLACES[place](model)
    WAYS[way](module)
    before = [vars(m).get("forward") for m in model.modules()]
    grads, out = truth(model, x), model(x).detach()
    assert find_rule(module) is None
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    assert find_rule(module) is None
    check(model, private, optimizer, x, grads)
    model.eval()
    with torch.no_grad():
        assert torch.equal(private(x), out)
    private.cleanup()
    assert [vars(m).get("forward") for m in model.modules()] == before
    assert not [n for m in model.modules() for n in vars(m) if "fastclip" in n]


def test_a_refused_model_keeps_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    _, private, _, _ = make_private(model[0])
    closure(model)
    before = model.forward
    with refused("cleanup"):
        make_private(model)
    assert vars(model)["forward"] is before
    private.cleanup()
    make_private(model)[1].cleanup()
    assert vars(model)["forward"] is before


def test_a_class_s_own_that_was_set_on_the_object() -> None:
    """As libraries leave it that take their hook off again: layers keep their rules."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for module in model.modules():
        module.forward = module.forward
    rule = find_rule(nn.Linear(2, 2))
    assert find_rule(model[0]) is rule
    engine, private, _, _ = make_private(model)
    assert find_rule(model[0]) is rule
    assert {row.rule for row in engine.plan().rows} == {"linear"}
    private.cleanup()
    assert model[0].forward == MethodType(nn.Linear.forward, model[0])


def test_one_that_is_set_afterwards_lies_around_the_private_one() -> None:
    model, x = Net().double(), torch.randn(7, 6).double()
    twin = copy.deepcopy(model)
    closure(twin)
    grads = truth(twin, x)
    _, private, optimizer, _ = make_private(model, max_grad_norm=norms(grads).median().item())
    closure(model)
    check(model, private, optimizer, x, grads)


@pytest.mark.parametrize("place", ["model", "part", "layer"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_private_model_runs_itself(way: str, place: str) -> None:
    """Or it is an error: a function is copied as it is, with the model that it holds."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(7, 6).double()
    WAYS[way](PLACES[place](model))
    grads = truth(model, x)
    _, private, _, _ = make_private(model, max_grad_norm=norms(grads).median().item())
    if way == "closure":
        with refused("MethodType", UnsupportedLayerError):
            copy.deepcopy(private)
        return
    twin: Any = copy.deepcopy(private)
    backward(twin, x)
    sums = summed(dict(twin._module.named_parameters()))
    assert_sums(sums, clipped_sum(grads, norms(grads).median().item()), TOLERANCE)
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())
    twin.cleanup()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert twin._module(x).abs().sum() > 0


@pytest.mark.parametrize("state", ["plain", "frozen", "private"])
@pytest.mark.parametrize("place", ["model", "part", "layer"])
def test_a_copy_that_runs_what_it_was_copied_from(place: str, state: str) -> None:
    model = Net()
    closure(PLACES[place](model))
    twin = copy.deepcopy(model)
    held = make_private(model) if state == "private" else None
    model.requires_grad_(state != "frozen")
    with refused("copy", UnsupportedLayerError):
        make_private(twin)
    assert held is None or held[1] is not twin


def test_a_bound_method_that_calls_the_original() -> None:
    model = Net()
    plain = model.forward

    def forward(self: Net, x: Tensor) -> Tensor:
        return plain(x) + 1

    model.forward = MethodType(forward, model)
    twin = copy.deepcopy(model)
    with refused("copy", UnsupportedLayerError):
        make_private(twin)
    _, private, _, _ = make_private(model)
    with refused("MethodType", UnsupportedLayerError):
        copy.deepcopy(private)


def test_the_compatible_copy_must_not_run_the_original() -> None:
    model = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.Flatten(), nn.Linear(64, 2))
    closure(model)
    with refused("get_compatible_module", UnsupportedLayerError):
        FastPrivacyEngine.get_compatible_module(model)


def test_a_teacher_is_no_original() -> None:
    """A frozen model of the same class, which the function runs beside the model itself."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(7, 6).double()
    teacher, plain = Net().double().requires_grad_(False), model.forward
    model.forward = lambda x: plain(x) - teacher(x)
    grads = truth(model, x)
    _, private, optimizer, _ = make_private(model, max_grad_norm=norms(grads).median().item())
    check(model, private, optimizer, x, grads)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", ["model", "part", "layer"])
@pytest.mark.parametrize("way", ["closure", "method", "hook"])
@pytest.mark.one_in(3)
def test_exported_as_it_was(way: str, place: str, strict: bool) -> None:
    model, x = Net(), torch.randn(7, 6)
    WAYS[way](PLACES[place](model))
    expected, asked = model(x), inspect.signature(PLACES[place](model).forward)
    _, private, _, _ = make_private(model)
    assert inspect.signature(PLACES[place](model).forward) == asked
    program = torch.export.export(fastclip.unwrap(private).eval(), (x,), strict=strict).module()
    assert relative_error(program(x), expected) <= 1e-6


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("place", ["model", "part"])
@pytest.mark.parametrize("way", ["closure", "hook"])
def test_compiled(way: str, place: str) -> None:
    """One graph, in which the forward that was set on the object runs."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(7, 6).double()
    model.scale.requires_grad_(False)
    WAYS[way](PLACES[place](model))
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    model.scale.requires_grad_(True)
    grads = {n: g for n, g in truth(model, x).items() if n in params}
    model.scale.requires_grad_(False)
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    compiled = torch.compile(private, backend="eager")
    before = torch._dynamo.utils.counters["graph_break"].total()
    for _ in range(5):
        optimizer.zero_grad()
        backward(compiled, x)
        assert_sums(summed(params), clipped_sum(grads, C), TOLERANCE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["graph_break"].total() == before


def test_a_compiled_forward() -> None:
    """`model.forward = torch.compile(model.forward)`."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(7, 6).double()
    grads = truth(model, x)
    model.forward = torch.compile(model.forward, backend="eager")
    _, private, optimizer, _ = make_private(model, max_grad_norm=norms(grads).median().item())
    check(model, private, optimizer, x, grads)

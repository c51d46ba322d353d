"""Layers that do something else than their class, without a forward of their own: exact or refused."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from fastclip.core import autograd
from fastclip.errors import FastclipError, UnsupportedLayerError
from fastclip.rules import LayerRule, find_rule, register_rule
from tests.oracle import DTYPES, backward, check_exact, check_exact_or_refused, make_private
from tests.refusal import refused

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Standardized(nn.Conv2d):
    """Weight standardization, through the method that forward calls."""

    def _conv_forward(self, x, weight, bias):
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, weight, bias)


class ScaledNorm(nn.InstanceNorm1d):
    """Another affine map than torch's."""

    def _apply_instance_norm(self, x):
        return super()._apply_instance_norm(x) * self.weight[None, :, None].exp()


class Halved(nn.Linear):
    """A weight computed from the parameter of its name."""

    @property
    def weight(self):
        if "weight" not in self._parameters:
            raise AttributeError
        return self._parameters["weight"] / 2 + 0.1

    def reset_parameters(self):
        nn.init.normal_(self._parameters["weight"])  # torch's would fill what the property makes
        nn.init.zeros_(self.bias)


class Watched(nn.Linear):
    """Hands out its weight otherwise than nn.Module does."""

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value.sin() if name == "weight" else value


class Everything(nn.Linear):
    """The same for every attribute."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return value * 3 if name == "bias" and isinstance(value, torch.Tensor) else value


class Doubled(nn.Linear):
    """Something around forward, not within it."""

    def __call__(self, x):
        return super().__call__(x) * 2


class Step(nn.LayerNorm):
    """A property in the place of a number."""

    @property
    def eps(self):
        return 0.5

    @eps.setter
    def eps(self, value):
        pass


class Mixin:
    def _conv_forward(self, x, weight, bias):
        return F.conv1d(x, weight.tanh(), bias)


class Mixed(Mixin, nn.Conv1d):
    """Overridden by a class that is no module."""


class Plain(nn.Linear):
    """Harmless: new names, and what no forward goes through."""

    tag = "mine"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 2.0

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self):
        return self.tag

    def encode(self, x):
        return self(x)


CLASSES = {
    "conv-forward": (lambda: Standardized(3, 4, 2), (4, 3, 5, 5)),
    "instance-norm": (lambda: ScaledNorm(3, affine=True), (4, 3, 7)),
    "property": (lambda: Halved(5, 3), (4, 5)),
    "getattr": (lambda: Watched(5, 3), (4, 6, 5)),
    "getattribute": (lambda: Everything(5, 3), (4, 5)),
    "call": (lambda: Doubled(5, 3), (4, 5)),
    "call-without-a-rule": (lambda: type("Both", (Doubled, Halved), {})(5, 3), (4, 5)),
    "number": (lambda: Step(5), (4, 6, 5)),
    "mixin": (lambda: Mixed(3, 4, 2), (4, 3, 6)),
    "plain": (lambda: Plain(5, 3), (4, 5)),
}


@dtypes
@pytest.mark.parametrize("case", CLASSES)
def test_a_class(case: str, dtype: torch.dtype) -> None:
    make, shape = CLASSES[case]
    model = make()
    for p in model.parameters():  # torch's own initialization may have filled a copy
        nn.init.normal_(p)
    check_exact(model, torch.randn(shape), dtype=dtype)


def test_harmless_subclasses_keep_their_rule() -> None:
    assert find_rule(Plain(5, 3)) is find_rule(nn.Linear(5, 3))
    assert find_rule(Doubled(5, 3)) is find_rule(nn.Linear(5, 3))
    assert find_rule(Standardized(3, 4, 2)) is None


def circular(conv: nn.Conv2d) -> nn.Conv2d:
    """As models are made to tile: the method is replaced on the module itself."""

    def _conv_forward(self, x, weight, bias):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)

    conv._conv_forward = MethodType(_conv_forward, conv)
    return conv


class Tiling(nn.Sequential):
    """Patched again in copies, whose bound methods would be the original's."""

    def __deepcopy__(self, memo):
        twin = Tiling(*(copy.deepcopy(m, memo) for m in self))
        circular(twin[0])
        return twin


@dtypes
def test_one_module(dtype: torch.dtype) -> None:
    model = Tiling(circular(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 2, 1))
    check_exact(model, torch.randn(4, 3, 5, 5), dtype=dtype)


def test_one_module_after_make_private() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    _, private, _, _ = make_private(model)
    circular(model[0])
    with refused("_conv_forward.*make_private"):
        backward(private, torch.randn(4, 3, 5, 5))


@pytest.mark.parametrize(("cls", "name"), [(nn.Linear, "forward"), (nn.Conv1d, "_conv_forward")])
def test_the_class_itself(cls: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library patches torch's class: before make_private, or after it."""
    make = {nn.Linear: lambda: nn.Linear(5, 5), nn.Conv1d: lambda: nn.Conv1d(5, 5, 1)}[cls]
    x = torch.randn(4, 5) if cls is nn.Linear else torch.randn(4, 5, 6)
    original = getattr(cls, name)
    _, private, _, _ = make_private(make())
    monkeypatch.setattr(cls, name, lambda *args: original(*args).sin())
    with refused(f"{name}.*make_private"):
        backward(private, x)
    check_exact(make(), x, dtype=torch.float64)


class Gain(nn.Module):
    """A layer with a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def gain(self) -> torch.Tensor:
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain()


@register_rule(Gain)
class GainRule(LayerRule):
    def forward(self, module, x, extra):
        raise AssertionError("this rule is not that of the subclass")

    def backward(self, call):
        raise AssertionError


class SquaredGain(Gain):
    def gain(self) -> torch.Tensor:
        return self.weight.square()


@dtypes
def test_a_registered_layer(dtype: torch.dtype) -> None:
    check_exact(SquaredGain(), torch.randn(4, 5), dtype=dtype)


# Numbers and tables that are changed after construction


@dtypes
def test_a_padding_row_counted_from_the_end(dtype: torch.dtype) -> None:
    table = nn.Embedding(5, 4)
    table.padding_idx = -1
    ids = torch.tensor([[4, 1, 2], [4, 4, 4], [0, 4, 4], [3, 3, 1]])
    check_exact(table, ids, dtype=dtype)
    bag = nn.EmbeddingBag(5, 4, mode="mean")
    bag.padding_idx = -2
    check_exact(nn.Sequential(bag, nn.Linear(4, 3)), ids, dtype=dtype)


@dtypes
def test_a_table_that_grew(dtype: torch.dtype) -> None:
    """num_embeddings says 2, the table has 9 rows: ids of one sample must not be another's."""
    table = nn.Embedding(2, 4)
    table.weight = nn.Parameter(torch.randn(9, 4))
    check_exact(table, torch.randint(9, (5, 6)), dtype=dtype)
    bag = nn.EmbeddingBag(2, 4, mode="max")
    bag.weight = nn.Parameter(torch.randn(9, 4))
    check_exact(nn.Sequential(bag, nn.Linear(4, 3)), torch.randint(9, (5, 6)), dtype=dtype)


@dtypes
def test_a_kernel_of_another_size(dtype: torch.dtype) -> None:
    conv = nn.Conv1d(3, 4, 3, padding="same")
    conv.weight = nn.Parameter(torch.randn(4, 3, 4))
    check_exact(conv, torch.randn(4, 3, 8), dtype=dtype)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_options_of_a_table(make: type, option: str) -> None:
    model = nn.Sequential(make(7, 4), nn.Linear(4, 3))
    _, private, _, _ = make_private(model)
    setattr(model[0], option, 1.0 if option == "max_norm" else True)
    with refused(option):
        backward(private, torch.randint(7, (4, 5)))


def test_a_weight_computed_elsewhere() -> None:
    """Set as an attribute after make_private: its gradient would be lost."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    _, private, _, _ = make_private(model)
    factor = torch.ones((), requires_grad=True)
    weight = model[1].weight.detach() * factor
    del model[1].weight
    model[1].weight = weight
    with refused("weight.*computed"):
        backward(private, torch.randn(4, 5))


# Hooks on gradients of parameters


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_hooks_on_a_parameter(register: str, when: str) -> None:
    """They would never run."""
    model = nn.Sequential(nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 3))
    for parameter in (model[0].bias, model[1].weight):
        twin = copy.deepcopy(model)
        parameter = dict(twin.named_parameters())[
            next(n for n, p in model.named_parameters() if p is parameter)
        ]
        add = getattr(parameter, register)
        with refused("hook.*would not run", UnsupportedLayerError):
            if when == "before":
                add(lambda g: None)
            _, private, _, _ = make_private(twin)
            if when == "after":
                add(lambda g: None)
            loss = private(torch.randn(4, 5)).square().mean()
            if when == "between":
                add(lambda g: None)
            loss.backward()
        assert twin[2].weight.grad is None


def test_hooks_that_harm_nobody() -> None:
    """On a frozen parameter, or removed in time; and the engine's own do not count."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model[0].bias.register_hook(lambda g: g * 0).remove()
    model[1].bias.register_hook(lambda g: g * 0)
    model[1].bias.requires_grad_(False)
    private = make_private(model)[1]
    backward(private, torch.randn(4, 5))
    private.cleanup()
    backward(make_private(model)[1], torch.randn(4, 5))


# Which parameters a backward pass is for


def test_an_unknown_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the sentence that means autograd.grad may leave a parameter without its contribution."""

    def broken(node: object) -> bool:
        raise RuntimeError("renamed, moved, or something else went wrong")

    model = nn.Sequential(nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 3))
    _, private, _, _ = make_private(model)
    monkeypatch.setattr(autograd, "will_run", broken)
    with refused("untrained"):
        backward(private, torch.randn(4, 5))


def test_autograd_grad_still_asks_for_tensors() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    private = make_private(model)[1]
    x = torch.randn(4, 5, requires_grad=True)
    loss = private(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x)
    assert slope.shape == x.shape
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())
    with pytest.raises((RuntimeError, FastclipError)):
        torch.autograd.grad(private(x).square().mean(), model[0].weight)


@dtypes
def test_transposed_weights_of_a_subclass(dtype: torch.dtype) -> None:
    """A class that is known by its name only."""

    class Named(Conv1D):
        def __getattr__(self, name):
            value = super().__getattr__(name)
            return value * 2 if name == "weight" else value

    model = Named(3, 5)
    nn.init.normal_(model._parameters["weight"])  # torch's own initialization has filled a copy
    check_exact_or_refused(model, torch.randn(4, 6, 5), dtype=dtype)
    assert find_rule(model) is None

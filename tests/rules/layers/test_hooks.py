"""Hooks on layers run once a pass, around the layer, and what they change is what is trained on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from tests.apart import check_exact_as_it_is
from tests.oracle import DTYPES, backward, check_exact, make_private
from tests.rules.layers.test_custom import Affine

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Nest(nn.Module):
    """A parameter of its own around a child."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(6))
        self.child = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x * self.gamma).tanh()


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "conv": lambda: nn.Conv1d(5, 5, 1),
    "layer-norm": lambda: nn.LayerNorm(6),
    "group-norm": lambda: nn.GroupNorm(1, 5),
    "affine": Affine,
    "prelu": lambda: nn.PReLU(5),
    "nest": Nest,
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
}
layers = pytest.mark.parametrize("layer", LAYERS)


def before(module, args):
    return (args[0].sin() * 2,)


def after(module, args, out):
    return out * out.abs() + args[0]


def weigh(module, grads, *more):
    """Of each sample its own: position by position."""
    factor = torch.linspace(0.5, 2, grads[0].shape[1]).to(grads[0])
    return (grads[0] * factor[None, :, None], *grads[1:])


def backward_first(module, grads):
    return weigh(module, grads)


HOOKS = {
    "pre": ("register_forward_pre_hook", before),
    "forward": ("register_forward_hook", after),
    "full-backward": ("register_full_backward_hook", weigh),
    "full-backward-pre": ("register_full_backward_pre_hook", backward_first),
}


@pytest.mark.one_in(3)
@dtypes
@layers
@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_changes(hook: str, layer: str, dtype: torch.dtype) -> None:
    register, function = HOOKS[hook]
    module = LAYERS[layer]()
    getattr(module, register)(function)
    check_exact(nn.Sequential(nn.Linear(6, 6), module), torch.randn(4, 5, 6), dtype=dtype)


@pytest.mark.one_in(2)
@dtypes
@layers
def test_all_hooks_together(layer: str, dtype: torch.dtype) -> None:
    module = LAYERS[layer]()
    for register, function in HOOKS.values():
        getattr(module, register)(function)
    model = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 3))
    check_exact(model, torch.randn(4, 5, 6), dtype=dtype)


@pytest.mark.one_in(2)
@layers
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_runs_once(hook: str, layer: str) -> None:
    """In every pass but the first, in which the model is also probed."""
    calls: Counter[bool] = Counter()
    module = LAYERS[layer]()
    getattr(module, HOOKS[hook][0])(lambda *args: calls.update([torch.is_grad_enabled()]))
    private = make_private(nn.Sequential(nn.Linear(6, 6), module))[1]
    x = torch.randn(4, 5, 6)
    backward(private, x)
    private.zero_grad()
    calls.clear()
    backward(private, x)
    assert calls.total() == 1


@dtypes
@pytest.mark.parametrize("hook", ["pre", "forward"])
def test_a_hook_on_a_child(hook: str, dtype: torch.dtype) -> None:
    """Part of what the layer around it computes."""
    nest = Nest()
    register, function = HOOKS[hook]
    getattr(nest.child, register)(function)
    check_exact(nn.Sequential(nn.Linear(6, 6), nest), torch.randn(4, 5, 6), dtype=dtype)


@dtypes
@pytest.mark.parametrize("hook", ["full-backward", "full-backward-pre"])
def test_a_gradient_hook_on_a_child(hook: str, dtype: torch.dtype) -> None:
    nest = Nest()
    register, function = HOOKS[hook]
    getattr(nest.child, register)(function)
    model = nn.Sequential(nn.Linear(6, 6), nest)
    check_exact(model, torch.randn(4, 5, 6), dtype=dtype)


class TensorHook(Affine):
    """A hook on a tensor of its own, where there is a gradient at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.gamma
        if y.requires_grad:
            y.register_hook(lambda g: g * 3)
        return y + self.beta


@dtypes
def test_a_hook_on_a_tensor(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), TensorHook())
    check_exact(model, torch.randn(4, 5, 6), dtype=dtype)


# Weights that a hook of torch computes before forward


@dtypes
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm(dtype: torch.dtype) -> None:
    """A tensor set as an attribute by a pre-hook."""
    model = nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))
    model[0].__dict__.pop("weight")  # else no deepcopy
    model[0].weight = model[0].weight_v.detach()
    check_exact(model, torch.randn(4, 6), dtype=dtype)


@dtypes
def test_pruned(dtype: torch.dtype) -> None:
    layer = prune.random_unstructured(nn.Linear(6, 6), "weight", 0.5)
    layer.weight = layer.weight.detach()
    check_exact(nn.Sequential(layer, nn.Linear(6, 3)), torch.randn(4, 6), dtype=dtype)


def own_weight_norm(module: nn.Module, args: tuple) -> None:
    module.weight = module.raw / module.raw.norm()


def test_a_weight_computed_by_a_hook_of_ones_own() -> None:
    layer = nn.Linear(6, 6)
    layer.raw = nn.Parameter(torch.randn(6, 6))
    del layer.weight
    layer.register_forward_pre_hook(own_weight_norm)
    check_exact_as_it_is(nn.Sequential(layer, nn.Linear(6, 3)), torch.randn(4, 6))

"""Where gradients come in: any of the model's outputs, its submodules, several models at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastclip.errors import GraphError
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused

EXACT = 1e-10


class Several(nn.Module):
    """Returns its hidden state twice and an output, in a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict:
        hidden = self.first(x)
        return {"out": self.second(hidden.tanh()), "states": (hidden, [hidden]), "rows": len(x)}


LOSSES = {
    "all": lambda o: (
        sample_loss(o["out"]) + sample_loss(o["states"][0]) * sample_loss(o["states"][1][0])
    ),
    "output": lambda o: sample_loss(o["out"]),
    "hidden": lambda o: sample_loss(o["states"][1][0]),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_several_outputs(loss: str) -> None:
    """Of the hidden state alone the second layer has no share, and gets no sum."""
    x = torch.randn(5, 6)
    check_exact(Several(), x, lambda o, _: LOSSES[loss](o), dtype=torch.float64)


def test_the_output_changed_in_place() -> None:
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x, lambda out, _: sample_loss(2 * out + 1))
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model, max_grad_norm=C)
    out = private(x)
    out *= 2
    out += 1
    sample_loss(out).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, C), EXACT)


def test_submodules_called_one_by_one() -> None:
    """Past the model's own forward: exact as well."""
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    params = dict(model.named_parameters())
    make_private(model, max_grad_norm=0.5)
    first, act, second = model
    sample_loss(second(act(first(x)))).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, 0.5), EXACT)


class WithHidden(nn.Module):
    """What the loss of `test_a_captured_state` sees."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.model[0](x)
        return torch.cat([self.model[2](self.model[1](hidden)), hidden.sin()], dim=1)


@pytest.mark.parametrize("output_too", [True, False])
def test_a_captured_state(output_too: bool) -> None:
    """Exact beside the output; alone it would pass the model's output by, and is refused."""
    model, x = mlp(), rows()
    grads = per_sample_gradients(WithHidden(model), x)
    params = {f"model.{n}": p for n, p in model.named_parameters()}
    captured: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda *call: captured.append(call[-1]))
    _, private, _, _ = make_private(model, max_grad_norm=0.5)
    out = private(x)
    if not output_too:
        with refused("output", GraphError):
            sample_loss(captured[-1]).mean().backward()
        return
    sample_loss(torch.cat([out, captured[-1].sin()], dim=1)).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, 0.5), EXACT)


def test_two_private_models_in_a_row() -> None:
    """Each with its own engine and norm; the gradient passes through both."""
    lower, upper, x = mlp(6), mlp(), rows()
    grads = per_sample_gradients(nn.Sequential(lower, upper), x)
    privates = [make_private(model, max_grad_norm=0.5)[1] for model in (lower, upper)]
    sample_loss(privates[1](privates[0](x))).mean().backward()
    for i, model in enumerate((lower, upper)):
        mine = {n.removeprefix(f"{i}."): g for n, g in grads.items() if n.startswith(f"{i}.")}
        assert_sums(summed(dict(model.named_parameters())), clipped_sum(mine, 0.5), EXACT)


def test_the_gradient_of_the_input() -> None:
    """It is neither clipped nor scaled."""
    model, x = mlp(), rows()
    plain, ours, theirs = copy.deepcopy(model), x.clone(), x.clone()
    backward(plain, theirs.requires_grad_())
    backward(make_private(model, max_grad_norm=1e-3)[1], ours.requires_grad_())
    assert relative_error(ours.grad, theirs.grad) <= 1e-12


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean loss over the weights and, squared, over the inputs (a gradient penalty)."""
    losses = sample_loss(model(x))
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return (losses + slope.square().sum(1)).mean()


def test_a_gradient_penalty_is_refused() -> None:
    """Its double backward would write unclipped gradients."""
    model = mlp()
    private = make_private(model)[1]
    with pytest.raises(RuntimeError):
        penalized(private, rows().requires_grad_()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_ordinary_model_again() -> None:
    """to_standard_module leaves no trace: a penalty on the weights is no leak any more."""
    model, x = mlp(), rows()
    plain = copy.deepcopy(model)
    private = make_private(model)[1]
    backward(private, x)
    assert private.to_standard_module() is model
    for net in (plain, model):
        (sample_loss(net(x)).mean() + net[0].weight.square().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert getattr(p, "summed_grad", None) is None


def test_without_wrapping() -> None:
    """The model itself is private until the handle is cleaned up."""
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    params: dict[str, Any] = dict(model.named_parameters())
    handle = make_private(model, max_grad_norm=0.5, wrap_model=False)[1]
    backward(model, x)
    assert_sums(summed(params), clipped_sum(grads, 0.5), EXACT)
    assert all(p.grad is None for p in params.values())
    handle.cleanup()
    backward(model, x)
    assert all(p.grad is not None for p in params.values())

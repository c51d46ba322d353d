"""Parameters that the private optimizer does not have get no gradient, or are refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import ParameterLeakError, StepError
from tests.networks import mlp, rows
from tests.oracle import backward, make_private, sample_loss
from tests.refusal import refused


class Shifted(nn.Module):
    """A network, and a parameter of its own that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift


def private_head(model: Shifted) -> tuple[nn.Module, Any]:
    """Only the first layer is in the private optimizer."""
    _, private, optimizer, _ = make_private(model, optimizer_params=[*model.net[0].parameters()])
    return private, optimizer


def test_it_is_said() -> None:
    model = Shifted()
    with pytest.warns(UserWarning, match=r"are not in the private optimizer"):
        private_head(model)
    model = Shifted()
    for p in (model.shift, *model.net[2:].parameters()):
        p.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "trainable")
        private_head(model)


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("thawed", [False, True])
def test_a_parameter_of_another_optimizer(thawed: bool, copied: bool) -> None:
    """Its gradient would be a plain sum over the batch; it never gets one."""
    model = Shifted()
    model.shift.requires_grad_(not thawed)
    private, _ = private_head(model)
    if copied:
        private = copy.deepcopy(private)
        model = private._module
    model.shift.requires_grad_(True)
    with refused("not in the private optimizer", ParameterLeakError):
        backward(private, rows(4))
    assert model.shift.grad is None


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_layers_of_another_optimizer_get_none() -> None:
    model = Shifted()
    model.shift.requires_grad_(False)
    private, optimizer = private_head(model)
    backward(private, rows(4))
    optimizer.step()
    held = {name: p.grad is not None for name, p in model.named_parameters()}
    assert {name for name, has in held.items() if has} == {"net.0.weight", "net.0.bias"}


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_another_loss_may_train_it() -> None:
    """On public data, say, past the private model."""
    model = Shifted()
    private, _ = private_head(model)
    (3 * model.shift).backward()
    assert model.shift.grad == 3
    private.cleanup()
    model.shift.grad = None
    sample_loss(model(rows(4))).mean().backward()
    assert model.shift.grad is not None


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_all_of_it_may_become_private_later() -> None:
    """What guarded the others is none of the user's hooks."""
    model, x = Shifted(), rows(4)
    _, private, first, _ = make_private(model, optimizer_params=[*model.net[0].parameters()])
    engine = FastPrivacyEngine()
    private, optimizer, _ = engine.make_private(
        module=private, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x), batch_size=2), noise_multiplier=0.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    backward(private, x)
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    with refused("made private again or cleaned up", StepError):
        first.step()

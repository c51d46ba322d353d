"""torch.export of a private model, without clean-up: the program of the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip.errors import ParameterLeakError
from tests.oracle import make_private, relative_error, row_loss


class Own(nn.Module):
    """Parts, a method, and a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.recurrent = nn.GRU(6, 4, batch_first=True)

    def scaled(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.part(self.scaled(x))[:, None])[0][:, -1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "own": Own,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strict", "name", "whole"),
    [
        (False, "sequential", False),
        (True, "sequential", True),
        (True, "own", False),
        (False, "own", True),
    ],
)
def test_the_model_as_it_was(strict: bool, name: str, whole: bool) -> None:
    """Equal to the model, which stays private; the program's gradients reach no private parameter."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 6)
    _, private, optimizer, _ = make_private(model, noise_multiplier=1.0)
    row_loss(private(x)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    exported = private if whole else fastclip.unwrap(private)
    program = torch.export.export(exported, (x,), strict=strict).module()
    assert relative_error(program(x), model(x)) <= 1e-6
    with contextlib.suppress(ParameterLeakError):
        program(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    model.train()
    row_loss(private(x)).mean().backward()
    assert all(p.summed_grad is not None for p in model.parameters())

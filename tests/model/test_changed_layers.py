"""A layer that is changed after a step: what was true of it before is believed no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import backward, make_private
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

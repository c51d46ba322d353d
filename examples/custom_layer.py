"""A layer of your own with an exact per-sample rule: `python -m examples.custom_layer`.

Without a rule, such a layer is also exact, because fastclip follows the product that its parameter
enters. Write a rule if nothing can be followed (an autograd Function, a kernel), or if the layer as a
whole can be computed more cheaply. A rule states what to save, returns the input's gradient, and records
each sample's contribution to each parameter. `check_rule` compares it with autograd before you use it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.rules import KeptRecord, LayerRule, register_rule
from fastclip.testing import check_rule


class Scale(nn.Module):
    """y = gamma * x over the last dimension of x [b, ..., d]."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


@register_rule(Scale)
class ScaleRule(LayerRule):
    """Sample b's gradient is the sum over its positions of g * x."""

    name = "scale"
    parameter_names = ("gamma",)

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        return module.gamma * x, (x, module.gamma)

    def backward(self, call: Any) -> Tensor | None:
        x, gamma = call.saved
        if call.wants("gamma"):
            product = call.samples(call.g * x)  # [b, ..., d], samples first
            positions = product.unsqueeze(1).flatten(1, -2)  # [b, t, d], for an empty batch, too
            call.record("gamma", KeptRecord(positions.sum(1)))
        return call.g * gamma if call.needs_input_grad else None


def main() -> None:
    """Check the rule, train a model with the layer, and print how the engine treats it."""
    torch.manual_seed(0)
    check = check_rule(Scale(8), torch.randn(4, 5, 8))
    print(check)
    check.raise_if_wrong()
    x, y = torch.randn(256, 16), torch.randint(0, 2, (256,))
    model = nn.Sequential(nn.Linear(16, 32), Scale(32), nn.ReLU(), nn.Linear(32, 2))
    engine = FastPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(engine.plan())
    print(f"epsilon {engine.get_epsilon(delta=1e-3):.2f} at delta 1e-3")


if __name__ == "__main__":
    main()

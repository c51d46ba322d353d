"""A layer whose rule computes past torch: samples are not followed through it, nor is it trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import GraphError
from fastclip.layers import KeptRecord, LayerRule, register_rule
from tests.oracle import make_private, row_loss


class Scale(nn.Module):
    """y = gamma x."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


@register_rule(Scale)
class ScaleRule(LayerRule):
    """Computed by NumPy, as by a kernel of one's own."""

    name = "scale, by NumPy"
    parameter_names = ("gamma",)

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        product = module.gamma.detach().numpy() * x.detach().numpy()
        return torch.from_numpy(product), (x, module.gamma)

    def backward(self, call: Any) -> Tensor | None:
        x, gamma = call.saved
        if call.wants("gamma"):
            call.record("gamma", KeptRecord(call.samples(call.g * x)))
        return call.g * gamma if call.needs_input_grad else None


def test_dry_runs_decide_about_the_model_and_the_trace_about_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Linear(4, 2))
    engine, private, _, _ = make_private(model)
    x = torch.randn(5, 3)
    out = private(x).mean(1)
    with pytest.raises(GraphError, match=r"not independent|mixes samples"):
        (out - out.mean()).square().mean().backward()
    row_loss(private(x)).mean().backward()
    unproven = engine.explain().unproven
    assert unproven
    assert all("past torch" in cause for cause in unproven)

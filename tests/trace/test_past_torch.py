"""A layer whose rule computes past torch: samples are not followed through it, nor is it trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.custom_layer import Scale, ScaleRule
from fastclip.errors import GraphError
from fastclip.rules import register_rule
from tests.oracle import make_private, sample_loss


class ByNumpy(Scale):
    """Computed by NumPy, as by a kernel of one's own."""


@register_rule(ByNumpy)
class ByNumpyRule(ScaleRule):
    name = "scale, by NumPy"

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        product = module.gamma.detach().numpy() * x.detach().numpy()
        return torch.from_numpy(product), (x, module.gamma)


def test_dry_runs_decide_about_the_model_and_the_trace_about_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), ByNumpy(4), nn.Linear(4, 2))
    engine, private, _, _ = make_private(model)
    x = torch.randn(5, 3)
    out = private(x).mean(1)
    with pytest.raises(GraphError, match=r"not independent|mixes samples"):
        (out - out.mean()).square().mean().backward()
    sample_loss(private(x)).mean().backward()
    unproven = engine.explain().unproven
    assert unproven
    assert all("outside torch" in cause for cause in unproven)

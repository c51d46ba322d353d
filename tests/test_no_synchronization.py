"""A whole step never waits for the device: on the meta device, where tensors have shapes but no
values, any look at a value raises. (On a GPU tests/test_gpu.py asks CUDA itself.)"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from fastclip import clipping
from fastclip.ops.units import UnitSamples
from tests.oracle import make_private, sample_loss


class Text(nn.Module):
    """An embedding tied to the output head, a LayerNorm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)))


MODELS = {
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: torch.randn(4, 5, 6),
    ),
    "rows": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)),
        lambda: torch.randn(4, 6),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
            nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 3),
        ),
        lambda: torch.randn(4, 2, 8, 8),
    ),
    "tied text": (Text, lambda: torch.randint(11, (4, 7))),
}  # fmt: skip
STRATEGIES = {
    "flat": clipping.dp_sgd(),
    "automatic_v": clipping.automatic(0),
    "adaptive": clipping.adaptive(),
    "groups": clipping.dpsgd_f(3),
    "schedule": clipping.sad_dpsgd(9),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("units", [None, "cpu", "meta"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_looks_at_no_value(
    name: str, strategy: str, units: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of whose the rows are, wherever that is known."""
    build, inputs = MODELS[name]
    twin = build()
    _, here, _, _ = make_private(copy.deepcopy(twin))
    sample_loss(here(inputs())).mean().backward()  # finds the samples' axis, which needs values

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no meta device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    model = copy.deepcopy(twin).to("meta")
    engine, private, optimizer, _ = make_private(
        model, clipping=STRATEGIES[strategy], noise_multiplier=1.0
    )
    private.grad_state.calls.layouts = here.grad_state.calls.layouts
    for _ in range(3):
        optimizer.zero_grad()
        engine.set_groups(torch.empty(4, dtype=torch.int64, device="meta"))
        if units is not None:
            owner = torch.tensor([0, 1, 0, 1 if strategy == "groups" else 2]).to(units)
            count = 2 if strategy == "groups" else 3
            optimizer.grad_state.batch.next_units = UnitSamples(owner, count, 2)
        private(inputs().to("meta")).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in model.parameters())
    assert optimizer.threshold.device.type == "meta"

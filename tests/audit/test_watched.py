"""Scores by every noisy gradient: those of autograd, whatever losses do with the model that they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.audit import OwnRun

COUNT, D = 80, 6


class Tied(nn.Module):
    """One weight twice, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(D, 1)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x) * self.scale)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


def called(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).squeeze(1).sin()


def by_parts(model: Any, batch: Any) -> Tensor:
    like = next(model.parameters())
    x = batch[0].to(like.device, like.dtype)
    penalty = model.first.weight.square().sum()
    return model.last(model.hidden(x)).squeeze(1).sin() + penalty * x[:, 0]


def watched_and_slowly(
    of: Callable[[Any, Any], Tensor], change: Callable[[Tied, int], None]
) -> tuple[Tensor, Tensor]:
    """(scores, those of one canary at a time by autograd) of a run of four steps."""
    torch.manual_seed(2)
    x = torch.randn(COUNT, D, dtype=torch.float64)
    audit, model = OwnRun(TensorDataset(x), torch.rand(COUNT) < 0.5), Tied().double()
    trained = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(x), batch_size=20), max_grad_norm=1.0,
    )  # fmt: skip
    audit.watch(private, optimizer, of, batch_size=32)
    expected = torch.zeros(COUNT, dtype=torch.float64)

    def slowly(_: Any) -> None:
        alone = Tied().double()
        alone.load_state_dict(model.state_dict())
        own = [p for p in alone.parameters() if p.requires_grad]
        with torch.enable_grad():
            for i in range(COUNT):
                slopes = torch.autograd.grad(of(alone, [x[i : i + 1]]).sum(), own)
                for slope, p in zip(slopes, trained, strict=True):
                    expected[i] += (slope * p.grad).sum()

    optimizer.attach_step_hook(slowly)
    for step, batch in enumerate(loader):
        change(model, step)
        optimizer.zero_grad()
        called(private, batch).mean().backward()
        optimizer.step()
    return audit.gradient_scores, expected


@pytest.mark.parametrize("of", [called, by_parts])
def test_buffers_that_change(of: Any) -> None:
    """A schedule, a running mean: a canary's loss is that of the step, not of the call of `watch`."""
    scores, expected = watched_and_slowly(
        of, lambda model, step: model.scale.fill_(-1.0 if step % 2 else 0.5)
    )
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)

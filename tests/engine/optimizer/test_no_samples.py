"""An empty batch that a loop does not run: `grad_sample` of no samples, as for Opacus' optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.errors import StepError

N, D = 24, 3
STRATEGIES: dict[str, Any] = {
    "flat": "flat",
    "automatic": clipping.automatic(gamma=0),
    "per layer": "per_layer",
    "adaptive": clipping.adaptive(),
}


def trained(skip: bool, strategy: Any) -> tuple[list[torch.Tensor], int, int]:
    """Weights after a pass, steps that were accounted, and empty batches among them."""
    torch.manual_seed(0)
    model = nn.Linear(D, 2)
    loader = DataLoader(TensorDataset(torch.randn(N, D)), batch_size=1)
    engine = FastPrivacyEngine()
    norms: Any = [1.0, 1.0] if strategy == "per_layer" else 1.0
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=norms, clipping=strategy,
        noise_generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    torch.manual_seed(2)
    empty = 0
    for (x,) in loader:
        optimizer.zero_grad()
        empty += not len(x)
        if skip and not len(x):
            for p in optimizer.params:
                p.grad_sample = p.new_empty((0, *p.shape))
        else:
            private(x).square().sum(1).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], len(engine.accountant), empty


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_the_step_of_a_pass_over_no_rows(name: str) -> None:
    ran, passed_over = trained(False, STRATEGIES[name]), trained(True, STRATEGIES[name])
    assert ran[2] > 3
    assert ran[1:] == passed_over[1:]
    for x, y in zip(ran[0], passed_over[0], strict=True):
        assert torch.equal(x, y)


def test_samples_are_still_another_engines() -> None:
    torch.manual_seed(0)
    model = nn.Linear(D, 2)
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(N, D)), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    (x,) = next(iter(loader))
    private(x).square().sum(1).mean().backward()
    model.weight.grad_sample = model.weight.new_zeros(1, 2, D)
    with pytest.raises(StepError, match="second engine"):
        optimizer.step()

"""A backward pass inside the autocast block, as much user code has it: norms and sums stay float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import make_private, relative_error

HALF = [torch.bfloat16, torch.float16]


class Shared(nn.Module):
    """One layer used three times, whose uses nearly cancel: its norm is taken when the pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x) - 0.9 * self.f(x.roll(1, 1)) + 1e-2 * torch.tanh(self.f(x * 0.5))


def sums(model: nn.Module, x: torch.Tensor, w: torch.Tensor, C: float, half: torch.dtype | None):
    """Clipped sums and norms of a float32 forward pass; the backward pass under autocast if `half`."""
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    loss = ((private(x) * w).sum((1, 2)) * 10).mean()
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        loss.backward()
    return {n: p.summed_grad for n, p in model.named_parameters()}, optimizer.per_sample_norms


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("seed", range(5))
def test_it_changes_nothing(seed: int, half: torch.dtype) -> None:
    torch.manual_seed(seed)
    model, w = Shared(), torch.randn(1, 1, 64)
    x = torch.randn(4, 1, 64).expand(4, 6, 64) * 3 + torch.randn(4, 6, 64) * 0.1
    plain, norms = sums(model, x, w, 1.0, None)
    other = Shared()
    other.load_state_dict(model.state_dict())
    found, found_norms = sums(other, x, w, 1.0, half)
    assert all(total.dtype == torch.float32 for total in found.values())
    assert relative_error(found, plain) <= 1e-5
    assert torch.allclose(found_norms, norms, rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("half", HALF)
def test_no_contribution_exceeds_the_threshold(half: torch.dtype) -> None:
    """One sample at a time, over 20 draws."""
    for seed in range(20):
        torch.manual_seed(seed)
        model, w = Shared(), torch.randn(1, 1, 64)
        x = torch.randn(1, 1, 64).expand(1, 6, 64) * 3 + torch.randn(1, 6, 64) * 0.1
        (total,) = sums(model, x, w, 0.05, half)[0].values()
        assert float(total.double().norm()) <= 0.05

"""Losses inside a model, over entries that random masks hide (masked autoencoders, masked language)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import make_private, norms, relative_error
from tests.refusal import refused

B, D = 8, 6


class Masked(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], share: float) -> None:
        super().__init__()
        self.net, self.loss, self.share = nn.Sequential(nn.Linear(D, D), nn.Tanh()), loss, share

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < self.share
        return self.loss(self.net(x.masked_fill(mask, 0.0)), x, mask)


def of_all(r: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(r[mask], x[mask])


def of_all_by_weights(r: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return ((r - x).square() * mask).sum() / mask.sum()


def in_rows(r: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return ((r - x).square() * mask).sum(1) / mask.sum(1)


def in_rows_at_least_one(r: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return ((r - x).square() * mask).sum(1) / mask.sum(1).clamp(min=1)


@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.parametrize("loss", [of_all, of_all_by_weights], ids=lambda f: f.__name__)
def test_a_mean_over_what_all_rows_hide(loss: Callable, share: float) -> None:
    torch.manual_seed(0)
    private = make_private(Masked(loss, share))[1]
    with refused("return one loss per sample|the number of samples|mixes samples"):
        private(torch.randn(B, D)).backward()


@pytest.mark.parametrize("loss", [in_rows, in_rows_at_least_one], ids=lambda f: f.__name__)
def test_a_mean_of_rows_own_means_is_exact(loss: Callable) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(B, D, dtype=torch.float64), Masked(loss, 0.7).double()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.manual_seed(5)
    losses = torch.func.functional_call(model, parameters, (x,))
    model.loss = lambda *given: loss(*given).mean()
    rows = [torch.autograd.grad(one, parameters.values(), retain_graph=True) for one in losses]
    own = norms(dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)))
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    torch.manual_seed(5)
    private(x).backward()
    assert relative_error(optimizer.per_sample_norms, own) <= 1e-10

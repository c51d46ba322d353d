"""Parameters that weigh losses: Kendall's, of several tasks by their uncertainty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import Batch, check_exact, make_private
from tests.refusal import refused

B, D = 6, 4


class Kendall(nn.Module):
    """Returns its weights beside the outputs; the losses themselves if it is given targets."""

    def __init__(self, once_per_sample: bool = True) -> None:
        super().__init__()
        self.net, self.weights = nn.Linear(D, 2), nn.Parameter(torch.tensor([0.3, -0.2]))
        self.once_per_sample = once_per_sample

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        out = self.net(x)
        if targets is not None:
            return weighed(out, self.weights, targets)
        return out, self.weights.expand(len(x), 2) if self.once_per_sample else self.weights


def weighed(out: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    return (torch.exp(-weights) * (out - targets) ** 2 + weights).sum(1)


@pytest.mark.parametrize("inside", [True, False])
def test_weights_of_a_rows_own_loss_are_exact(inside: bool) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(B, D), torch.randn(B, 2) * torch.arange(B)[:, None]
    batch = Batch((x, targets), {}, targets) if inside else Batch((x,), {}, targets)
    check_exact(
        Kendall(),
        batch,
        lambda out, targets: out if inside else weighed(*out, targets),
        dtype=torch.float64,
    )


def test_weights_alone_are_refused_with_the_way_out() -> None:
    torch.manual_seed(0)
    private = make_private(Kendall(once_per_sample=False))[1]
    out, weights = private(torch.randn(B, D))
    with refused("errors.html#untracked-use"):
        weighed(out, weights, torch.randn(B, 2)).mean().backward()

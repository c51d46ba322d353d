"""DPDDP around a GradSampleModule, and the optimizer that adds its sums up, as two ranks run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from fastclip.errors import FastclipError
from fastclip.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from fastclip.opacus.grad_sample import GradSampleModule
from fastclip.opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from tests.oracle import row_loss

ROWS = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double()
C, B = 0.5, 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def share() -> Tensor:
    return ROWS[:4] if distributed.get_rank() == 0 else ROWS[4:]


def steps(sigma: str) -> dict[str, Any]:
    """Two steps over this rank's rows."""
    model = network()
    wrapped = DPDDP(GradSampleModule(model))
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=float(sigma), max_grad_norm=C,
        expected_batch_size=B, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        row_loss(wrapped(share())).mean().backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return {"weights": found}


def alone() -> str:
    """The optimizer of one process, in one of two."""
    model = network()
    wrapped = DPDDP(GradSampleModule(model))
    try:
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=C,
            expected_batch_size=B,
        )  # fmt: skip
        row_loss(wrapped(share())).mean().backward()
        optimizer.step()
    except FastclipError as error:
        return str(error)
    return "nothing was said"

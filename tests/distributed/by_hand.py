"""DPDDP around a GradSampleModule, and the optimizer that adds its sums up, as two ranks run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fastclip import FastPrivacyEngine
from fastclip.engine.by_hand import DistributedDPOptimizer, DPOptimizer, GradSampleModule
from fastclip.errors import FastclipError
from fastclip.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from tests.oracle import sample_loss

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
        sample_loss(wrapped(share())).mean().backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return {"weights": found}


def penalized() -> dict[str, Any]:
    """Steps whose loss holds the distance from given weights, which every rank has alike."""
    model, data = network(), TensorDataset(ROWS)
    sent = [p.detach() + 0.3 for p in model.parameters()]
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=DDP(model), optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, 5, sampler=DistributedSampler(data)), noise_multiplier=0.0,
        max_grad_norm=C, poisson_sampling=False,
    )  # fmt: skip
    found = []
    for _ in range(4):
        for (x,) in loader:
            optimizer.zero_grad()
            pairs = zip(model.parameters(), sent, strict=True)
            near = torch.stack([(p - s).square().sum() for p, s in pairs]).sum()
            (sample_loss(private(x)).mean() + 0.1 * near).backward()
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
        sample_loss(wrapped(share())).mean().backward()
        optimizer.step()
    except FastclipError as error:
        return str(error)
    return "nothing was said"

"""A plain loop of Accelerate on several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed

from tests.oracle import row_loss
from tests.parallel.training import batches, model, private, rank


def loop() -> dict[str, Any]:
    """Twelve steps; the weights, and who was drawn."""
    ranks = distributed.get_world_size()
    mine, all_ranks = str(rank()), str(ranks)
    os.environ.update(RANK=mine, LOCAL_RANK=mine, WORLD_SIZE=all_ranks, LOCAL_WORLD_SIZE=all_ranks)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # asked for, and not used
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == ranks
    torch.manual_seed(4)
    plain = model()
    _, net, optimizer, loader = private(accelerator.prepare_model(plain))
    drawn = []
    for x, numbers in batches(loader, 12):
        optimizer.zero_grad()
        accelerator.backward(row_loss(net(x)).mean())
        optimizer.step()
        drawn.append(numbers.tolist())
    weights = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    return {"drawn": drawn, "weights": weights}

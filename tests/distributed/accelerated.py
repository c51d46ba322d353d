"""A plain loop of Accelerate on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import distributed

from tests.distributed.refused import refusal
from tests.distributed.training import batches, full, model, private
from tests.distributed.world import as_torchrun
from tests.oracle import sample_loss


def choose_fsdp(state: Any, **options: Any) -> None:
    """As Accelerate chooses FSDP2 where there are GPUs, and only there."""
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def loop(kind: str) -> dict[str, Any]:
    """Twelve steps; the weights, and who was drawn."""
    as_torchrun()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == distributed.get_world_size()
    torch.manual_seed(4)
    plain = model()
    if kind == "ddp":
        _, net, optimizer, loader = private(accelerator.prepare_model(plain))
    else:
        choose_fsdp(accelerator.state)
        inner = torch.optim.SGD(plain.parameters(), lr=0.1)
        prepared = accelerator.prepare(plain, inner)
        _, net, optimizer, loader = private(prepared[0], optimizer=prepared[1].optimizer)
    drawn = []
    for x, numbers in batches(loader, 12):
        optimizer.zero_grad()
        accelerator.backward(sample_loss(net(x)).mean())
        optimizer.step()
        drawn.append(numbers.tolist())
    weights = torch.cat([full(p.detach()).reshape(-1) for p in plain.parameters()])
    return {"drawn": drawn, "weights": weights}


def prepared_too() -> str:
    """What is said where the private loader is prepared, which shares out the share."""
    as_torchrun()
    accelerator = Accelerator(cpu=True)
    loader = private(accelerator.prepare_model(model()))[3]
    return refusal(lambda: next(iter(accelerator.prepare(loader))))

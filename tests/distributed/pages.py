"""Blocks of pages that are for several ranks."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import test_pages
from tests.distributed.accelerated import choose_fsdp
from tests.distributed.world import as_torchrun


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def block(page: str, number: str) -> bool:
    """The block, and what follows it on every such page: a loop."""
    code = test_pages.blocks(page)[int(number)]
    torch.manual_seed(0)  # the same rows everywhere
    known = test_pages.plain(Stack())
    known |= {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard}
    if "accelerator" in code:
        as_torchrun()
        known["accelerator"] = Accelerator(cpu=True)
    if "prepared" in code:
        choose_fsdp(known["accelerator"].state)
    exec(compile(code, page, "exec"), known)
    for x, y in known["loader"]:
        known["optimizer"].zero_grad()
        known["criterion"](known["model"](x), y).backward()
        known["optimizer"].step()
    steps = torch.tensor([sum(count for *_, count in known["engine"].accountant.history)])
    distributed.all_reduce(steps)
    return bool(steps.item() >= 2 * len(known["loader"]))

"""What one of the two processes of tests/distributed/test_processes.py does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from fastclip.errors import FastclipError
from tests.networks import mlp, rows
from tests.oracle import make_private, sample_loss


class Part(nn.Module):
    """A model one part of which is wrapped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.backbone = nn.Linear(6, 6).double(), wrap(mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(self.first(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": mlp, "ddp": lambda: DDP(mlp()), "dpddp": lambda: DPDDP(mlp()),
    "ddp inside": lambda: Part(DDP), "fsdp2": lambda: fully_shard(mlp()),
    "fsdp2 inside": lambda: Part(fully_shard),
}  # fmt: skip


def refusal(call: Callable[[], object]) -> str:
    """What the engine says to this; nothing if it does not refuse."""
    try:
        call()
    except FastclipError as error:
        return str(error)
    return ""


def trained_later(wrap: Callable[[nn.Module], nn.Module], private: nn.Module) -> None:
    """A backward pass of a model that was made private before there was a process group."""
    sample_loss(wrap(private)(rows())).mean().backward()


def hooks() -> None:
    """The way out."""
    _, private, optimizer, _ = make_private(
        DPDDP(mlp()), grad_sample_mode="hooks", poisson_sampling=True
    )
    sample_loss(private(rows())).mean().backward()
    optimizer.step()


def told(folder: str) -> dict[str, str]:
    """What this process was told."""
    rank = distributed.get_rank()
    distributed.destroy_process_group()  # some models come before there is a group
    torch.manual_seed(0)
    before = [make_private(mlp()) for _ in range(4)]
    waiting = sample_loss(before[3][1](rows())).mean()
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/later", rank=rank, world_size=2
    )
    said = {
        name: refusal(partial(lambda build: make_private(build(), poisson_sampling=True), build))
        for name, build in MODELS.items()
    }
    wraps = {"none": lambda model: model, "ddp": DDP, "dpddp": DPDDP}
    for (name, wrap), (_, private, *_) in zip(wraps.items(), before, strict=False):
        said[f"later {name}"] = refusal(lambda: trained_later(wrap, private))  # noqa: B023
    said["backward alone"] = refusal(waiting.backward)
    said["hooks"] = refusal(hooks)
    sums = [p.summed_grad for made in before for p in made[1].parameters()]
    said["summed"] = str(sum(s is not None for s in sums))
    return said

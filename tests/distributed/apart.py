"""What the two ranks of tests/distributed/test_apart.py do differently, and are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fastclip import FastPrivacyEngine
from tests.distributed.ledgers import said
from tests.distributed.training import private, rank, step, wrapped

ROWS = TensorDataset(
    torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16)
)


def hooks(*, data: Any = ROWS, batch: int = 4, loader: Any = None, **options: Any) -> tuple:
    """(engine, model, optimizer, loader) of one of Opacus' modes."""
    torch.manual_seed(0)
    net = DPDDP(nn.Linear(6, 3))
    engine = FastPrivacyEngine(accountant="rdp")
    options = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "grad_sample_mode": "hooks",
        **options,
    }
    return engine, *engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=loader or DataLoader(data, batch), **options,
    )  # fmt: skip


def taken(made: tuple, change: Callable[[tuple], object] = lambda made: None) -> None:
    """A step of Opacus' modes, and one more after a change."""
    for change_now in (lambda made: None, change):
        change_now(made)
        made[2].zero_grad()
        made[1](ROWS.tensors[0][:2]).square().sum().backward()
        made[2].step()


def opacus() -> dict[str, Any]:
    """Settings that differ at make_private, and later."""

    def made(**options: Any) -> str:
        return said(lambda: hooks(**options))

    def later(change: Callable[[tuple], object], **options: Any) -> str:
        return said(lambda: taken(hooks(**options), change))

    def second(name: str, value: Any) -> Callable[[tuple], None]:
        return lambda it: setattr(it[2], name, value) if rank() else None

    mine = rank()
    other = TensorDataset(*(x.roll(mine, 0) for x in ROWS.tensors))
    whole = DataLoader(ROWS, 4, sampler=DistributedSampler(ROWS, 2, mine, drop_last=True))
    trained = hooks()
    taken(trained)
    return {
        "threshold": made(max_grad_norm=1.0 + mine),
        "sigma": made(noise_multiplier=1.0 + mine),
        "batch": made(batch=4 + 4 * mine),
        "data": made(data=other),
        "order": made(poisson_sampling=False),
        "adaptive": made(
            clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
            max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=2.0,
        ),
        "alone": made(noise_multiplier=1.0, clipping="none" if mine else "flat"),
        "share": said(lambda: taken(hooks(poisson_sampling=False, loader=whole))),
        "later threshold": later(second("max_grad_norm", 100.0)),
        "later thresholds": later(
            second("max_grad_norms", [2.0, 1.0]), clipping="per_layer", max_grad_norm=[1.0, 2.0]
        ),
        "later sigma": later(second("noise_multiplier", 100.0)),
        "later size": later(second("expected_batch_size", 1)),
        "frozen": later(lambda it: mine and it[1]._module.module.bias.requires_grad_(False)),
        "names": list(trained[0].accountant.segments()),
        "steps": sum(steps for *_, steps in trained[0].accountant.history),
    }  # fmt: skip


def fast(folder: str) -> dict[str, Any]:
    """A checkpoint that one rank alone finds; a parameter that one rank alone has frozen."""

    def one(made: tuple, number: int = 1) -> None:
        for _ in range(number):
            x, numbers = next(iter(made[3]))
            made[2].zero_grad()
            step(made, x, numbers)

    path = Path(folder) / "run.pt"
    made = private(wrapped("ddp"), sigma=1.0)
    one(made, 2)
    made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    distributed.barrier()
    again = private(wrapped("ddp"), sigma=1.0)
    if not rank():
        again[0].load_checkpoint(path=path, module=again[1], optimizer=again[2])
    found = {"loaded by one": said(lambda: one(again))}
    if rank():
        again[0].load_checkpoint(path=path, module=again[1], optimizer=again[2])
    found["loaded by all"] = said(lambda: one(again))
    module = wrapped("ddp")
    frozen = private(module, sigma=1.0)
    if rank():
        module.module.head.bias.requires_grad_(False)
    return {
        **found,
        "frozen": said(lambda: one(frozen)),
        "history": list(again[0].accountant.history),
    }

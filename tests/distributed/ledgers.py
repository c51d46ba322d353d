"""What the two ranks of tests/distributed/test_ledgers.py do with the ledger's file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

from fastclip import FastPrivacyEngine
from fastclip.accounting.ledger_file import WriteAheadLog
from tests.distributed.training import WRAPPERS, D, Rows, batches, private, rank, step, wrapped


def logged(path: Path) -> int:
    """Steps in the file."""
    segments, _ = WriteAheadLog(path, writes=False).found()
    return sum(steps for part in segments.values() for *_, steps in part)


def train(made: tuple, steps: int) -> int:
    """Train on so many draws.

    Returns:
        The steps that this rank accounts for.
    """
    for x, numbers in batches(made[3], steps):
        made[2].zero_grad()
        step(made, x, numbers)
    return sum(steps for *_, steps in made[0].accountant.history)


def said(call: Callable[[], object]) -> str:
    """What is raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kept(folder: str, kind: str) -> dict[str, Any]:
    """A run, and one that goes on from its file."""
    path, found = Path(folder) / "ledger", {}
    for name in ("first", "second"):
        torch.manual_seed(5)
        module = wrapped(kind)
        made = private(module, sigma=1.0)
        made[0].write_ahead(path)
        found[name] = train(made, 4)
        made[0].write_ahead(None)
        distributed.barrier()
        found[f"{name} in the file"] = logged(path)
        distributed.barrier()
    return found


def refusals(folder: str) -> dict[str, str]:
    """Ranks that do not see one file."""
    home, mine = Path(folder), Path(folder) / str(rank())
    mine.mkdir()
    early = FastPrivacyEngine()
    found = {"early": said(lambda: early.write_ahead(home / "early"))}
    made = private(wrapped("ddp"), sigma=1.0)
    engine = made[0]
    found["one alone"] = said(lambda: engine.write_ahead(home / "alone" if not rank() else None))
    found["another alone"] = said(lambda: engine.write_ahead(home / "alone" if rank() else None))
    found["not shared"] = said(lambda: engine.write_ahead(mine / "ledger"))
    for name in ("old a", "old b"):
        if not rank():
            WriteAheadLog(home / name).close()
    distributed.barrier()
    found["different"] = said(lambda: engine.write_ahead(home / ("old a", "old b")[rank()]))
    found["no folder"] = said(lambda: engine.write_ahead(home / "none" / "ledger"))
    distributed.barrier()
    found["left"] = " ".join(sorted(each.name for each in home.rglob("*") if each.is_file()))
    found["trains without"] = str(train(made, 2))
    engine.write_ahead(home / "ledger" if rank() else f"{mine}/../ledger")
    found["second"] = said(lambda: engine.write_ahead(home / "other"))
    found["trains with"] = str(train(made, 2))
    distributed.barrier()
    found["in the file"] = str(logged(home / "ledger"))
    return found


def full(folder: str, kind: str) -> dict[str, Any]:
    """The first rank's disk is full in the third step, and has room again after it."""
    path = Path(folder) / "ledger"
    module = wrapped(kind)
    made = private(module, sigma=1.0)
    made[0].write_ahead(path)
    train(made, 2)
    before = [p.detach().clone() for p in module.parameters()]
    write = os.write

    def no_room(file: int, line: bytes) -> int:
        write(file, line[:9])
        raise OSError(errno.ENOSPC, "no space left on device")

    if not rank():
        os.write = no_room  # type: ignore[assignment]
    told = said(lambda: train(made, 1))
    os.write = write
    stayed = all(torch.equal(old, p) for old, p in zip(before, module.parameters(), strict=True))
    counted = sum(steps for *_, steps in made[0].accountant.history)
    name = list(made[0].accountant.segments())
    later = train(made, 2)
    distributed.barrier()
    return {
        "told": told, "stayed": stayed, "counted": counted, "later": later, "names": name,
        "names later": list(made[0].accountant.segments()), "logged": logged(path),
    }  # fmt: skip


def alone(folder: str, mode: str) -> dict[str, Any]:
    """Steps of all ranks; before and after those of models of each rank's own, without a group."""
    engine, mine, world = FastPrivacyEngine(accountant="rdp"), rank(), distributed.get_world_size()

    def private(wrapper: str) -> tuple:
        module = WRAPPERS.get(wrapper, lambda net: net)(nn.Linear(D, 3).double())
        return engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(Rows(), batch_size=8), noise_multiplier=1.0, max_grad_norm=0.5,
            grad_sample_mode=mode, rand_on_empty=mode == "fast",
        )  # fmt: skip

    def train(made: tuple, steps: int) -> None:
        module, optimizer, loader = made
        for x, _ in batches(loader, steps):
            optimizer.zero_grad()
            module(x).pow(2).mean().backward()
            optimizer.step()

    distributed.destroy_process_group()
    own = private("none")
    train(own, 1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=mine, world_size=world
    )
    train(private("ddp" if mode == "fast" else "dpddp"), 2)
    distributed.destroy_process_group()
    train(own, 4 + mine)
    train(private("none"), 2)
    torch.save(engine.accountant.state_dict(), f"{folder}/ledger of {mine}")
    return {"steps": sum(steps for *_, steps in engine.accountant.history)}

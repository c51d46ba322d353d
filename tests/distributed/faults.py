"""A run of two ranks, one of which fails in the middle."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastclip.errors import StepError
from tests.distributed.training import Rows, private, rank, step, wrapped

STEPS = 4000
EVERY = 5
"""Steps between two checkpoints."""


class Broken(Rows):
    """Reading a row fails, once so many were read."""

    def __init__(self, left: float) -> None:
        super().__init__()
        self.left = left

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.left -= 1
        if not self.left:
            raise OSError(errno.EIO, "a broken disk")
        return super().__getitem__(i)


def kill(seconds: float) -> None:
    """This process, so many seconds from now."""

    def end() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def without_room(after: int) -> Callable[..., None]:
    """torch.save on a disk that is full after so many files."""
    save, written = torch.save, iter(range(10**6))

    def full(state: Any, path: Path, **options: Any) -> None:
        if next(written) < after:
            save(state, path, **options)
            return
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "no space left on device")

    return full


def train(folder: str, kind: str, fault: str, seed: str) -> dict[str, Any]:
    """Train until the fault.

    Returns:
        What this rank was told, the steps that it has released, and whether its weights are finite.
    """
    random.seed(int(seed))
    torch.manual_seed(int(seed))
    module, last = wrapped(kind), rank() == 1
    data = Broken(200 if fault == "loader" and last else math.inf)
    made = private(module, "adaptive", sigma=0.5, data=data)
    path = Path(folder) / "run.pt"
    if path.exists():
        made[0].load_checkpoint(path=path, module=made[1], optimizer=made[2])
    clip = made[2].grad_state.clipping
    begun, said = clip.step, ""
    if fault == "none":
        return {"begun": begun, "history": sum(n for *_, n in made[0].accountant.history)}
    if fault == "killed" and last:
        kill(random.uniform(0, 1))
    if fault == "full" and not last:
        torch.save = without_room(2)
    try:
        for x, numbers in _draws(made[3], STEPS):
            made[2].zero_grad()
            step(made, x, numbers)
            if clip.step % EVERY == 0:
                made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    except (StepError, RuntimeError) as error:  # ours, or that of fully_shard's own exchange
        said = str(error)
    steps = sum(n for *_, n in made[0].accountant.history)
    finite = all(bool(own(p).isfinite().all()) for p in module.parameters())
    return {
        "begun": begun,
        "said": said,
        "released": clip.step,
        "accounted": steps,
        "finite": finite,
    }


def own(p: Tensor) -> Tensor:
    """What this rank has of it."""
    return p.to_local() if isinstance(p, DTensor) else p


def _draws(loader: Any, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for x, numbers in loader:
            yield x, numbers
            steps -= 1
            if not steps:
                return

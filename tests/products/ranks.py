"""A step of a trainer of TRL in one of several processes, which draw all rows together; by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed

from tests.products.test_trl import KINDS, ROWS, lora, made, trained


def step(folder: Path, kind: str) -> None:
    private, _, config = KINDS[kind]
    each = ROWS // distributed.get_world_size() if distributed.is_initialized() else ROWS // 2
    run = made(private, lora(), folder, config, per_device_train_batch_size=each)
    before = trained(run.model)
    run.train()
    found = {
        "before": before, "after": trained(run.model), "history": run.engine.accountant.history,
        "world": distributed.get_world_size(),
    }  # fmt: skip
    torch.save(found, folder / f"{distributed.get_rank()}.pt")


if __name__ == "__main__":
    step(Path(sys.argv[1]), sys.argv[2])

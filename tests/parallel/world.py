"""Several ranks (gloo, processes of this machine) that run one function, and what each returned."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
_save = torch.save


def run(world: int, name: str, folder: Path, *arguments: str) -> list[Any]:
    """Run `name` ("module:function") with these arguments on so many ranks.

    Returns:
        What the function returned on each rank, as torch saves it.
    """
    said = ended(world, name, folder, *arguments)
    assert not any(code for code, _ in said), "\n".join(text for _, text in said)
    return [returned(folder, rank) for rank in range(world)]


def ended(world: int, name: str, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """The same where ranks may fail: the exit code of each, and what it has said."""
    started = [
        subprocess.Popen(
            [
                sys.executable, "-m", "tests.parallel.world", str(rank), str(world), str(folder), name,
                *arguments,
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()


def returned(folder: Path, rank: int) -> Any:
    """What the function returned on this rank."""
    return torch.load(folder / f"{rank}.pt", weights_only=True)


def as_torchrun() -> None:
    """The environment that torchrun gives its processes; the process group is there already."""
    mine, ranks = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ.update(RANK=mine, LOCAL_RANK=mine, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # asked for, and not used


def main(rank: int, world: int, folder: Path, name: str, *arguments: str) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    module, function = name.split(":")
    found = getattr(import_module(module), function)(*arguments)
    _save(found, folder / f"{rank}.pt")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # gloo's threads abort an interpreter that ends now and then, whatever has run in it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])

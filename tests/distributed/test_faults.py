"""A rank that ends in the middle: the others end, too, soon and clearly; the last checkpoint goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import world
from tests.distributed.faults import EVERY, STEPS

TRAIN = "tests.distributed.faults:train"
TOLD = "Another rank cannot be reached|Connection (closed by peer|reset)"
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp of parts"])


def check(folder: Path, kind: str, fault: str, seed: int, failed: int) -> None:
    """`failed` is the rank that fails; the other one is told."""
    ended = world.ended(2, TRAIN, folder, str(folder), kind, fault, str(seed))
    codes, said = zip(*ended, strict=True)
    # gloo itself may abort a process that ends after it has lost another one
    assert codes[1 - failed] in (0, -signal.SIGABRT), said
    expected = {-signal.SIGKILL} if fault == "killed" else {1, -signal.SIGABRT}
    assert codes[failed] in expected, said
    other = world.returned(folder, 1 - failed)
    assert re.search(TOLD, other["said"])
    assert other["released"] < STEPS
    assert other["finite"]
    # a step whose sums could not be exchanged is neither released nor accounted
    assert other["accounted"] == other["released"] >= other["begun"]
    (folder / "meeting").unlink(missing_ok=True)
    (found,) = world.run(1, TRAIN, folder, str(folder), kind, "none", "0")
    assert found["begun"] % EVERY == 0
    assert other["released"] - EVERY <= found["begun"] <= other["released"] + 1
    assert found["history"] == found["begun"]
    (folder / "meeting").unlink(missing_ok=True)


@KINDS
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.one_in(4)
def test_a_killed_rank(tmp_path, kind: str, seed: int) -> None:
    check(tmp_path, kind, "killed", seed, failed=1)


@KINDS
@pytest.mark.slow
def test_twenty_killed_ranks(tmp_path, kind: str) -> None:
    """Each run goes on from where the one before was killed."""
    for seed in range(2, 22):
        check(tmp_path, kind, "killed", seed, failed=1)


@pytest.mark.slow
@KINDS
def test_a_loader_that_fails(tmp_path, kind: str) -> None:
    check(tmp_path, kind, "loader", 0, failed=1)


@pytest.mark.slow
@KINDS
def test_a_disk_that_is_full(tmp_path, kind: str) -> None:
    """The checkpoint before stays whole."""
    check(tmp_path, kind, "full", 0, failed=0)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_torchrun_starts_again(tmp_path) -> None:
    """examples.distributed, a rank of which is killed in its second epoch, goes on after its first."""
    path = tmp_path / "run.pt"
    told = [
        "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
        "-m", "tests.distributed.restarted", "--epochs=2", "--batch-size=1024",
        "--checkpoint", str(path),
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *told], cwd=world.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=world.SECONDS, check=False,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # else addresses of the dead
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert "2 ranks, 6 steps" in ended.stdout
    assert sorted(p.name for p in tmp_path.glob("run.pt*")) == ["run.pt", "run.pt.0", "run.pt.1"]
    saved = torch.load(path, weights_only=False)
    (history,) = [v["history"] for k, v in saved.items() if "accountant" in k]
    assert sum(steps for *_, steps in history) == 6

"""A rank that ends in the middle: the others end, too, soon and clearly; the last checkpoint goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.parallel import world
from tests.parallel.faults import EVERY, STEPS

TRAIN = "tests.parallel.faults:train"
TOLD = "another rank of this training cannot be reached|Connection (closed by peer|reset)"
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp of parts"])


def check(folder: Path, kind: str, fault: str, seed: int, failed: int) -> None:
    """`failed` is the rank that fails; the other one is told."""
    ended = world.ended(2, TRAIN, folder, str(folder), kind, fault, str(seed))
    codes, said = zip(*ended, strict=True)
    # gloo itself may abort a process that ends after it has lost another one
    assert codes[1 - failed] in (0, -signal.SIGABRT), said
    assert codes[failed] == (-signal.SIGKILL if fault == "killed" else 1)
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
def test_a_killed_rank(tmp_path, kind: str, seed: int) -> None:
    check(tmp_path, kind, "killed", seed, failed=1)


@KINDS
@pytest.mark.slow
def test_twenty_killed_ranks(tmp_path, kind: str) -> None:
    """Each run goes on from where the one before was killed."""
    for seed in range(2, 22):
        check(tmp_path, kind, "killed", seed, failed=1)


@KINDS
def test_a_loader_that_fails(tmp_path, kind: str) -> None:
    check(tmp_path, kind, "loader", 0, failed=1)


@KINDS
def test_a_disk_that_is_full(tmp_path, kind: str) -> None:
    """The checkpoint before stays whole."""
    check(tmp_path, kind, "full", 0, failed=0)
    assert not list(tmp_path.glob("*.part"))

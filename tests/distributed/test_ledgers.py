"""The ledger's file of several ranks: the first writes, all see it, none releases what it has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastclip import FastPrivacyEngine
from tests.accounting.runs import cause_and_fix
from tests.distributed import world


@pytest.mark.parametrize("kind", ["ddp", "fsdp of parts"])
@pytest.mark.one_in(2)
def test_ranks_go_on_in_one_file(tmp_path: Path, kind: str) -> None:
    found = world.run(2, "tests.distributed.ledgers:kept", tmp_path, str(tmp_path), kind)
    for rank in found:
        assert rank == {"first": 4, "first in the file": 4, "second": 8, "second in the file": 8}


def test_ranks_that_do_not_see_one_file(tmp_path: Path) -> None:
    """Refused on all of them, with nothing left behind."""
    found = world.run(2, "tests.distributed.ledgers:refusals", tmp_path, str(tmp_path))
    for rank in found:
        assert "Call make_private first" in rank["early"]
        assert "the same number of files for the ledger, got 1 on rank 0 and 0" in rank["one alone"]
        assert "the same number of files for the ledger, got 0" in rank["another alone"]
        for name in ("not shared", "different"):
            assert "the same ledger file (one path, on a file system that all of" in rank[name]
        assert "FileNotFoundError" in rank["no folder"]
        assert "already writes to" in rank["second"]
        for name in ("early", "one alone", "another alone", "not shared", "different", "second"):
            assert cause_and_fix(ValueError(rank[name]))
        assert rank["left"] == "meeting old a old b"
        assert rank["trains without"] == "2"
        assert rank["trains with"] == rank["in the file"] == "4"


@pytest.mark.parametrize("kind", ["ddp", "fsdp of parts"])
@pytest.mark.one_in(2)
def test_a_full_disk_of_the_first_rank(tmp_path: Path, kind: str) -> None:
    """The sums were exchanged already: no rank takes the step."""
    found = world.run(2, "tests.distributed.ledgers:full", tmp_path, str(tmp_path), kind)
    assert "no space left on device" in found[0]["told"]
    assert "Another rank could not record this step" in found[1]["told"]
    for rank in found:
        assert rank["stayed"]
        assert (rank["counted"], rank["later"], rank["logged"]) == (2, 4, 4)
        assert rank["names"] == found[0]["names"]
        assert rank["names later"] == found[0]["names later"]


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_steps_that_ranks_take_alone_add_up(tmp_path: Path, mode: str) -> None:
    """What they take together counts once."""
    found = world.run(2, "tests.distributed.ledgers:alone", tmp_path, str(tmp_path), mode)
    assert [rank["steps"] for rank in found] == [9, 10]
    both = FastPrivacyEngine(accountant="rdp").accountant
    for rank in (0, 1):
        both.load_state_dict(torch.load(tmp_path / f"ledger of {rank}", weights_only=True))
    assert sum(steps for *_, steps in both.history) == 2 + 7 + 8

"""The ledger on disk: before the step, whatever becomes of process, disk and file."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import create_accountant

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError, StepError
from tests.accounting.files import logged
from tests.accounting.test_engine_ledger import history, load, saved, start, walk


def test_every_step_is_there_before_the_weights_move(tmp_path: Path) -> None:
    run = start()
    run[0].write_ahead(tmp_path / "ledger")
    seen: list[int] = []
    run[2].original_optimizer.register_step_pre_hook(
        lambda *_: seen.append(logged(tmp_path / "ledger"))
    )
    walk(run, 5)
    assert seen == [1, 2, 3, 4, 5]


def test_a_new_process_counts_what_the_file_holds(tmp_path: Path) -> None:
    """Also what came after the checkpoint from which it goes on; nothing twice."""
    run = start()
    run[0].write_ahead(tmp_path / "ledger")
    early = saved(walk(run, 4))
    walk(run, 3)
    run[0].accountant.log.close()  # as the end of its process does
    later = start()
    later[0].write_ahead(tmp_path / "ledger")
    assert later[0].accountant.history == history(7)
    load(later, early)
    assert later[0].accountant.history == history(7)
    walk(later, 2)
    assert later[0].accountant.history == history(9)
    assert logged(tmp_path / "ledger") == 9


def test_what_was_spent_before_is_written_too(tmp_path: Path) -> None:
    run = walk(start(), 3)
    run[0].write_ahead(tmp_path / "ledger")
    load(run, saved(walk(start(), 2)))
    assert logged(tmp_path / "ledger") == 5
    run[0].accountant = create_accountant("prv")
    walk(run, 1)
    assert logged(tmp_path / "ledger") == 6
    assert sum(steps for *_, steps in run[0].accountant.history) == 6


def test_a_full_disk_stops_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    run[0].write_ahead(tmp_path / "ledger")
    walk(run, 2)
    write = os.write

    def half(file: int, line: bytes) -> int:
        write(file, line[: len(line) // 2])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", half)
    before = [p.clone() for p in run[1].parameters()]
    with pytest.raises(StepError, match=r"cannot be written .*no space left.* not released"):
        walk(run, 1)
    assert all(torch.equal(old, p) for old, p in zip(before, run[1].parameters(), strict=True))
    assert run[0].accountant.history == history(2)
    monkeypatch.undo()
    walk(run, 1)
    assert run[0].accountant.history == history(3)
    assert logged(tmp_path / "ledger") == 3


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_line_that_was_half_written(tmp_path: Path, cut: int) -> None:
    """Its step was not released: it does not count, and the next one is whole."""
    path = tmp_path / "ledger"
    run = start()
    run[0].write_ahead(path)
    walk(run, 3)
    run[0].accountant.log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = start()
    again[0].write_ahead(path)
    walk(again, 1)
    assert again[0].accountant.history == history(3)
    assert logged(path) == 3


def test_a_line_that_lacks_its_end_alone(tmp_path: Path) -> None:
    """Perhaps its step was released: it counts."""
    path = tmp_path / "ledger"
    run = start()
    run[0].write_ahead(path)
    walk(run, 3)
    run[0].accountant.log.close()
    path.write_bytes(path.read_bytes()[:-1])
    again = start()
    again[0].write_ahead(path)
    walk(again, 1)
    assert again[0].accountant.history == history(4)
    assert logged(path) == 4


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    run = start()
    run[0].write_ahead(path)
    walk(run, 3)
    run[0].accountant.log.close()
    whole = path.read_bytes()
    draw = random.Random(0)
    draws = (draw.randrange(8 * len(whole)) for _ in range(12))
    for place in (
        *range(8 * (len(whole) - 1), 8 * len(whole)),
        *draws,
    ):  # the last end of a line, too
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        again = start()
        with pytest.raises(ArgumentError, match=r"of the ledger .* is damaged"):
            again[0].write_ahead(path)
        walk(again, 1)
        assert again[0].accountant.history == history(1)


def test_one_writer(tmp_path: Path) -> None:
    first, second = start(), start()
    first[0].write_ahead(tmp_path / "ledger")
    with pytest.raises(ArgumentError, match="Another engine or process writes to the ledger"):
        second[0].write_ahead(tmp_path / "ledger")
    code = "import sys, fastclip; fastclip.FastPrivacyEngine().write_ahead(sys.argv[1])"
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "ledger")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Another engine or process writes to the ledger" in other.stderr
    first[0].accountant.log.close()
    second[0].write_ahead(tmp_path / "ledger")


def test_a_file_that_somebody_touches(tmp_path: Path) -> None:
    run = start()
    run[0].write_ahead(tmp_path / "ledger")
    walk(run, 1)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(StepError, match="another program has written to it"):
        walk(run, 1)
    (tmp_path / "ledger").unlink()
    with pytest.raises(StepError, match="it was moved or deleted"):
        walk(run, 1)
    assert run[0].accountant.history == history(1)


def test_a_step_that_was_written_and_not_recorded(tmp_path: Path) -> None:
    """A Ctrl-C between the two: it counts once more on the disk, and no other twice."""
    run = walk(start(), 2)
    run[0].write_ahead(tmp_path / "ledger")
    walk(run, 3)
    name = next(reversed(run[0].accountant.segments()))
    run[0].accountant.log.record(name, history(1), run[0].accountant.protected)
    load(run, saved(run))
    assert logged(tmp_path / "ledger") == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_fork_does_not_write_into_its_parents_file(tmp_path: Path) -> None:
    engine = FastPrivacyEngine()
    engine.write_ahead(tmp_path / "ledger")
    child = os.fork()
    if not child:
        try:
            engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        except StepError as error:
            os._exit(42 if "is a fork of" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert logged(tmp_path / "ledger") == 1


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    engine: Any = FastPrivacyEngine()
    with pytest.raises(FileNotFoundError):
        engine.write_ahead(tmp_path / "no folder" / "ledger")
    with pytest.raises(IsADirectoryError):
        engine.write_ahead(tmp_path)
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)  # as before

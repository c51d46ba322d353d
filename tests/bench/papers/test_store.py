"""Results are whole at every moment, and a run is counted once, wherever a process dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from bench.papers.store import COLUMNS, Store, write
from bench.processes import ROOT
from fastclip.errors import ArgumentError

COMMAND = (
    "run", "breast-cancer", "--strategy", "dp_sgd", "dpsgd_f", "--seeds", "2", "--epsilon", "8",
    "--epochs", "6", "--jobs", "1",
)  # fmt: skip


def rows(key: str, value: float = 1.0) -> pd.DataFrame:
    """What a run might have measured."""
    told = (key, "e", "d", False, "dp_sgd", 1.0, 0, "test", 1, 1.0, "class", "8", "m", value, False)
    return pd.DataFrame([dict(zip(COLUMNS, told, strict=True))])


def test_runs_are_merged_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("a", rows("a"))
    assert store.done() == {"a"}
    assert store.frame().empty
    merged = store.merge()
    pd.testing.assert_frame_equal(merged, rows("a"))
    store.add("b", rows("b", 2.0))
    assert store.done() == {"a", "b"}
    assert store.merge()["value"].tolist() == [1.0, 2.0]
    assert store.merge()["value"].tolist() == [1.0, 2.0]
    assert not list((tmp_path / "runs").glob("*.csv"))


def test_a_kill_between_merging_and_deleting_counts_nothing_twice(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("a", rows("a"))
    kept = (tmp_path / "runs" / "a.csv").read_bytes()
    store.merge()
    (tmp_path / "runs" / "a.csv").write_bytes(kept)
    assert Store(tmp_path).merge()["value"].tolist() == [1.0]


def test_groups_that_look_like_numbers_stay_text(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("a", rows("a"))
    assert store.merge()["group"].tolist() == ["8"]
    assert store.frame()["group"].tolist() == ["8"]


def test_the_same_results_are_the_same_file(tmp_path: Path) -> None:
    files = []
    for folder in ("one", "two"):
        store = Store(tmp_path / folder)
        store.add("a", rows("a"))
        store.merge()
        files.append(store.file.read_bytes())
    assert files[0] == files[1]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add("a", rows("a"))
    store.merge()
    store.file.write_bytes(store.file.read_bytes()[:30])
    with pytest.raises(ArgumentError, match="cannot be read as results"):
        store.frame()
    store.file.unlink()
    rows("a").drop(columns="value").to_csv(store.file, index=False)
    with pytest.raises(ArgumentError, match=r"lacks \['value'\]"):
        store.frame()


def test_another_split_needs_another_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    told = {"data": "d", "synthetic": False, "split": {"seed": 0}}
    store.note("e", {**told, "commands": ["one"]})
    store.note("e", {**told, "commands": ["two", "one"]})
    assert store.about()["e"]["commands"] == ["one", "two"]
    with pytest.raises(ArgumentError, match="holds results of e with split"):
        store.note("e", {**told, "split": {"seed": 1}, "commands": []})


def test_a_file_that_is_written_is_never_half_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(TypeError):
        write(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


def command(out: Path) -> list[str]:
    """The command of these tests."""
    return [sys.executable, "-m", "bench.papers", *COMMAND, "--out", str(out)]


def environment() -> dict[str, str]:
    """Of a process that finds this project."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def results(out: Path) -> pd.DataFrame:
    """Without the time that runs took."""
    frame = Store(out).merge()
    return frame[frame["measure"] != "seconds"].reset_index(drop=True)


def finish(out: Path) -> None:
    """Run the command to its end."""
    done = subprocess.run(
        command(out), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def killed(out: Path, chance: random.Random) -> bool:
    """Start the command and kill it and its workers at a random moment; False if it had ended."""
    process = subprocess.Popen(
        command(out), cwd=ROOT, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(chance.uniform(4, 20))
    alive = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_count_nothing_twice(tmp_path: Path) -> None:
    chance = random.Random(0)
    finish(tmp_path / "whole")
    expected = results(tmp_path / "whole")
    kills = 0
    out = tmp_path / "0"
    while kills < 10:
        if killed(out, chance):
            kills += 1
        else:  # the command had ended: another folder for the kills that are left
            pd.testing.assert_frame_equal(results(out), expected)
            out = tmp_path / str(kills)
    finish(out)
    pd.testing.assert_frame_equal(results(out), expected)
    assert not list((out / "runs").iterdir()) or {
        path.suffix for path in (out / "runs").iterdir()
    } == {".lock"}

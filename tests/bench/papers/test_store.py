"""Results are whole at every moment, and a run is counted once, wherever a process dies."""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
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
    whole = bytearray(gzip.compress(b"run,experiment" * 1000, mtime=0))
    whole[12] ^= 255
    store.file.write_bytes(bytes(whole))
    with pytest.raises(ArgumentError, match="cannot be read as results"):
        store.frame()
    store.file.unlink()
    rows("a").drop(columns="value").to_csv(store.file, index=False)
    with pytest.raises(ArgumentError, match=r"lacks \['value'\]"):
        store.frame()


TOLD = {
    "data": "d", "synthetic": False, "split": {"seed": 0},
    "settings": {"private": {"lr": 0.1}, "weights": (1.0, 2.0)}, "strategies": {"dp_sgd": "Clipping()"},
}  # fmt: skip


def made(command: str, date: str = "today") -> dict[str, Any]:
    """Where results were made."""
    return {"command": command, "date": date, "machine": {}, "versions": {"torch": "2"}}


def test_every_origin_is_told_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.note("e", TOLD, made("one"))
    store.note("e", {**TOLD, "strategies": {"adaptive": "Clipping(Quantile())"}}, made("two"))
    store.note("e", TOLD, made("one", "tomorrow"))
    about = store.about()["e"]
    assert about["made"] == [made("one"), made("two")]
    assert set(about["strategies"]) == {"dp_sgd", "adaptive"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"split": {"seed": 1}}, "with split {'seed': 0}, this run has {'seed': 1}"),
        (
            {"settings": {"private": {"lr": 0.2}}},
            "with private {'lr': 0.1}, this run has {'lr': 0.2}",
        ),
        ({"strategies": {"dp_sgd": "Clipping(2)"}}, "with dp_sgd 'Clipping()', this run has"),
    ],
)
def test_other_data_or_settings_need_another_folder(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.note("e", TOLD, made("one"))
    with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
        store.note("e", {**TOLD, **changed}, made("two"))
    assert "pass another folder with --out" in str(caught.value)
    assert store.about()["e"]["made"] == [made("one")]


def test_a_file_that_is_written_is_never_half_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(TypeError):
        write(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"


def test_a_run_that_is_merged_meanwhile_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process merges between the two looks."""
    store = Store(tmp_path)
    store.add("a", rows("a"))
    look, looks = Path.glob, 0

    def glob(path: Path, pattern: str) -> Any:
        nonlocal looks
        looks += 1
        found = list(look(path, pattern))
        if looks == 1:
            store.merge()
        return iter(found)

    monkeypatch.setattr(Path, "glob", glob)
    assert store.done() == {"a"}


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The command's own process alone: its workers are not told."""
    words = [*command(tmp_path), "--epochs", "1000"]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        parent = psutil.Process(process.pid)
        runs = tmp_path / "runs"
        while not (runs.exists() and list(runs.glob("breast-cancer-*.lock"))):
            assert process.poll() is None
            time.sleep(0.1)
        workers = parent.children(recursive=True)
        assert workers
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
    finally:
        process.kill()


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

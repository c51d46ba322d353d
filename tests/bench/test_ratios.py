"""The benchmark's arithmetic: ratios pair runs of one round, and failures are told."""

from __future__ import annotations

import json

import pytest

from bench.processes import MARK, report
from bench.train import summarise


def run(round_: int, mode: str, seconds: float, mib: float, cpu_wait: float = 0.0) -> dict:
    return {
        "round": round_, "workload": "resnet18", "mode": mode, "peak_mib": mib,
        "step_s": [seconds, seconds, seconds], "cpu_wait": cpu_wait,
    }  # fmt: skip


def test_ratios_pair_runs_of_one_round() -> None:
    """The machine was twice as slow in round 1: the ratio of each round stays what it is."""
    runs = [run(0, "non_private", 1.0, 100), run(0, "fastclip", 1.2, 110)]
    runs += [run(1, "non_private", 2.0, 100), run(1, "fastclip", 2.6, 130)]
    runs += [run(2, "non_private", 1.0, 100), run(2, "fastclip", 1.4, 150)]
    row = summarise(runs, "resnet18", "fastclip")
    assert row["time_ratio"] == pytest.approx(1.3)
    assert row["time_ratio_range"] == pytest.approx([1.2, 1.4])
    assert row["memory_ratio"] == pytest.approx(1.3)


def test_busy_runs_do_not_enter_time_ratios() -> None:
    runs = [run(0, "non_private", 1.0, 100), run(0, "fastclip", 9.0, 110, cpu_wait=0.9)]
    runs += [run(1, "non_private", 1.0, 100), run(1, "fastclip", 1.2, 130)]
    row = summarise(runs, "resnet18", "fastclip")
    assert row["time_ratio"] == pytest.approx(1.2)
    assert row["memory_ratio_rounds"] == 2


def test_a_mode_that_fails_is_a_row_with_its_error(capsys: pytest.CaptureFixture) -> None:
    def fails() -> dict:
        raise RuntimeError("the first line\nand another")

    report(fails)
    line = capsys.readouterr().out.strip()
    told = json.loads(line.removeprefix(MARK))
    assert told["error"] == "RuntimeError: the first line"
    assert "/" not in told["detail"]  # names of files, not folders
    failed = {"round": 0, "workload": "resnet18", "mode": "opacus_hooks", **told}
    row = summarise([run(0, "non_private", 1.0, 100), failed], "resnet18", "opacus_hooks")
    assert row["error"] == told["error"]
    assert "time_ratio" not in row

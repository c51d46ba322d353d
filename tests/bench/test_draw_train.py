"""The picture of the benchmark of training: failures and a busy machine are told in it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import draw
from bench.draw_train import draw_train, warning_of
from bench.parts import FORWARD, INPUTS, NORMS, WEIGHTS

ROOT = Path(__file__).parents[2]


def row(mode: str, ratio: float) -> dict:
    return {
        "workload": "bert", "mode": mode, "rounds": 3, "time_ratio": ratio,
        "time_ratio_range": [ratio - 0.1, ratio + 0.1], "memory_ratio": ratio,
        "memory_ratio_range": [ratio, ratio],
    }  # fmt: skip


def result(cpu_wait: float = 0.0) -> dict:
    """A result with made-up figures."""
    failed = {"workload": "bert", "mode": "opacus_hooks", "rounds": 0,
              "error": "RuntimeError: stack expects each tensor to be equal size"}  # fmt: skip
    parts = {"workload": "bert", "non_private": {FORWARD: 1.0, INPUTS: 1.0, WEIGHTS: 2.0},
             "fastclip": {FORWARD: 1.0, INPUTS: 1.0, NORMS: 3.0}, "cpu_wait": 0.0}  # fmt: skip
    return {
        "machine": {"processor": "P", "cores": 2}, "date": "2026-01-02T00:00:00",
        "versions": {"torch": "2", "opacus": "1"}, "parts": [parts],
        "summary": [row("non_private", 1.0), row("fastclip", 1.25), failed],
        "runs": [{"cpu_wait": cpu_wait}, {"cpu_wait": 0.0}, {"error": "no"}],
    }  # fmt: skip


def test_failures_figures_and_parts_are_written(tmp_path: Path) -> None:
    told: list[str] = []
    text, label = Axes.text, Figure.supxlabel

    def keep_text(self: Axes, x: float, y: float, s: str, **options: object) -> object:
        told.append(s)
        return text(self, x, y, s, **options)

    def keep_label(self: Figure, s: str, **options: object) -> object:
        told.append(s)
        return label(self, s, **options)

    with patch.object(Axes, "text", keep_text), patch.object(Figure, "supxlabel", keep_label):
        assert draw_train(result(cpu_wait=0.5), tmp_path / "a.png") == 1
    shown = "\n".join(told)
    assert "FAILS: RuntimeError: stack expects" in shown
    assert shown.count("1.25x") == 2
    assert "0.75" in told  # norms, of the step of ordinary training
    assert "CAUTION: other programs were busy during 1 of 4 processes" in shown
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_quiet_machine_is_not_warned_of() -> None:
    assert warning_of(result()) is None


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_train({**result(), "summary": [row("non_private", 1.0)]}, tmp_path / "a.png")


def test_the_committed_result_is_drawn_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = ROOT / "bench" / "results" / "train-cpu.json"
    draw.main([str(file), "--out", str(tmp_path / "a.png")])
    count = len({row["workload"] for row in json.loads(file.read_text())["summary"]})
    assert f"{count} workloads plotted" in capsys.readouterr().out

"""bench.load finds what grows: leaks that are put in on purpose pass a limit."""

from __future__ import annotations

import gc
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.load import __main__ as load
from bench.load import runs
from bench.load.verdicts import Curve, verdict

SHORT = 0.002  # of 10^5 steps


@pytest.fixture(autouse=True)
def _nothing_else_is_counted() -> Iterator[None]:
    """Objects are counted often; those of the tests before would take half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def failed(row: dict[str, Any]) -> set[str]:
    return {
        figure["what"]
        for figure in row["verdicts"]
        if not figure["holds"] and "time" not in figure["what"]  # machines are noisy
    }


@pytest.mark.extras
def test_nothing_grows() -> None:
    row = runs.steps(SHORT)
    assert not failed(row)
    assert row["epsilon"] > 0
    assert len(row["curve"]["step"]) >= 100


def test_a_leak_of_objects_and_of_handles_is_found() -> None:
    kept: list[Any] = []

    def leak() -> None:
        kept.append([object() for _ in range(3)])
        kept.append([[], [], []])
        kept.append(os.open(os.devnull, os.O_RDONLY))

    try:
        found = failed(runs.steps(SHORT, leak))
    finally:
        for item in kept:
            if isinstance(item, int):
                os.close(item)
    assert {"objects grown in the second half", "handles grown in the second half"} <= found


def test_a_leak_of_memory_is_found() -> None:
    kept: list[mmap.mmap] = []

    def leak() -> None:
        kept.append(mmap.mmap(-1, 200_000))  # new memory, however much earlier tests have left free
        kept[-1].write(b"1" * 200_000)

    assert "memory grown in the second half" in failed(runs.steps(SHORT, leak))


def test_drift_of_a_steps_time_is_seen() -> None:
    curve = Curve()
    curve.samples["step_ms"] = [1.0] * 50 + [2.0] * 50
    for key in ("rss_mib", "handles", "objects"):
        curve.samples[key] = [1.0] * 100
    assert [f["what"] for f in curve.verdicts() if not f["holds"]] == [
        "step's time, last tenth over second"
    ]


@pytest.mark.extras
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each case in a process of its own; a case that dies or passes a limit is said, and drawn."""
    out = tmp_path / "load.json"
    assert load.main(["--cases", "rows", "--scale", "0.01", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert all(figure["holds"] for figure in result["rows"][0]["verdicts"])
    load.main(["--draw", str(out), "--out", str(tmp_path / "load.png")])
    assert (tmp_path / "load.png").stat().st_size > 0
    broken = {"case": "rows", "verdicts": [verdict("bytes", 2, 1)]}
    monkeypatch.setattr(load, "run_module", lambda *_, **__: broken)
    assert load.main(["--cases", "rows"]) == 1
    assert "TOO MUCH" in capsys.readouterr().out
    monkeypatch.setattr(load, "run_module", lambda *_, **__: {"error": "Died", "detail": "here"})
    assert load.main(["--cases", "rows"]) == 1
    assert "died: Died" in capsys.readouterr().out

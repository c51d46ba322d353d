"""What bench.gpu leaves behind: a short table, JSON without folders, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import draw, gpu
from bench.gpu_table import table
from bench.gpu_tasks import TASKS
from bench.workloads import MODES

ROOT = Path(__file__).parents[2]


def synthetic(cases: int) -> dict[str, Any]:
    """A result with made-up figures, for the table and the picture."""
    rows: list[dict] = []
    for i in range(cases):
        operation, bound = [("ghost_norm", "arithmetic"), ("embedding_norm", "memory")][i % 2]
        rows.append({
            "id": f"x.{i}", "name": f"{operation}-ClinicalBERT-b{i}-t512-d768-bfloat16",
            "operation": operation, "model": "ClinicalBERT", "dtype": "bfloat16",
            "shape": {"b": i, "t": 512, "d": 768}, "seconds": [1e-4, 2e-4 + i * 1e-6, 3e-4],
            "host_s": 1e-5, "fraction": 0.2 + i / 200, "bound": bound, "backend": "triton",
            "others": {"einsum": {"ratio": 1.5 + i / 10}, "Opacus": {"error": "no memory"}},
        })  # fmt: skip
    rows.append({"id": "y.0", "name": "conv_norm-toy", "error": "WrongResult: far off" * 20})
    steps = [
        {"task": task, "mode": mode, "step_s": [1.0, 1.1, 1.2], "host_s": 1.0, "peak_mib": 9e3,
         "time_ratio": 1.25, "memory_ratio": 1.1, "host_syncs": 0, "launches": 1000.0,
         "busy_share": 0.9, "norms": {"ghost": 70, "direct": 30}, "held_bytes": 2**30,
         "searches": 9, "top": [{"name": "void cutlass" * 9, "share": 0.25}] * 4}
        for task in TASKS for mode in (*list(MODES)[:1], "non_private_graph", *list(MODES)[1:])
    ]  # fmt: skip
    steps[2] |= {"kernels": {"ghost_norm": "triton", "clip_scale": "reference: it failed"},
                 "warnings": ["the triton kernel of clip_scale is not used"]}  # fmt: skip
    steps.insert(3, {"task": "bert_t128", "mode": "fastclip_graph",
                     "error": "not captured: StepError: " + "x" * 200})  # fmt: skip
    steps[5] = {"task": "bert_t128", "mode": "opacus_ghost", "error": "OutOfMemoryError: CUDA"}
    ceiling = {"matmul_tflops": {"bfloat16": 1.0, "float32": "OutOfMemoryError"}, "copy_gbps": 1.0}
    failures = [{"test": f"tests/kernels/test_x.py::test_{i}", "message": "far"} for i in range(30)]
    return {
        "card": "synthetic", "date": "2000-01-01", "problems": [], "nvcc": "0", "seconds": 1.0,
        "versions": {"torch": "0", "triton": "0"},
        "build": {"built": False, "seconds": 3.0, "why": "there is no nvcc"},
        "ahead": [{"task": "gpt2", "seconds": 9.0}, {"task": "vit_b", "error": "stopped"}],
        "tests": {"passed": 1, "failed": 30, "errors": 0, "skipped": 0, "seconds": 1.0,
                  "failures": failures},
        "kernels": {"ceiling": ceiling, "rows": rows, "not_run": 2},
        "steps": {"runs": steps, "summary": steps, "not_run": 0},
    }  # fmt: skip


@pytest.mark.parametrize("cases", [3, 200])
def test_the_table_is_short(cases: int) -> None:
    lines = table(synthetic(cases)).splitlines()
    assert len(lines) <= 75  # bench.gpu adds one
    assert max(map(len, lines)) <= 150
    text = "\n".join(lines)
    assert len(text) < 11_800  # of 12,000 that are shown
    assert "fastclip._C: ABSENT: there is no nvcc (3 s)" in text
    assert "compiled ahead: 1 of 2 in 9 s; vit_b stopped" in text
    assert "not captured: StepError" in text
    assert "1.25 [1.10]" in text  # measured, goal
    assert "norms: ghost 70, direct 30; 1.00 GiB held; 9 searches" in text
    assert "FAILS conv_norm-toy: WrongResult" in text
    assert "OutOfMemoryError: CUDA" in text
    assert "einsum 1.5" in text
    assert "by the reference: clip_scale" in text
    assert "WARNING: the triton kernel of clip_scale" in text
    assert lines[-1] == "1 s in all"


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(synthetic(30)))
    draw.main([str(file)])
    assert (tmp_path / "result.png").stat().st_size > 10_000
    assert "30 cases drawn" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.draw({"kernels": {"rows": [{"id": "x", "error": "no"}]}}, tmp_path / "none.png")


def test_results_hold_no_folder_and_no_nan() -> None:
    told = {"error": "ValueError: in /srv/x/y.py, 5 TFLOP/s of a / b", "loss": float("nan")}
    assert gpu.without_folders([told, 1, True, None]) == [
        {"error": "ValueError: in y.py, 5 TFLOP/s of a / b", "loss": None}, 1, True, None
    ]  # fmt: skip


def test_a_trial_never_writes_to_the_results(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--device", "cpu"])
    assert "give --out" in capsys.readouterr().err

"""What is read from a profiler's trace, and what Triton's searches are made to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_profile import chosen_configurations, profiled, summarise, union

ROOT = Path(__file__).parents[2]


def event(name: str, start: float, length: float, category: str = "kernel") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def test_a_trace() -> None:
    """Two steps: kernels of two streams overlap, and an annotation spans all of them."""
    events = [
        event("Optimizer.step", 0, 1e6, "gpu_user_annotation"),
        event("aten::mm", 0, 50, "cpu_op"), {"ph": "s", "name": "arrow", "cat": "ac2g"},
        event("gemm", 0, 100), event("gemm", 50, 100), event("norm", 150, 50),
        event("copy", 300, 100, "gpu_memcpy"), event("fill", 350, 50, "gpu_memset"),
    ]  # fmt: skip
    found = summarise(events, steps=2)
    assert found["launches"] == 1.5
    assert found["moves"] == 1.0
    assert found["busy_s"] == pytest.approx(300e-6 / 2)
    assert found["kernel_s"] == pytest.approx(250e-6 / 2)
    assert [k["name"] for k in found["kernels"]] == ["gemm", "norm"]
    assert found["kernels"][0] == {
        "name": "gemm", "calls": 1.0, "seconds": pytest.approx(1e-4), "share": pytest.approx(0.8)
    }  # fmt: skip


def test_no_more_than_forty() -> None:
    found = summarise([event(f"k{i}", i, i + 1) for i in range(100)], steps=1)
    assert [k["name"] for k in found["kernels"]] == [f"k{i}" for i in range(99, 59, -1)]
    assert summarise([], steps=1)["kernels"] == []


def test_union() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert union([]) == 0


def test_a_trace_of_this_machine() -> None:
    x = torch.randn(8, 8)
    found = profiled(lambda: x @ x, torch.device("cpu"), steps=2)
    assert any("mm" in kernel["name"] for kernel in found["kernels"])
    assert found["launches"] >= 1


def test_nothing_is_chosen_where_nothing_is_searched() -> None:
    assert chosen_configurations() == []


def test_each_process_compiles_its_share() -> None:
    """Triton's own pruning, cut by `compile_only`: three processes together see every one."""
    pytest.importorskip("triton")
    program = (
        "import sys; from bench.kernels import tuning; from types import SimpleNamespace as N;"
        "from triton.runtime.autotuner import Autotuner as A; k = int(sys.argv[1]);"
        "tuning.compile_only((k, 3));"
        "s = N(configs=list('abcde'), early_config_prune=None, perf_model=None);"
        "print(''.join(A.prune_configs(s, {})), ''.join(A.prune_configs(N(configs=['x'],"
        "early_config_prune=None, perf_model=None), {})))"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", program, str(k)], cwd=ROOT, capture_output=True, text=True
        ).stdout.split()
        for k in range(3)
    ]
    assert seen == [["ad", "x"], ["be", "x"], ["c", "x"]]

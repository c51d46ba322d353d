"""The parts of bench.gpu_card without a GPU: what dies is told, limits hold, the table is short."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import draw, gpu_kernels, gpu_machine, gpu_steps, gpu_tests
from bench.children import Child
from bench.deadline import Deadline
from bench.gpu_card import without_folders
from bench.gpu_runs import step_plan
from bench.gpu_table import table
from bench.kernels import harness, tuning
from bench.processes import MARK

ROOT = Path(__file__).parents[2]
ORDER = {"device": "cpu"}

CHILD = """
import json, os, sys, time
job = json.loads(sys.stdin.readline())
def tell(**message): print("result:" + json.dumps(message), flush=True)
"""
KERNELS = (
    CHILD
    + """
names = ["good.0", "dies.0", "good.1", "hangs.0", "lost.0", "good.2"]
tell(plan=names)
if job["ceiling"] is None: tell(ceiling={"copy_gbps": 1.0, "matmul_tflops": {}})
for name in names:
    if name in job["skip"]: continue
    tell(start=name, id=name, name=name)
    if name == "dies.0": os._exit(3)
    if name == "hangs.0": time.sleep(60)
    tell(row={"id": name, "name": name, **({"error": "CUDA error"} if name == "lost.0" else {})})
    if name == "lost.0": raise RuntimeError("the context is lost in /a/b/c.py")
"""
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "fake_child.py").write_text(text)
        return "fake_child"

    return write


def test_cases_that_take_their_process_down_stop_nothing(fake: Callable[[str], str]) -> None:
    saves: list[int] = []
    result: dict = {}
    found = gpu_kernels.run_kernels(
        Deadline(30.0), ORDER, result, lambda: saves.append(len(result["kernels"]["rows"])),
        module=fake(KERNELS), silence=2.0,
    )  # fmt: skip
    rows = {row["id"]: row.get("error") for row in found["rows"]}
    assert rows == {
        "good.0": None, "dies.0": "ProcessDied: exit 3", "good.1": None,
        "hangs.0": "TimeoutError: no answer within 2 s", "lost.0": "CUDA error", "good.2": None,
    }  # fmt: skip
    assert found["not_run"] == 0
    assert found["ceiling"]["copy_gbps"] == 1.0
    assert saves == [1, 2, 3, 4, 5, 6, 6]
    again = gpu_kernels.run_kernels(
        Deadline(30.0), ORDER, result, lambda: None, module="fake_child"
    )
    assert len(again["rows"]) == 6  # what is there is not run again


def test_kernels_end_at_their_deadline(fake: Callable[[str], str]) -> None:
    begin = time.monotonic()
    found = gpu_kernels.run_kernels(Deadline(3.0), ORDER, {}, lambda: None, module=fake(KERNELS))
    assert time.monotonic() - begin < 12
    assert [row["id"] for row in found["rows"]] == ["good.0", "dies.0", "good.1"]
    assert found["not_run"] == 3


def test_a_child_that_cannot_start_is_told(fake: Callable[[str], str]) -> None:
    found = gpu_kernels.run_kernels(
        Deadline(20.0), ORDER, {}, lambda: None, module=fake("raise ImportError('no torch')")
    )
    assert found["error"] == "ProcessDied: exit 1 ImportError: no torch"


TOY = """
import torch
from bench.kernels.case import Case, normal
def case(name, run):
    make = lambda device, generator: {"x": normal((64,), torch.float32, device, generator)}
    return Case(name, "toy", {"n": 64}, torch.float32, make, run, {}, 128.0, 512.0)
def wrong(x):
    return x.sum() if x.dtype == torch.float64 else x.sum() * 2
def cases():
    runs = [lambda x: x * 2, wrong, lambda x: x.missing]
    return [case(f"op{i}", run) for i, run in enumerate(runs)]
"""


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict], None]:
    """Puts a job where a child's main looks for it; what it patches stays unpatched here."""
    monkeypatch.setattr(tuning, "anew", lambda: None)
    monkeypatch.setattr(tuning, "compile_only", lambda share=(0, 1): None)

    def put(order: dict) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order) + "\n"))

    return put


def told(capsys: pytest.CaptureFixture) -> list[dict]:
    """The messages that a child's main has printed."""
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


@pytest.mark.extras
def test_the_child_that_times_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, send: Callable, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "bench_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    order = {**ORDER, "modules": ["bench_toy", "bench_absent"], "case_seconds": 0.01, "seconds": 60}
    ceiling = {"matmul_tflops": {"float32": 1.0}, "copy_gbps": 1.0}
    send({**order, "ceiling": ceiling, "skip": ["toy.3"]})
    harness.main()
    messages = told(capsys)
    assert messages[0] == {"plan": ["toy.0", "toy.1", "toy.2"]}
    assert [m["start"] for m in messages if "start" in m] == ["toy.0", "toy.1", "toy.2"]
    rows = {m["row"]["id"]: m["row"] for m in messages if "row" in m}
    assert rows["toy.0"]["relative_error"] == 0
    assert rows["toy.0"]["fraction"] > 0
    assert rows["toy.1"]["error"].startswith("WrongResult")
    assert "missing" in rows["toy.2"]["error"]
    assert rows["absent"]["error"].startswith("ModuleNotFoundError")
    send({**order, "ceiling": ceiling, "match": "op0", "seconds": -1})
    harness.main()
    assert [m for m in told(capsys) if "row" not in m] == [{"plan": ["toy.0"]}]  # no time left
    send({**order, "ceiling": ceiling, "last": ["op0-toy-n64-float32"], "seconds": -1})
    harness.main()
    assert told(capsys)[0] == {"plan": ["toy.1", "toy.2", "toy.0"]}  # a card has run it before
    send({**order, "share": [0, 2]})
    harness.main()
    assert not told(capsys)  # compiled ahead, in silence


def test_a_child_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_steps, "TOLD_EVERY", 0.01)
    with gpu_steps.telling():
        time.sleep(0.2)
    messages = told(capsys)
    assert messages
    assert set(messages[0]["progress"]) == {"seconds", "trials", "search_s"}
    time.sleep(0.05)
    assert not told(capsys)  # no more


@pytest.mark.extras
def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "@pytest.mark.skip\n"
        "def test_skips(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError('no')\n"
        "def test_errs(broken): pass\n"
    )
    result: dict = {}
    found = gpu_tests.run_tests(Deadline(60.0), result, lambda: None, "mended", [str(tmp_path)])
    assert result["mended"] is found
    counts = [found[name] for name in ("passed", "failed", "errors", "skipped")]
    assert counts == [1, 1, 1, 1]
    messages = [failure["message"] for failure in found["failures"]]
    assert sorted(messages) == ["ValueError: no", "assert 1 == 2"]  # whatever their order
    (at,) = found["failures"][0]["at"]  # relative to the checkout, where that lies beside it
    assert (Path.cwd() / at).resolve() == tmp_path.resolve() / "test_toy.py:3"
    assert "error" not in found


def test_tests_end_at_their_deadline(tmp_path: Path) -> None:
    found = gpu_tests.run_tests(Deadline(0.0), {}, lambda: None, "tests", [str(tmp_path)])
    assert found["error"] == "stopped after 0 s; running: none"
    events = [{"start": "a"}, {"start": "b"}, {"test": "a", "outcome": "passed", "message": ""}]
    lines = [json.dumps(event) for event in events]
    assert gpu_tests.summarise([*lines, '{"start": "c'])["running"] == ["b"]


def test_the_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = gpu_machine.environment("cuda")
    assert (found["card"], found["capability"], found["memory_gib"]) == ("NVIDIA H200", "9.0", 141)
    assert found["versions"]["torch"] == torch.__version__
    json.dumps(found)


def test_wheels_are_for_this_run_alone(tmp_path: Path) -> None:
    name = "fastclip_bench_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("fastclip_bench_toy.py", "value = 3\n")
        info = "fastclip_bench_toy-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fastclip-bench-toy\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    before = os.environ.get("PYTHONPATH")
    with gpu_machine.wheels(tmp_path) as trouble:
        assert trouble is None
        command = [sys.executable, "-c", "import fastclip_bench_toy as x; print(x.value)"]
        assert subprocess.run(command, capture_output=True, text=True).stdout == "3\n"
    assert os.environ.get("PYTHONPATH") == before
    with gpu_machine.wheels(tmp_path / "none") as trouble:
        assert trouble == "--wheels: none holds no *.whl"
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
    with gpu_machine.wheels(tmp_path) as trouble:
        assert trouble is not None


def test_what_a_child_starts_ends_with_it() -> None:
    """Also in a process group of its own, as ninja's compilers are."""
    started = (
        "import subprocess, sys; from bench.children import tell;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        "                     process_group=0) if sys.version_info >= (3, 11) else"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "tell({'pid': p.pid}); p.wait()"
    )
    with Child(["-c", started]) as child:
        told = child.message(30.0)
    assert told is not None
    for _ in range(100):
        try:
            os.kill(told["pid"], 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{told['pid']}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(told["pid"], signal.SIGKILL)
    pytest.fail("it runs on")


def test_deadlines() -> None:
    now = [0.0]
    deadline = Deadline(100.0, lambda: now[0])
    now[0] = 20.0
    half, short = deadline.part(0.5), deadline.within(7.0)
    assert (deadline.left(), half.left(), short.left()) == (80.0, 40.0, 7.0)
    now[0] = 99.0
    assert (deadline.within(7.0).left(), half.left()) == (1.0, 0.0)


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
    runs: list[dict] = [
        {"round": unit[0], "task": unit[1], "mode": unit[2], "way": unit[3], "host_s": 1.0,
         "step_s": [1.0, 1.1 if unit[2] == "fastclip" else 1.0, 1.2], "peak_mib": 9e3,
         "first_step_s": 9.0, "profile": {"launches": 1000.0, "kernels": [
             {"name": "void cutlass" * 9, "share": 0.25}] * 4}}
        for unit in step_plan()
    ]  # fmt: skip
    private = next(run for run in runs if run["mode"] == "fastclip")
    private |= {"kernels": {"ghost_norm": "triton", "clip_scale": "reference: it failed"},
                "warnings": ["the triton kernel of clip_scale is not used"]}  # fmt: skip
    for run in runs:
        if run["way"] == "graph" and run["task"] == "lora":
            del run["step_s"]
            run["error"] = "NotThisWay: StepError: " + "x" * 200
    ceiling = {"matmul_tflops": {"bfloat16": 1.0, "float32": "OutOfMemoryError"}, "copy_gbps": 1.0}
    failures = [
        {"test": f"tests/ops/triton/test_x.py::test_{i}", "message": "far"} for i in range(30)
    ]
    return {
        "card": "synthetic", "date": "2000-01-01", "problems": [], "nvcc": "0", "seconds": 1.0,
        "versions": {"torch": "0", "triton": "0"},
        "build": {"built": False, "seconds": 3.0, "why": "there is no nvcc"},
        "ahead": [{"task": "gpt2", "seconds": 9.0}, {"task": "vit_b", "error": "stopped"}],
        "tests": {"passed": 1, "failed": 30, "errors": 0, "skipped": 0, "seconds": 1.0,
                  "failures": failures},
        "kernels": {"ceiling": ceiling, "rows": rows, "not_run": 2},
        "steps": {"runs": runs, "not_run": 0},
    }  # fmt: skip


@pytest.mark.parametrize("cases", [3, 200])
def test_the_table_is_short(cases: int) -> None:
    lines = table(synthetic(cases)).splitlines()
    assert len(lines) <= 76
    assert max(map(len, lines)) <= 170
    text = "\n".join(lines)
    assert len(text) < 11_800  # of 12,000 that are shown
    assert "fastclip._C: ABSENT: there is no nvcc (3 s)" in text
    assert "compiled ahead: 1 of 2 in 9 s; vit_b stopped" in text
    assert "FAILS lora fastclip graph: NotThisWay: StepError" in text
    assert "1.10 [1.05]" in text  # measured, goal
    assert "1.00 [1.00]" in text
    assert "FAILS conv_norm-toy: WrongResult" in text
    assert "einsum 1.5" in text
    assert "by the reference: clip_scale" in text
    assert "WARNING: the triton kernel of clip_scale" in text
    assert lines[-1] == "1 s in all"


def test_mended_tests_are_there() -> None:
    for name in gpu_tests.MENDED:
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text()


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(synthetic(30)))
    draw.main([str(file)])
    assert (tmp_path / "result.png").stat().st_size > 10_000
    assert "30 cases plotted" in capsys.readouterr().out
    with pytest.raises(ValueError, match="nothing to draw"):
        draw.draw({"kernels": {"rows": [{"id": "x", "error": "no"}]}}, tmp_path / "none.png")


def test_results_hold_no_folder_and_no_nan() -> None:
    told = {"error": "ValueError: in /srv/x/y.py, 5 TFLOP/s of a / b", "loss": float("nan")}
    assert without_folders([told, 1, True, None]) == [
        {"error": "ValueError: in y.py, 5 TFLOP/s of a / b", "loss": None}, 1, True, None
    ]  # fmt: skip

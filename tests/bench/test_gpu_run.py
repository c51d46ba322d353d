"""`python -m bench.gpu` without a GPU: limits hold, what dies is told, the JSON and table are right."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu, gpu_kernels, gpu_machine, gpu_runs, gpu_steps, gpu_tests
from bench.deadline import Deadline
from bench.kernels import harness, tuning
from bench.processes import MARK
from bench.workloads import MODES

CPU = torch.device("cpu")
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
STEPS = (
    CHILD
    + """
if job["mode"] == "opacus_hooks": os._exit(1)
if job["mode"] == "opacus_ghost": time.sleep(60)
seconds = {"non_private": 1.0, "fastclip": 1.5}[job["mode"]]
tell(step_s=[seconds] * 3, host_s=0.5, peak_mib=100 * seconds, host_syncs=0, title=job["task"])
tell(graph={"step_s": [seconds / 2] * 3, "host_s": 0.1, "peak_mib": 100.0})
if job["mode"] == "fastclip": os._exit(4)  # as a capture may end
tell(finished=True)
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


def test_steps_fail_one_by_one_and_end_at_their_deadline(fake: Callable[[str], str]) -> None:
    plan = [(0, "bert_t128", mode) for mode in MODES]
    begin = time.monotonic()
    found = gpu_runs.run_steps(Deadline(3.0), "cpu", {}, lambda: None, plan, module=fake(STEPS))
    assert time.monotonic() - begin < 12
    assert [run["mode"] for run in found["runs"]] == ["non_private", "fastclip", "opacus_hooks"]
    assert found["not_run"] == 1  # the one that hung when time was up
    plain, plain_graph, private, graph, dead = found["summary"]
    assert (private["time_ratio"], private["memory_ratio"]) == (1.5, 1.5)
    assert (plain["time_ratio"], plain_graph["time_ratio"]) == (1.0, 1.0)
    assert (graph["mode"], graph["time_ratio"], graph["eager_ratio"]) == (
        "fastclip_graph", 1.5, 0.75,
    )  # fmt: skip
    assert private["error"] == "ProcessDied: exit 4"  # what it told before stays
    assert dead["error"] == "ProcessDied: exit 1"


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
    send({**order, "share": [0, 2]})
    harness.main()
    assert not told(capsys)  # compiled ahead, in silence


def test_the_child_that_times_a_step(send: Callable, capsys: pytest.CaptureFixture) -> None:
    order = {"task": "gpt2", "device": "cpu", "steps": 1, "tiny": True, "extras": True}
    send({**order, "mode": "non_private"})
    gpu_steps.main(["--child"])
    first, row, profile, graph, end = told(capsys)
    assert first["first_step_s"] == row["first_step_s"] > 0
    assert first["looks"] == []
    assert row["steps"] == 1
    assert profile["profile"]["kernels"][0]["seconds"] > 0
    assert graph["graph"]["error"].startswith("not captured: CUDA graphs need an NVIDIA GPU")
    assert end == {"finished": True}
    send({**order, "mode": "nothing"})
    gpu_steps.main(["--child"])
    assert told(capsys)[0]["error"] == "KeyError: 'nothing'"
    send({**order, "share": [0, 2]})
    gpu_steps.main(["--child"])
    assert told(capsys)[0]["seconds"] > 0  # compiled ahead


def test_how_far_a_run_came() -> None:
    name = {"round": 0, "task": "gpt2", "mode": "fastclip"}
    assert gpu_runs.how_far(name) == "when its time was up"
    searching = {**name, "progress": {"seconds": 31.4, "trials": 207, "search_s": 19.6}}
    told = "after 31 s in its first step, 207 configurations tried in 20 s"
    assert gpu_runs.how_far(searching) == told
    assert gpu_runs.how_far({**searching, "first_step_s": 33.0}) == "when its time was up"


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
def test_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "gpu_marked", lambda folder: [])
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
    found = gpu_tests.run_tests(Deadline(60.0), result, lambda: None, [str(tmp_path)])
    assert result["tests"] is found
    counts = [found[name] for name in ("passed", "failed", "errors", "skipped")]
    assert counts == [1, 1, 1, 1]
    messages = [failure["message"] for failure in found["failures"]]
    assert sorted(messages) == ["ValueError: no", "assert 1 == 2"]  # whatever their order
    (at,) = found["failures"][0]["at"]  # relative to the checkout, where that lies beside it
    assert (Path.cwd() / at).resolve() == tmp_path.resolve() / "test_toy.py:3"
    assert "error" not in found


def test_tests_end_at_their_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "gpu_marked", lambda folder: [])
    found = gpu_tests.run_tests(Deadline(0.0), {}, lambda: None, [str(tmp_path)])
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


def test_a_whole_run(
    fake: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu, "prepare", lambda *_: None)  # takes a minute of compilers
    plan = [(0, "gpt2", "non_private"), (0, "gpt2", "opacus_hooks")]
    monkeypatch.setattr(gpu, "step_plan", lambda: plan)
    monkeypatch.setattr(gpu, "run_steps", partial(gpu_runs.run_steps, module=fake(STEPS)))
    chosen = ["--only", "steps", "--modes", "non_private", "fastclip"]
    code = gpu.main(["--device", "cpu", *chosen, "--out", str(tmp_path)])
    text = (tmp_path / "gpu-trial.json").read_text()
    result = json.loads(text)
    assert code == 0
    assert result["command"] == f"python -m bench.gpu --device cpu {' '.join(chosen)}"
    assert [run["mode"] for run in result["steps"]["runs"]] == ["non_private"]
    assert result["steps"]["runs"][0]["step_s"][1] > 0
    assert result["steps"]["not_run"] == 0
    assert str(ROOT) not in text
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["gpt2", "non_private"] for line in printed)
    assert printed[-1].startswith("written to")


@pytest.mark.extras
def test_what_is_missing_is_said_before_anything_else(tmp_path: Path) -> None:
    """Without opacus fastclip cannot be imported at all."""
    program = "import sys; sys.modules['opacus'] = None; from bench.gpu import main; "
    done = subprocess.run(
        [sys.executable, "-c", program + f"sys.exit(main(['--out', {str(tmp_path)!r}]))"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "PROBLEM: opacus is not installed: fastclip builds on it" in done.stdout
    written = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())
    assert any("opacus" in problem for problem in written["problems"])

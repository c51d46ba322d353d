"""The whole flow of bench.gpu under a clock that the test turns: order, limits, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_ahead, gpu_kernels, gpu_machine, gpu_runs, gpu_tests
from bench.children import Child
from bench.deadline import Deadline

ROOT = Path(__file__).parents[2]
MINUTES = 9.0


class World:
    """A clock, and children that take the time which their script says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.began: list[tuple[str, float]] = []
        self.alive: list[FakeChild] = []
        self.slow = 1.0
        self.ends_in: str | None = None

    def clock(self) -> float:
        return self.now

    def script(self, arguments: Sequence[str], job: Mapping) -> list[tuple[float, dict | None]]:
        """(seconds, message) of a child; None: it ends."""
        if "setup.py" in arguments:
            return [(40.0, None)]
        if "-c" in arguments:
            return [(1.0, {"versions": {"cudart": 13000}}), (0.0, None)]
        if "pytest" in arguments:
            return [(30.0, None)]
        if "share" in job:
            return [(30.0 * self.slow, {"seconds": 30.0}), (0.0, {"finished": True})]
        if "task" in job:
            seconds = {"non_private": 0.05, "fastclip": 0.06}.get(job["mode"], 0.4)
            times = {"step_s": [seconds] * 3, "host_s": 0.01, "peak_mib": 1e4, "host_syncs": 0}
            parts: list[tuple[float, dict | None]] = [(9.0 * self.slow, times)]
            if job["extras"]:
                profile = {"launches": 900.0, "busy_share": 0.9,
                           "kernels": [{"name": "gemm", "share": 0.5}]}  # fmt: skip
                parts += [(2.0, {"profile": profile}), (3.0, {"graph": {**times, "host_s": 1e-4}})]
            return [*parts, (0.0, {"finished": True})]
        names = [f"ghost_norm.{i}" for i in range(99) if f"ghost_norm.{i}" not in job["skip"]]
        rows = [{"id": name, "name": name, "error": "made up"} for name in names]
        plan: list[tuple[float, dict | None]] = [(8.0, {"plan": names})]
        return [*plan, *((2.0, {"row": row}) for row in rows), (0.0, None)]


WORLD = World()


class FakeChild(Child):
    """As `Child`, without a process."""

    def __init__(self, arguments: Sequence[str], environment: Mapping | None = None) -> None:
        self.arguments = list(arguments)
        self.said: Any = ["made up"]
        self._job: Mapping = {}
        self._parts: Iterator | None = None
        self._since: float | None = None
        WORLD.alive.append(self)

    def _next(self) -> tuple[float, dict | None]:
        if self._parts is None:
            what = self._job.get("task") or self.arguments[-1]
            WORLD.began.append((f"{what} {self._job.get('mode', '')}".strip(), WORLD.now))
            self._parts = iter(WORLD.script(self.arguments, self._job))
            self._start = WORLD.now
            self._part = next(self._parts)
        return self._part

    def send(self, job: Mapping) -> None:
        self._job = job
        if "share" in job and "task" in job:
            self._next()  # works from now on, beside others

    def message(self, limit: float) -> dict | None:
        seconds, message = self._next()
        ready = self._start + seconds
        if ready > WORLD.now + limit:
            WORLD.now += max(limit, 0.0)
            raise TimeoutError(f"no answer within {limit:.0f} s")
        WORLD.now = max(WORLD.now, ready)
        self._start, self._part = ready, next(self._parts or iter(()), (0.0, None))
        if "mode" in self._job and WORLD.ends_in == self._job["task"]:
            raise gpu.Ended
        return message

    def wait(self, limit: float) -> bool:
        try:
            return self.message(limit) is None
        except TimeoutError:
            return False

    def death(self) -> dict[str, str]:
        return {"error": "ProcessDied: exit 0", "detail": ""}

    def kill(self) -> None:
        WORLD.alive.remove(self)

    def __exit__(self, *_: Any) -> None:
        self.kill()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    WORLD.__init__()  # type: ignore[misc]
    for module in (gpu_ahead, gpu_kernels, gpu_runs, gpu_tests):
        monkeypatch.setattr(module, "Child", FakeChild)
    monkeypatch.setattr(gpu, "problems", lambda device: [])
    monkeypatch.setattr(gpu, "environment", lambda device: {
        "card": "made up", "nvcc": "13.0", "versions": {"torch": "0"},
    })  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return WORLD


@pytest.fixture
def run(world: World, tmp_path: Path) -> Callable[[], dict]:
    def begin() -> dict:
        options = gpu.parse(["--out", str(tmp_path)])
        gpu.run(options, clock=world.clock)
        return json.loads((tmp_path / "gpu-made-up.json").read_text())

    return begin


def test_the_whole_flow(
    world: World, run: Callable[[], dict], capsys: pytest.CaptureFixture
) -> None:
    result = run()
    assert world.now - 1000.0 <= 60 * MINUTES
    assert not world.alive  # nothing is left running
    order = [name for name, _ in world.began]
    assert order.count("resnet50") == gpu_runs.COMPILERS["resnet50"]  # compiled ahead, each a share
    assert order.index("bert_t128 non_private") > order.index("--inplace")
    steps = [name for name in order if name.endswith(("non_private", "fastclip"))]
    assert steps[:10] == [
        f"{task} {mode}" for task in gpu_runs.MAIN for mode in ("non_private", "fastclip")
    ]
    pytest_begins = next(i for i, name in enumerate(order) if name.startswith("tests/"))
    kernels_begin = max(i for i, name in enumerate(order) if name == "bench.kernels.harness")
    assert order.index(steps[9]) < pytest_begins < kernels_begin
    assert result["build"] == {**result["build"], "built": True, "versions": {"cudart": 13000}}
    assert {row["seconds"] for row in result["ahead"]} == {30.0}
    summary = {(row["task"], row["mode"]): row for row in result["steps"]["summary"]}
    for task in gpu_runs.MAIN:
        assert summary[task, "fastclip"]["time_ratio"] == pytest.approx(1.2)
        assert summary[task, "fastclip_graph"]["eager_ratio"] == pytest.approx(1.2)
    assert result["kernels"]["rows"]
    printed = capsys.readouterr().out
    assert "1.20 [1.35]" in printed
    assert len(printed[printed.index("made up, ") :]) < 12_000


def test_a_slow_machine_still_comes_to_its_table(world: World, run: Callable[[], dict]) -> None:
    """Each process takes ten times as long: fewer are run, and the last is told as cut off or not
    at all."""
    world.slow = 10.0
    result = run()
    assert world.now - 1000.0 <= 60 * MINUTES
    assert all("stopped after 90 s" in row["error"] for row in result["ahead"])
    assert 2 <= len(result["steps"]["runs"]) < 10
    assert result["steps"]["not_run"] == len(gpu_runs.step_plan()) - len(result["steps"]["runs"])
    assert "tests" in result
    assert result["kernels"]["rows"]


def test_who_is_told_to_end_leaves_what_is_finished(
    world: World, run: Callable[[], dict], capsys: pytest.CaptureFixture
) -> None:
    world.ends_in = "gpt2"
    result = run()
    assert result["ended"] == "Ended before it was done"
    finished = [task for task in gpu_runs.MAIN if task != "gpt2"]
    assert gpu_runs.MAIN[-1] == "gpt2"
    assert [run["task"] for run in result["steps"]["runs"]] == [
        t for t in finished for _ in range(2)
    ]
    assert not world.alive
    assert "Ended before it was done" in capsys.readouterr().out


def test_rows_are_on_disk_while_others_run(
    world: World, run: Callable[[], dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    script = World.script

    def watched(self: World, arguments: Sequence[str], job: Mapping) -> Any:
        if "mode" in job:
            text = (tmp_path / "gpu-made-up.json").read_text()
            held.append(len(json.loads(text).get("steps", {}).get("runs", [])))
        return script(self, arguments, job)

    monkeypatch.setattr(World, "script", watched)
    run()
    assert held[:12] == list(range(12))


def test_an_absent_extension_is_said_and_stops_nothing(
    world: World, run: Callable[[], dict], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    script = World.script

    def without(self: World, arguments: Sequence[str], job: Mapping) -> Any:
        return [(999.0, None)] if "setup.py" in arguments else script(self, arguments, job)

    monkeypatch.setattr(World, "script", without)
    result = run()
    assert result["build"]["built"] is False
    assert result["build"]["said"] == ["made up"]
    assert "fastclip._C: ABSENT: setup.py build_ext did not end" in capsys.readouterr().out
    assert len(result["steps"]["runs"]) >= 10


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

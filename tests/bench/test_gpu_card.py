"""`python -m bench.gpu_card` without a card: order, limits, what a kill leaves, what is run again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_card, gpu_machine, gpu_runs
from bench.deadline import Deadline
from bench.gpu_runs import Runs, rehearsed_plan, remaining, step_plan, unit_of

ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys, time
job = json.loads(sys.stdin.readline())
def tell(**message): print("result:" + json.dumps(message), flush=True)
pid, name = os.getpid(), job["task"] + " " + job["mode"]
for way in job["ways"]:
    tell(begin=way)
    tell(title=job["task"], pid=pid, turn=job["turn"] is not None)
    case = name + " " + way
    if case == DIES: os._exit(3)
    if case == HANGS: time.sleep(60)
    if case == WAITS:
        tell(waits=True); time.sleep(1.5); tell(waits=False)
    if case == BREAKS:
        tell(error="OutOfMemoryError: no room"); tell(end=way); break
    seconds = {"non_private": 1.0}.get(job["mode"], 1.5)
    tell(step_s=[seconds] * 3, host_s=0.1, peak_mib=100 * seconds, first_step_s=1.0)
    tell(end=way)
tell(finished=True)
"""
DRIVER = """
import sys
from functools import partial
from bench import gpu_card, gpu_runs
gpu_card.prepare = lambda *_: None
gpu_card.facts = lambda device: {"problems": [], "card": "made up", "versions": {}, "nvcc": "0"}
gpu_card.Runs = partial(gpu_runs.Runs, module="fake_child")
sys.exit(gpu_card.main(["--out", sys.argv[1], "--rehearse", "--only", "steps"]))
"""
Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Writes what children run, whose "task mode way" of these names dies, hangs, waits or breaks."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def write(dies: str = "", hangs: str = "", waits: str = "", breaks: str = "") -> None:
        names = f"DIES, HANGS, WAITS, BREAKS = {dies!r}, {hangs!r}, {waits!r}, {breaks!r}"
        (tmp_path / "fake_child.py").write_text(names + CHILD)

    write()
    return write


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict]]:
    """Runs the whole command, with children that are made up; exit code and what is on disk."""
    known = {"card": "made up", "versions": {"torch": "0"}, "nvcc": "0"}
    monkeypatch.setattr(gpu_card, "facts", lambda device: {"problems": [], **known})
    monkeypatch.setattr(gpu_card, "prepare", lambda *_: None)
    monkeypatch.setattr(gpu_card, "Runs", partial(Runs, module="fake_child"))

    def run(*arguments: str, out: str = "out") -> tuple[int, dict]:
        code = gpu_card.main(["--out", str(tmp_path / out), *arguments])
        return code, json.loads((tmp_path / out / "card.json").read_text())

    return run


def steps(result: dict) -> dict[str, Any]:
    """Errors of the runs, or None, by what was run."""
    return {" ".join(unit_of(run)[1:]): run.get("error") for run in result["steps"]["runs"]}


def test_the_plan_begins_with_what_has_a_goal() -> None:
    plan = step_plan()
    assert len(plan) == len(set(plan))
    first = list(dict.fromkeys(unit[1] for unit in plan))
    assert first[: len(gpu_runs.GOALS)] == list(gpu_runs.GOALS)
    three = ["eager", "graph", "compiled"]
    assert [unit[3] for unit in plan[:6]] == three * 2
    assert [unit[2] for unit in plan[:6]] == ["non_private"] * 3 + ["fastclip"] * 3
    assert {unit[1] for unit in plan if unit[3] == "recorded"} == set(gpu_runs.MAIN)
    rehearsed = rehearsed_plan()
    assert set(rehearsed) <= set(plan)
    assert {unit[1] for unit in rehearsed} == set(gpu_runs.GOALS)
    assert {unit[3] for unit in rehearsed} == set(gpu_runs.WAY_SECONDS)


def test_what_fails_or_hangs_costs_no_other(
    fake: Fake, card: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_runs, "WAY_SECONDS", dict.fromkeys(gpu_runs.WAY_SECONDS, 1.0))
    dies, hangs, breaks = "vit_b fastclip eager", "gpt2 fastclip eager", "lora fastclip eager"
    fake(dies, hangs, "gpt2 non_private compiled", breaks)
    code, result = card("--rehearse", "--only", "steps")
    assert code == 1
    found = steps(result)
    assert list(found) == [" ".join(unit[1:]) for unit in rehearsed_plan()]
    assert found.pop(dies) == "ProcessDied: exit 3"
    assert found.pop(hangs) == "TimeoutError: stopped after 1 s"
    assert found.pop(breaks) == "OutOfMemoryError: no room"
    assert set(found.values()) == {None}  # a wait for the device counts in no limit
    assert result["steps"]["not_run"] == 0
    pids = {unit_of(run)[1:]: run["pid"] for run in result["steps"]["runs"]}
    assert pids["bert_t128", "fastclip", "eager"] == pids["bert_t128", "fastclip", "compiled"]
    assert pids["vit_b", "fastclip", "eager"] != pids["vit_b", "fastclip", "compiled"]
    printed = capsys.readouterr().out
    assert "1.50 [1.05]" in printed  # measured, goal
    assert "FAILS gpt2 fastclip eager: TimeoutError" in printed
    assert "REHEARSAL, no figures of a card: made up" in printed


def test_what_was_finished_before_a_kill_is_on_disk_and_is_not_run_again(
    fake: Fake, card: Callable, tmp_path: Path
) -> None:
    fake(hangs="vit_b fastclip eager")
    (tmp_path / "driver.py").write_text(DRIVER)
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(out)], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as program:
        for _ in range(300):
            text = (out / "card.json").read_text() if (out / "card.json").exists() else ""
            if '"vit_b, tiny"' in text or text.count('"title": "vit_b"') == 3:
                break
            time.sleep(0.05)
        program.kill()
    runs = json.loads((out / "card.json").read_text())["steps"]["runs"]
    done = [run for run in runs if not run.get("stopped")]
    assert len(done) == len(runs) - 1 == 9 - 1
    assert "bert_t128 fastclip compiled: 1500.0 ms" in (out / "card.log").read_text()
    fake()
    code, result = card("--rehearse", "--only", "steps")
    assert code == 0
    assert len(result["commands"]) == 2
    pids = {unit_of(run): run["pid"] for run in result["steps"]["runs"]}
    assert {unit: pids[unit] for unit in map(unit_of, done)} == {unit_of(r): r["pid"] for r in done}
    assert not remaining(rehearsed_plan(), result["steps"]["runs"])
    assert not any("stopped" in run for run in result["steps"]["runs"])
    earlier = str(out / "card.json")
    _, other = card("--rehearse", "--only", "steps", "--from", earlier, out="other")
    assert {run["pid"] for run in other["steps"]["runs"]} == set(pids.values())


def test_time_is_up(fake: Fake, card: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends by itself, with its table; what was cut off is told, and left for the next."""
    monkeypatch.setattr(gpu_card, "RESERVE", 0.0)
    fake(hangs="bert_t128 fastclip compiled")
    begin = time.monotonic()
    code, result = card("--rehearse", "--only", "steps", "--minutes", "0.05")
    assert time.monotonic() - begin < 10
    assert code == 0
    assert steps(result)["bert_t128 fastclip compiled"] == "time was up"
    assert result["steps"]["runs"][-1]["stopped"]
    assert result["steps"]["not_run"] == len(rehearsed_plan()) - 5


def test_several_have_the_device_in_turns(fake: Fake) -> None:
    result: dict = {}
    runs = Runs(Deadline(30.0), {"device": "cpu"}, result, lambda: None, lambda text: None, 3,
                "fake_child")  # fmt: skip
    found = runs.run(rehearsed_plan())
    assert not remaining(rehearsed_plan(), found["runs"])
    assert all(run["turn"] for run in found["runs"])


def test_who_is_told_to_end_leaves_what_is_finished(
    fake: Fake, card: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(self: Runs, run: dict) -> None:
        given(self, run)
        if run["task"] == "gpt2":
            raise gpu_card.Ended

    given = Runs.note
    monkeypatch.setattr(Runs, "note", note)
    code, result = card("--rehearse", "--only", "steps")
    assert code == 1
    assert result["ended"] == "Ended before it was done"
    assert {"bert_t128", "vit_b"} <= {run["task"] for run in result["steps"]["runs"]}


def test_parts_come_in_order(
    card: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    order: list[str] = []

    class Noted(Runs):
        def run(self, plan: Any) -> dict:
            order.append("steps")
            assert self.lanes >= 1
            return {}

    def prepare(deadline: Deadline, job: dict, ahead: dict, *_: Any) -> None:
        order.append("build")
        assert ahead == gpu_machine.COMPILERS
        assert deadline.left() < 0.31 * 540

    def tests(deadline: Deadline, result: dict, save: Any, part: str = "tests", *_: Any) -> None:
        order.append(part)
        result[part] = {"failed": 0, "passed": 1, "errors": 0, "skipped": 0, "seconds": 1.0,
                        "failures": []}  # fmt: skip

    def kernels(deadline: Deadline, job: dict, *_: Any) -> None:
        order.append("kernels")
        assert len(job["last"]) == 33  # those of bench/results

    for name, fake in (("prepare", prepare), ("run_tests", tests), ("run_kernels", kernels)):
        monkeypatch.setattr(gpu_card, name, fake)
    monkeypatch.setattr(gpu_card, "Runs", Noted)
    monkeypatch.setattr(gpu_card, "compile_ahead", lambda *_: [])
    code, _ = card()
    assert code == 0
    assert order == ["build", "mended", "steps", "kernels", "tests"]
    assert "2 s left" not in capsys.readouterr().out
    order.clear()
    card()
    assert order == ["build", "steps", "kernels"]  # tests have come to their end


def test_another_card_is_refused(card: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_card, "measure", lambda card: None)
    assert card()[0] == 0
    monkeypatch.setattr(gpu_card, "facts", lambda device: {"problems": [], "card": "other"})
    code, result = card()
    assert (code, result["card"]) == (2, "made up")  # which is left as it was


def test_a_machine_that_cannot_be_asked(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "FACTS_SECONDS", 0.0)
    assert gpu_machine.facts("cuda")["problems"] == ["torch does not describe the GPU within 0 s"]
    monkeypatch.setattr(gpu_machine, "FACTS_SECONDS", 20.0)
    told = gpu_machine.facts("cuda", "absent_module")["problems"]
    assert told[0].startswith("the machine cannot be asked: ProcessDied: exit 1")


def test_what_is_missing_is_said_before_anything_else(
    card: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without opacus fastclip cannot be imported at all."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "opacus" else find(name)
    )
    found = {"problems": gpu_machine.problems("cpu")}
    monkeypatch.setattr(gpu_card, "facts", lambda device: found)
    monkeypatch.setattr(gpu_card, "measure", lambda card: pytest.fail("nothing can be measured"))
    code, result = card("--rehearse")
    assert code == 2
    assert any("opacus" in problem for problem in result["problems"])
    told = "PROBLEM: opacus is not installed: fastclip builds on it"
    assert told in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCLIP_WHEELS", "some/wheels")
    options = gpu_card.parse(["--out", "x", "--only", "steps", "--match", "bert", "--rehearse"])
    assert options.wheels == Path("some/wheels")
    asked = "python -m bench.gpu_card --minutes 9 --only steps --match bert --rehearse"
    assert gpu_card.command(options) == asked
    for wrong in ([], ["--out", "x", "--minutes", "0"]):
        with pytest.raises(SystemExit):
            gpu_card.parse(wrong)
    assert "--minutes must be positive" in capsys.readouterr().err

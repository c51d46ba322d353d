"""Runs the kernel tests on the GPU under a time limit; also the pytest plugin that reports them.

With `-p bench.gpu_tests`, the start and end of each test are lines in the file that BENCH_TEST_REPORT
names. A run that is cut off then still shows what passed, what failed and what was running. The plugin
takes the first configuration of each kernel. Searching at every odd shape of a test would take many
minutes, and benchmarks check the tuned kernels. It skips the remaining tests of a process after a test
has destroyed its CUDA context.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.children import Child
from bench.deadline import Deadline
from bench.kernels import tuning
from bench.processes import ROOT

REPORT = "BENCH_TEST_REPORT"
MENDED = (
    "tests/ops/triton/test_group_norm.py::test_private_layer",
    "tests/ops/triton/test_group_norm.py::test_autocast_without_a_copy",
    "tests/ops/triton/test_conv_record.py::"
    "test_two_uses_of_a_pointwise_weight_are_laid_along_positions",
)
"""Tests that failed on a card, nine with their parameters (bench/results/README.md), and were mended
where there was none. The user empties this after the run."""
TEST_SECONDS = 120
NOTED_EVERY = 5.0  # seconds between reports of passed and failed tests
COUNTS = ("passed", "failed", "errors", "skipped")
_SUSPECTS: list[str] = []
"""Failed tests of this process since the context was last seen alive; emptied when it is."""


def gpu_marked(folder: Path) -> list[str]:
    """Test files outside tests/ops/triton that mark tests for GPUs; those of whole steps first."""
    kernels = folder / "kernels"
    found = [
        path.relative_to(folder.parent)
        for path in folder.rglob("test_*.py")
        if kernels not in path.parents and re.search(r"\bmark\.gpu\b", path.read_text())
    ]
    return [path.as_posix() for path in sorted(found, key=lambda path: (len(path.parts), path))]


def run_tests(
    deadline: Deadline, result: dict, save: Callable[[], None], part: str = "tests",
    targets: Sequence[str] = (),
) -> dict:  # fmt: skip
    """pytest over `targets`; without any, over the tests marked `gpu`, in most of the time, and over
    tests/ops/triton.

    Returns:
        "passed", "failed", "skipped", "errors": counts; "failures": the first 100, with the first
        line of their message and where it was raised ("at"); "seconds"; "error" where it did not
        come to its end. It is in result[part], and saved, as tests end.
    """
    begin = deadline.clock()
    found = result[part] = {**dict.fromkeys(COUNTS, 0), "failures": [], "seconds": 0.0}
    done: list[dict] = []

    def note(part: dict) -> None:
        parts = [*done, part]
        found.update({name: sum(part[name] for part in parts) for name in COUNTS})
        found["failures"] = [failure for part in parts for failure in part["failures"]][:100]
        errors = [part["error"] for part in parts if "error" in part]
        found["error"] = "; ".join(errors) if errors else "it was cut off"
        found["seconds"] = deadline.clock() - begin
        save()

    marked = [] if targets else gpu_marked(ROOT / "tests")
    if marked:
        done.append(_run(["-m", "gpu"], marked, deadline.part(0.7), note))
    note(_run([], targets or ("tests/ops/triton",), deadline, note))
    if found["error"] == "it was cut off":  # it was not
        del found["error"]
        save()
    return found


def _run(
    options: Sequence[str], targets: Sequence[str], deadline: Deadline,
    note: Callable[[dict], None],
) -> dict:  # fmt: skip
    limit = deadline.left()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        environment = {
            REPORT: str(report),
            "TRITON_INTERPRET": None,
            "PYTEST_XDIST_WORKER": None,  # of a test run that this one is part of
        }
        arguments = ["-m", "pytest", "-p", "bench.gpu_tests", "-p", "no:randomly", *options]
        arguments += [*_parallel(), *targets]
        with Child(arguments, environment) as child:
            while not (in_time := child.wait(min(NOTED_EVERY, deadline.left()))):
                if deadline.left() <= 0:
                    break
                note(summarise(report.read_text().splitlines()))
            end = child.death() if in_time else {"error": "", "detail": ""}
        found = summarise(report.read_text().splitlines())
    if not in_time:
        running = ", ".join(found["running"][:3]) or "none"
        found["error"] = f"stopped after {limit:.0f} s; running: {running}"
    elif not sum(found[name] for name in COUNTS):
        found["error"] = f"no test ran: {end['error']} {end['detail']}"
    return found


def _parallel() -> list[str]:
    """Options that spread compilation over the cores, and end a test that hangs."""
    workers = min(8, (os.cpu_count() or 1) // 2)
    if workers < 2 or importlib.util.find_spec("xdist") is None:
        return []
    options = ["-n", str(workers)]
    if importlib.util.find_spec("pytest_timeout") is not None:  # it ends the test's process
        options += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    return options


def summarise(lines: Sequence[str]) -> dict:
    """Counts, failures and unfinished tests from the lines that the plugin wrote."""
    found: dict = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "failures": []}
    running: dict[str, None] = {}
    for line in lines:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # cut off
            continue
        if "start" in event:
            running[event["start"]] = None
            continue
        running.pop(event["test"], None)
        found[event["outcome"]] += 1
        if event["outcome"] in ("failed", "errors"):
            failure = {name: event[name] for name in ("test", "message", "at") if event.get(name)}
            found["failures"].append(failure)
    found["running"] = list(running)
    return found


# The plugin. Under xdist the controller hears of every test and writes; workers only skip.


def pytest_configure(config: pytest.Config) -> None:
    tuning.first_config()


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"start": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    message = _message(report)
    if report.failed:
        _SUSPECTS.append(report.nodeid)
    if report.failed or report.skipped or report.when == "call":
        outcome = "errors" if report.failed and report.when != "call" else report.outcome
        event = {"test": report.nodeid, "outcome": outcome, "message": message}
        _write({**event, "at": _places(report)} if report.failed else event)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "errors", "message": _message(report)})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests after one has destroyed this process' CUDA context."""
    torch = sys.modules.get("torch")
    if not _SUSPECTS or torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pytest.skip(f"the CUDA context was lost in {_SUSPECTS[0]}")
    _SUSPECTS.clear()


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else (report.longreprtext if report.failed else "")
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:300] if lines else ""


def _places(report: pytest.TestReport) -> list[str]:
    """file:line of the calls that led to what was raised, the outermost first."""
    trace = getattr(report.longrepr, "reprtraceback", None)
    places = [getattr(entry, "reprfileloc", None) for entry in getattr(trace, "reprentries", ())]
    return [f"{place.path}:{place.lineno}" for place in places if place is not None]


def _write(event: dict) -> None:
    path = os.environ.get(REPORT)
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(json.dumps(event) + "\n")

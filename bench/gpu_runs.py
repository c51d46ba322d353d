"""Runs the whole steps of bench.gpu_card: their list, their order and their processes.

A process takes one model in one mode through the ways to run its step (bench.gpu_ways), and reports each
part as it finishes. If a way fails, hangs or ends the process, another process takes the remaining ways.
Several processes are alive at once and use the device in turns: while one compiles, another is timed.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bench.children import Child
from bench.deadline import Deadline

START_SECONDS = 90.0  # until a process has imported what it needs
WAY_SECONDS = {"eager": 90.0, "graph": 60.0, "compiled": 150.0, "recorded": 150.0}
NAMES = ("round", "task", "mode", "way")
MAIN = ("bert_t128", "vit_b", "gpt2", "resnet50", "lora", "bert_t512")
OPACUS = ("bert_t128", "vit_b", "resnet50", "bert_t512")  # the models that Opacus trains unchanged
THREE = ("eager", "graph", "compiled")
ORDINARY, PRIVATE, OTHERS = "non_private", "fastclip", ("opacus_hooks", "opacus_ghost")

GOALS = {
    "bert_t128": {"time": 1.05, "memory": 1.00},
    "vit_b": {"time": 1.05, "memory": 1.00},
    "gpt2": {"time": 1.05, "memory": 1.00},
    "resnet50": {"time": 1.00, "memory": 1.00},
    "lora": {"time": 1.02, "memory": 1.00},
}
"""What fastclip's compiled step is to cost, against the same step without privacy, compiled, too."""

VARIABLES = {
    "TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4",
}  # fmt: skip
"""Of a process. The first two as PyTorch sets them itself: a profiler that comes and goes breaks CUDA
graphs that follow."""

Unit = tuple[int, str, str, str]
"""Round, task, mode, way."""


def step_plan() -> list[Unit]:
    """The runs, the most important first; the second round only measures the spread."""
    pairs = [(task, mode) for task in MAIN for mode in (ORDINARY, PRIVATE)]
    return [
        *((0, task, mode, way) for task, mode in pairs for way in THREE),
        *((0, task, ORDINARY, "recorded") for task in MAIN),
        *((1, task, mode, "compiled") for task, mode in pairs if task in GOALS),
        *((0, task, mode, "eager") for task in OPACUS for mode in OTHERS),
        *((0, "resnet50_float32", mode, "eager") for mode in (ORDINARY, PRIVATE, *OTHERS)),
    ]


def rehearsed_plan() -> list[Unit]:
    """What a rehearsal runs: models that have a goal, in every way once, and one graph that fails."""
    plan = [unit for unit in step_plan() if unit[0] == 0 and unit[1] in GOALS]
    plan = [unit for unit in plan if unit[2] not in OTHERS]
    return [unit for unit in plan if unit[3] != "graph" or unit[1] == MAIN[0]]


def unit_of(run: Mapping) -> Unit:
    """What a run is of."""
    return run["round"], run["task"], run["mode"], run["way"]


def remaining(plan: Sequence[Unit], runs: Sequence[Mapping]) -> list[Unit]:
    """What has not come to its end, or to an error."""
    done = {unit_of(run) for run in runs if not run.get("stopped")}
    return [unit for unit in plan if unit not in done]


@dataclass
class Runs:
    """Runs steps until time is up.

    Args:
        deadline: of all runs. order: for the children, in addition to the run: "device", "steps",
            "tiny", "inductor" (tasks whose step is compiled; None: all).
        result: "runs" and "not_run" go to its "steps". save: called when these have changed.
        say: a line, for whoever watches. lanes: processes at once. module: what they run.
    """

    deadline: Deadline
    order: Mapping
    result: dict
    save: Callable[[], None]
    say: Callable[[str], None]
    lanes: int = 1
    module: str = "bench.gpu_steps"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.found: dict = self.result.setdefault("steps", {"runs": [], "not_run": 0})

    def run(self, plan: Sequence[Unit]) -> dict:
        """Run what of the plan has not been run; "runs" and "not_run"."""
        self._plan = plan
        units = remaining(plan, self.found["runs"])
        groups = [list(group) for _, group in groupby(units, key=lambda unit: unit[:3])]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self.lanes) as pool:
            turn = str(Path(folder) / "turn") if self.lanes > 1 else None
            waiting = [pool.submit(self._group, group, turn) for group in groups]
            try:
                for one in waiting:
                    one.result()
            finally:
                self._ended.set()
                for one in waiting:
                    one.cancel()
        return self.found

    def up(self) -> bool:
        """Whether time is up."""
        return self._ended.is_set() or self.deadline.left() <= 0

    def _group(self, units: list[Unit], turn: str | None) -> None:
        """One model in one mode, by as many processes as its ways end."""
        while units and not self.up():
            _, task, mode, _ = units[0]
            chosen = self.order.get("inductor")
            with Child(["-m", self.module], VARIABLES) as child:
                child.send({
                    **self.order, "task": task, "mode": mode, "ways": [unit[3] for unit in units],
                    "inductor": chosen is None or task in chosen, "turn": turn,
                })  # fmt: skip
                units = units[_Following(self, child, units).follow() :]

    def note(self, run: dict) -> None:
        """Replaces what is known of a run by the latest report."""
        with self._lock:
            runs = self.found["runs"]
            before = [i for i, other in enumerate(runs) if unit_of(other) == unit_of(run)]
            if before:
                runs[before[0]] = run
            else:
                runs.append(run)
            self.found["not_run"] = len(remaining(self._plan, runs))
            self.save()


class _Following:
    """Collects what a process reports of its ways, within their time limits."""

    def __init__(self, runs: Runs, child: Child, units: Sequence[Unit]) -> None:
        self._runs, self._child, self._units = runs, child, units
        self._run: dict = {}
        self._limit, self._spent, self._waits = START_SECONDS, 0.0, False
        self.ended = 0

    def follow(self) -> int:
        """How many of the ways came to an end, whatever it was; 1 at least, unless time was up."""
        clock = self._runs.deadline.clock
        while not self._runs.up():
            began = clock()
            try:
                part = self._child.message(min(1.0, self._runs.deadline.left()))
            except TimeoutError:
                part = {}
            self._spent += 0.0 if self._waits else clock() - began
            if part is None or "finished" in part:
                return self._gone(part)
            self._take(part)
            if self._spent > self._limit:
                return self._fails(f"TimeoutError: stopped after {self._limit:.0f} s{self._far()}")
        if len(self._run) > len(NAMES):
            self._runs.note({**self._run, "stopped": True, "error": f"time was up{self._far()}"})
        return self.ended

    def _take(self, part: dict) -> None:
        if "waits" in part:
            self._waits = part["waits"]
        elif "begin" in part:
            unit = next(unit for unit in self._units if unit[3] == part["begin"])
            self._run = dict(zip(NAMES, unit, strict=True))
            self._limit, self._spent = WAY_SECONDS[part["begin"]], 0.0
        elif "end" in part:
            self._run.pop("progress", None)
            self._end()
        elif self._run:
            self._run.update(part)
            if set(part) != {"progress"}:
                self._runs.note({**self._run, "stopped": True})
        elif "error" in part:
            self._fails(part["error"])

    def _end(self) -> None:
        self._runs.note(dict(self._run))
        self._runs.say(line_of(self._run))
        self._run = {}
        self.ended += 1
        self._limit, self._spent = START_SECONDS, 0.0

    def _gone(self, part: dict | None) -> int:
        """The process has ended: by itself, or in the way that it was at."""
        if part is None and (self._run or not self.ended):
            died = self._child.death()
            return self._fails(f"{died['error']} {died['detail']}".strip())
        return self.ended if self.ended or part is None else self._fails("nothing was reported")

    def _fails(self, error: str) -> int:
        """The way that it was at, or was to be at next, has this error."""
        if not self._run:
            self._run = dict(zip(NAMES, self._units[self.ended], strict=True))
        self._run["error"] = error
        self._end()
        return self.ended

    def _far(self) -> str:
        """What is known of a first step that did not come to its end."""
        if "progress" not in self._run or "first_step_s" in self._run:
            return ""
        done = self._run["progress"]
        return f", in its first step, after {done['trials']} configurations in {done['search_s']:.0f} s"


def line_of(run: Mapping) -> str:
    """A finished run in one line, for whoever watches."""
    name = f"{run['task']} {run['mode']} {run['way']}"
    name += f", round {run['round']}" if run["round"] else ""
    text = f"{1e3 * run['step_s'][1]:.1f} ms" if "step_s" in run else ""
    return f"{name}: {'; '.join(filter(None, (text, run.get('error', ''))))}"

"""The whole steps in bench.gpu: each task and mode in a process that tells its parts as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.children import Child
from bench.deadline import Deadline
from bench.gpu_summary import summarise, trouble

STEP_SECONDS = 110.0  # for one mode of one workload
NAMES = 3  # of a run that has told nothing: its round, task and mode
FIRST, SECOND = ("non_private", "fastclip"), ("opacus_hooks", "opacus_ghost")
MAIN, EXTRA = ("resnet50", "vit_b", "bert_t128", "bert_t512", "gpt2"), ("resnet50_float32",)

COMPILERS = {"resnet50": 4, "bert_t128": 2, "bert_t512": 2, "gpt2": 1, "vit_b": 2}
"""Processes that compile a task's kernels ahead, each a share of every search: most for a ResNet-50, of
which the most is compiled (`python -m bench.host --first`)."""
GOALS = {
    "bert_t128": {"time": 1.10, "memory": 1.10},
    "bert_t512": {"time": 1.15, "memory": 1.15},
    "gpt2": {"time": 1.20},
    "resnet50": {"time": 1.35},
    "vit_b": {"time": 1.10},
}
"""What fastclip's step is to cost on one H200, against the same step without privacy."""

PROFILED = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""As PyTorch sets them itself: a profiler that comes and goes breaks CUDA graphs that follow."""


def step_plan() -> list[tuple[int, str, str]]:
    """(round, task, mode), the most important first; the second round only tells the spread."""
    return [
        *((0, task, mode) for task in MAIN for mode in FIRST),
        *((0, task, mode) for task in MAIN for mode in SECOND),
        *((1, task, mode) for task in MAIN for mode in FIRST),
        *((0, task, mode) for task in EXTRA for mode in FIRST + SECOND),
    ]


def run_steps(
    deadline: Deadline, device: str, result: dict, save: Callable[[], None],
    plan: Sequence[tuple[int, str, str]], steps: int = 10,
    module: str = "bench.gpu_steps", graphs: bool = True,
) -> dict:  # fmt: skip
    """Time the planned training steps, each task and mode in a fresh process, until time is up.

    The next process imports its libraries while the present one measures. What a process has told
    before it dies or is cut off stays in its run, beside the error.

    Returns:
        "runs", "summary", "not_run"; in result["steps"], and saved, as they come.
    """
    found: dict = {"runs": [], "summary": [], "not_run": len(plan)}
    result["steps"] = found

    def start() -> Child:
        return Child(["-m", module, "--child"], PROFILED)

    waiting: Child | None = None
    try:
        for i, (round_, task, mode) in enumerate(plan):
            if deadline.left() <= 0:
                break
            with waiting or start() as child:
                waiting = start() if i + 1 < len(plan) else None
                child.send({
                    "task": task, "mode": mode, "device": device, "steps": steps,
                    "tiny": device == "cpu", "extras": round_ == 0, "graphs": graphs,
                })  # fmt: skip
                run = {"round": round_, "task": task, "mode": mode}
                _follow(child, run, found, deadline, save)
            if len(run) > NAMES:
                print(line_of(run), flush=True)
    finally:
        if waiting is not None:
            waiting.kill()
    return found


def _follow(
    child: Child, run: dict, found: dict, deadline: Deadline, save: Callable[[], None]
) -> None:
    """Put what a child tells into its run, and the run among those found."""
    mine = deadline.within(STEP_SECONDS)
    while True:
        try:
            part: Mapping | None = child.message(mine.left())
        except TimeoutError:
            if len(run) == NAMES and deadline.left() <= 0:
                return  # not its fault: it has not been run
            part = {"error": f"TimeoutError: stopped {how_far(run)}", "finished": True}
        if part is None:
            part = {**child.death(), "finished": True}
        run.update({key: value for key, value in part.items() if key != "finished"})
        if len(run) > NAMES and run not in found["runs"]:
            found["runs"].append(run)
            found["not_run"] -= 1
        found["summary"] = summarise(found["runs"])
        save()
        if "finished" in part:
            return


def how_far(run: Mapping) -> str:
    """What is known of a run that did not come to its end."""
    if "progress" not in run or "first_step_s" in run:
        return "when its time was up"
    done = run["progress"]
    tried = f"{done['trials']} configurations tried in {done['search_s']:.0f} s"
    return f"after {done['seconds']:.0f} s in its first step, {tried}"


def line_of(run: Mapping) -> str:
    """A finished run in one line, for whoever watches."""
    name = f"{run['task']} {run['mode']}, round {run['round']}"
    if "step_s" not in run:
        return f"{name}: {trouble(run)}"
    text = f"{name}: {1e3 * run['step_s'][1]:.1f} ms"
    if "graph" in run:
        graph = run["graph"]
        text += f", as a graph {1e3 * graph['step_s'][1]:.1f} ms" if "step_s" in graph else (
            f", graph {graph['error']}"
        )  # fmt: skip
    return f"{text}; {trouble(run)}" if "error" in run else text

"""The parts of bench.gpu that measure: microbenchmarks and whole steps, process by process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from bench.children import Child

SILENCE = 75.0  # seconds without a message after which a process is taken to hang
STEP_SECONDS = 90.0  # for one mode of one workload
STARTS = 25  # of the process that times kernels
FIRST, SECOND = ("non_private", "fastclip"), ("opacus_hooks", "opacus_ghost")
MAIN, EXTRA = ("bert_t128", "bert_t512", "resnet50", "gpt2"), ("resnet50_float32",)


def compile_ahead(order: Mapping, count: int, module: str = "bench.kernels.harness") -> list[Child]:
    """Processes that together run every microbenchmark once, untimed, to fill Triton's cache."""
    children = []
    for k in range(count):
        child = Child(["-m", module])
        child.send({**order, "share": [k, count], "seconds": 0})
        children.append(child)
    return children


def run_kernels(
    limit: float, order: Mapping, result: dict, save: Callable[[], None],
    module: str = "bench.kernels.harness", silence: float = SILENCE,
) -> dict:  # fmt: skip
    """Time the microbenchmarks, the most important first, until `limit` seconds have passed.

    A case that ends its process, hangs, or loses the GPU's context becomes a row with its error, and
    a new process goes on after it.

    Returns:
        "ceiling", "rows", "planned" (how many cases there are), "not_run"; "error" where the
        process could not work at all. It is in result["kernels"], and saved, as rows come.
    """
    end = time.monotonic() + limit
    found: dict = {"ceiling": None, "rows": [], "planned": None}
    result["kernels"] = found
    done: list[str] = []
    for _ in range(STARTS):
        left = end - time.monotonic()
        if left <= 0:
            break
        with Child(["-m", module]) as child:
            child.send({**order, "skip": done, "seconds": left, "ceiling": found["ceiling"]})
            before = len(done)
            died = _follow(child, found, done, end, silence, save)
        if died is None:
            break
        if len(done) == before:  # it would die again
            found["error"] = f"{died['error']} {died['detail']}"
            break
    if found["planned"] is not None:
        found["not_run"] = max(found["planned"] - sum("name" in row for row in found["rows"]), 0)
    save()
    return found


def _follow(
    child: Child, found: dict, done: list[str], end: float, silence: float, save: Callable
) -> dict | None:
    """Take a child's messages until it ends; how it died, or None where nothing is left to do."""
    current: dict | None = None

    def note(row: dict) -> None:
        found["rows"].append(row)
        done.append(row["id"])
        save()

    while True:
        left = end - time.monotonic()
        try:
            message = child.message(min(silence, left))
        except TimeoutError as error:
            if left <= silence:
                return None  # out of time
            if current is not None:
                note({**current, "error": f"TimeoutError: {error}"})
            return {"error": f"TimeoutError: {error}", "detail": ""}
        if message is None:
            died = child.death()
            if current is not None:
                note({**current, "error": f"{died['error']} {died['detail']}".strip()})
            elif died["error"] == "ProcessDied: exit 0":
                return None
            return died
        if "plan" in message:
            found["planned"] = len(message["plan"])
        elif "ceiling" in message:
            found["ceiling"] = message["ceiling"]
        elif "start" in message:
            current = {key: value for key, value in message.items() if key != "start"}
        elif "row" in message:
            current = None
            note(message["row"])


def step_plan() -> list[tuple[int, str, str]]:
    """(round, task, mode), the most important first; the second round only tells the spread."""
    return [
        *((0, task, mode) for task in MAIN for mode in FIRST),
        *((0, task, mode) for task in MAIN for mode in SECOND),
        *((0, task, mode) for task in EXTRA for mode in FIRST + SECOND),
        *((1, task, mode) for task in MAIN for mode in FIRST),
    ]


def run_steps(
    limit: float, device: str, result: dict, save: Callable[[], None],
    plan: Sequence[tuple[int, str, str]] | None = None, steps: int = 10,
    module: str = "bench.gpu_steps",
) -> dict:  # fmt: skip
    """Time whole training steps, each task and mode in a fresh process, until time is up.

    The next process imports its libraries while the present one measures.

    Returns:
        "runs", "summary", "not_run"; in result["steps"], and saved, as runs come.
    """
    end = time.monotonic() + limit
    plan = step_plan() if plan is None else plan
    found: dict = {"runs": [], "summary": [], "not_run": len(plan)}
    result["steps"] = found
    waiting: Child | None = None
    for i, (round_, task, mode) in enumerate(plan):
        left = end - time.monotonic()
        if left <= 0:
            break
        with waiting or Child(["-m", module, "--child"]) as child:
            waiting = Child(["-m", module, "--child"]) if i + 1 < len(plan) else None
            order = {"task": task, "mode": mode, "device": device, "steps": steps}
            child.send({**order, "tiny": device == "cpu"})
            allowed = min(STEP_SECONDS, left)
            try:
                row = child.message(allowed) or child.death()
            except TimeoutError:
                if allowed < STEP_SECONDS:
                    break  # out of time
                row = {"error": f"TimeoutError: no result after {allowed:.0f} s"}
        found["runs"].append({"round": round_, "task": task, "mode": mode, **row})
        found["not_run"] = len(plan) - len(found["runs"])
        found["summary"] = summarise(found["runs"])
        save()
    if waiting is not None:
        waiting.kill()
    return found


def summarise(runs: Sequence[Mapping]) -> list[dict]:
    """One row a task and mode: medians over the rounds, ratios to non_private of the same round."""
    from bench.train import paired_ratios  # needs opacus, whose absence bench.gpu has to tell

    rows = []
    for task, mode in dict.fromkeys((run["task"], run["mode"]) for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        mine = [run for run in of_task if run["mode"] == mode]
        good = [dict(run) for run in mine if "error" not in run]
        base = [dict(r) for r in of_task if r["mode"] == "non_private" and "error" not in r]
        row: dict = {"task": task, "mode": mode, "rounds": len(good)}
        if errors := [run["error"] for run in mine if "error" in run]:
            row["error"] = errors[0]
        if good:
            for name in ("title", "host_syncs", "kernels", "warnings"):
                row[name] = good[0].get(name)
            row["step_s"] = [statistics.median(run["step_s"][i] for run in good) for i in range(3)]
            for name in ("host_s", "peak_mib"):
                row[name] = statistics.median(run[name] for run in good)
            if time_ratios := paired_ratios(good, base, lambda run: run["step_s"][1]):
                row["time_ratio"] = statistics.median(time_ratios)
                row["time_ratio_rounds"] = time_ratios
            if ratios := paired_ratios(good, base, lambda run: max(run["peak_mib"], 1e-3)):
                row["memory_ratio"] = statistics.median(ratios)
        rows.append(row)
    return rows

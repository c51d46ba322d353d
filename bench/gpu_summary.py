"""Rows of the table of steps: one a task, mode and way to run it, with its ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

GRAPH = "_graph"  # what the name of a mode ends with whose step was one CUDA graph
BASE = "non_private"


def trouble(run: Mapping) -> str:
    """What went wrong in a run, and where."""
    return f"{run['error']} {run.get('detail', '')}".strip()


def summarise(runs: Sequence[Mapping]) -> list[dict]:
    """One row a task and mode: medians over the rounds, ratios of runs of the same round.

    A step that was captured is compared with training without privacy that was captured, too
    ("time_ratio"), and with that which was not ("eager_ratio").
    """
    entries = with_graphs(runs)
    rows = []
    for task, mode in dict.fromkeys((run["task"], run["mode"]) for run in entries):
        of_task = [run for run in entries if run["task"] == task]
        mine = [run for run in of_task if run["mode"] == mode]
        good = [run for run in mine if "step_s" in run]
        row: dict = {"task": task, "mode": mode, "rounds": len(good)}
        if errors := [trouble(run) for run in mine if "error" in run]:
            row["error"] = errors[0]
        if good:
            row |= _medians(good)
            eager = _good(of_task, BASE)
            base = _good(of_task, BASE + GRAPH) if mode.endswith(GRAPH) else eager
            ratios = {
                "time_ratio": paired(good, base, lambda run: run["step_s"][1]),
                "memory_ratio": paired(good, eager, lambda run: max(run["peak_mib"], 1e-3)),
            }
            if mode.endswith(GRAPH):
                ratios["eager_ratio"] = paired(good, eager, lambda run: run["step_s"][1])
            row |= {name: statistics.median(found) for name, found in ratios.items() if found}
            row["time_ratio_rounds"] = ratios["time_ratio"]
        rows.append(row)
    return rows


def with_graphs(runs: Sequence[Mapping]) -> list[dict]:
    """The runs, and after each that was also captured a run of its own."""
    entries: list[dict] = []
    for run in runs:
        entries.append({key: value for key, value in run.items() if key != "graph"})
        if "graph" in run:
            names = {"round": run["round"], "task": run["task"], "mode": run["mode"] + GRAPH}
            entries.append({**names, **run["graph"]})
    return entries


def paired(
    runs: Sequence[Mapping], base: Sequence[Mapping], value: Callable[[Mapping], float]
) -> list[float]:
    """value(run) / value(base run of the same round), for rounds in both."""
    below = {run["round"]: value(run) for run in base}
    return [value(run) / below[run["round"]] for run in runs if run["round"] in below]


def _good(runs: Sequence[Mapping], mode: str) -> list[Mapping]:
    return [run for run in runs if run["mode"] == mode and "step_s" in run]


def _medians(runs: Sequence[Mapping]) -> dict:
    first = runs[0]
    kept = ("title", "host_syncs", "host_parts_s", "kernels", "warnings")
    row = {name: first[name] for name in kept if name in first}
    row["step_s"] = [statistics.median(run["step_s"][i] for run in runs) for i in range(3)]
    for name in ("host_s", "peak_mib"):
        row[name] = statistics.median(run[name] for run in runs)
    profile = first.get("profile", {})
    row |= {name: profile[name] for name in ("launches", "busy_share") if name in profile}
    if kernels := profile.get("kernels"):
        row["top"] = [{"name": k["name"], "share": k["share"]} for k in kernels[:4]]
    if plan := first.get("plan"):
        norms = [layer["norm"] or "not seen" for layer in plan]
        row["norms"] = {name: norms.count(name) for name in dict.fromkeys(norms)}
        row["held_bytes"] = sum(layer["held_bytes"] for layer in plan)
    if "configurations" in first:
        row["searches"] = len(first["configurations"])
    return row

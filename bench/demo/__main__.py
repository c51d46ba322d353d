"""The main job on real data: train privately, with three engines, next to training without.

    python -m bench.demo

Two tasks that need no download (tasks.py) are trained by the same function
(train.py) without privacy, with fastclip, and with Opacus' hooks and ghost modes, all at
the same privacy budget, each in a fresh process. Then what clipping does to a rare class
(fairness.py). Prints tables and writes demo.json and demo.png to build/demo. Takes a few
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

from tqdm import tqdm

from bench.demo.fairness import SEEDS, measure
from bench.demo.fairness import table as table_of_classes
from bench.demo.picture import draw
from bench.demo.tasks import TASKS
from bench.demo.train import ENGINES
from bench.measure import busy_warning, machine, now, versions
from bench.processes import ROOT, run_module

BASELINE = "not_private"
OPACUS_AND_BERT = (
    "Opacus needs BERT's position_ids and token_type_ids spelled out as [b, t]; transformers makes "
    "them [1, t].\nWith them: python -m bench.train --workloads bert_explicit"
)


def run_all(options: argparse.Namespace) -> list[dict]:
    """Every task with every engine, one process after another."""
    plan = [(task, engine) for task in options.tasks for engine in options.engines]
    extra = ["--epochs", str(options.epochs)] if options.epochs else []
    runs = []
    with tqdm(plan, unit="run", position=0) as progress:
        for task, engine in progress:
            progress.set_description(f"{task} {engine}")
            result = run_module("bench.demo.train", [task, engine, *extra], show_progress=True)
            runs.append({"task": task, "title": TASKS[task].title, "engine": engine, **result})
    return add_ratios(runs)


def add_ratios(runs: list[dict]) -> list[dict]:
    """Step time and peak memory over those of the run of the same task without privacy."""
    good = [run for run in runs if "error" not in run]
    baselines = {run["task"]: run for run in good if run["engine"] == BASELINE}
    for run in good:
        if base := baselines.get(run["task"]):
            run["time_ratio"] = run["step_s"] / base["step_s"]
            run["memory_ratio"] = run["peak_mib"] / base["peak_mib"]
    return runs


def table(runs: list[dict]) -> str:
    """The runs as text."""
    lines = []
    for task in dict.fromkeys(run["task"] for run in runs):
        mine = [run for run in runs if run["task"] == task]
        lines.append(f"\n{TASKS[task].title}{_sizes(mine)}")
        lines.append(
            f"  {'':<14}{'step':>9}{'time x':>9}{'memory':>11}{'memory x':>10}"
            f"{'accuracy':>10}{'epsilon':>9}"
        )
        lines += ["  " + _row(run) for run in mine]
    return "\n".join(lines)


def _sizes(runs: list[dict]) -> str:
    for run in runs:
        if "error" not in run:
            return (
                f": {run['train_samples']} samples to train on, {run['test_samples']} to test on, "
                f"{len(run['classes'])} classes, chance {run['chance']:.0%}"
            )
    return ""


def _row(run: dict) -> str:
    name = f"{run['engine'].replace('_', ' '):<14}"
    if "error" in run:
        return f"{name}FAILS  {run['error']}"
    epsilon = "-" if run["epsilon"] is None else f"{run['epsilon']:.2f}"
    time_ratio, memory_ratio = (
        f"{run[key]:.2f}" if key in run else "-" for key in ("time_ratio", "memory_ratio")
    )
    return (
        f"{name}{run['step_s'] * 1000:>6.0f} ms{time_ratio:>9}{run['peak_mib']:>7.0f} MiB"
        f"{memory_ratio:>10}{run['accuracy']:>10.1%}{epsilon:>9}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run, print the table, write the files."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--epochs", type=int, help="instead of each task's own number")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the fairness part; 0: none")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", help="folder")
    options = parser.parse_args(arguments)

    start = time.perf_counter()
    runs = run_all(options)
    warnings.filterwarnings("ignore")  # Opacus warns about its random generator at every start
    classes = measure(options.seeds, options.epochs) if options.seeds > 0 else None
    host = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    summary = {"date": now(), "machine": host, "versions": versions(), "runs": runs}
    summary |= {} if classes is None else {"classes": classes}
    (options.out / "demo.json").write_text(json.dumps(summary, indent=1) + "\n")
    warning = busy_warning((f"{run['task']} {run['engine']}", run.get("cpu_wait")) for run in runs)
    where = f"{host['processor']}, {host['cores']} cores"
    draw(runs, options.out / "demo.png", where, warning, classes)

    print(table(runs))
    if classes is not None:
        print(table_of_classes(classes))
    delta = TASKS[options.tasks[0]].target_delta
    print(
        f"\nx: times training without privacy; one run each on {host['processor']}, "
        f"{host['cores']} cores\nmemory: peak above the built model; epsilon at delta {delta:g}"
    )
    if any("error" in run and "opacus" in run["engine"] for run in runs):
        print(OPACUS_AND_BERT)
    if warning:
        print(warning)
    print(f"{time.perf_counter() - start:.0f} s; written to {options.out}: demo.json, demo.png")


if __name__ == "__main__":
    main()

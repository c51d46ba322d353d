"""Measures end-to-end training on a CPU, private and non-private side by side.

    python -m bench.train --parts
    python -m bench.train --workloads bert --modes non_private fastclip --rounds 1 --steps 3
    python -m bench.draw bench/results/train-cpu.json --out docs/pictures/train-cpu.png

Each (workload, mode) runs in a fresh process. Processes run in rounds, and each round rotates the order
of the modes. The ratio of a mode is the median over rounds of its ratio to `non_private` of the same
round, so a machine that slows down for a while slows both sides. Times that were taken while other
programs waited for a core are left out if a round without them exists. A warning names them in any case.
A mode that fails is reported with its error, and not run again. The first round always finishes. Later
rounds run as far as --minutes allows.

Peak memory is that of the process. For non-private training and fastclip there is also the peak if glibc
keeps no holes in its heap (MALLOC_MMAP_THRESHOLD_=131072).

--parts first divides the non-private step and that of fastclip into parts (bench/parts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from bench.deadline import Deadline
from bench.measure import busy_warning, heading, is_busy, machine
from bench.parts import measure_parts, parts_table
from bench.processes import report, run_module
from bench.training import measure
from bench.workloads import CPU_MODES, WORKLOADS

BASELINE = "non_private"
DEFAULT = ["resnet18", "bert", "vit"]
TIGHT = (BASELINE, "fastclip")
NO_HOLES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
OUT = Path(__file__).resolve().parent / "results" / "train-cpu.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--modes", nargs="+", choices=CPU_MODES, default=list(CPU_MODES))
    parser.add_argument("--rounds", type=int, default=3, help="processes per workload and mode")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each process")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps in each process")
    parser.add_argument("--minutes", type=float, default=6.0, help="for all but the first round")
    parser.add_argument("--parts", action="store_true", help="divide steps by part, too")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    # The child: workload and mode, which may be "parts".
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


def child_options(options: argparse.Namespace) -> list[str]:
    """Options of a child in addition to what it measures."""
    given = ["--steps", str(options.steps), "--seconds", str(options.seconds)]
    return given if options.threads is None else [*given, "--threads", str(options.threads)]


def run_parts(options: argparse.Namespace) -> list[dict]:
    """The steps of each workload by part."""
    common = child_options(options)
    found = []
    for workload in tqdm(options.workloads, unit="process", desc="parts"):
        result = run_module("bench.train", ["--one", workload, "parts", *common])
        found.append({"workload": workload, **result})
    return found


def run_tight(options: argparse.Namespace, run: Callable[..., dict] = run_module) -> list[dict]:
    """Peak memory of a few steps if large blocks are freed at once, by workload and mode.

    glibc keeps holes in its heap for blocks to come; how many depends on the order in which blocks of
    unlike sizes come and go, and says little of what a step holds.
    """
    plan = [(w, m) for w in options.workloads for m in TIGHT if m in options.modes]
    found = []
    for workload, mode in tqdm(plan, unit="process", desc="memory"):
        given = ["--one", workload, mode, *child_options(options), "--steps", "2"]
        result = run("bench.train", given, variables=NO_HOLES)
        found.append({"workload": workload, "mode": mode, **result})
    return found


def run_rounds(
    options: argparse.Namespace, deadline: Deadline, run: Callable[..., dict] = run_module
) -> list[dict]:
    """Every process of every round, as a flat list of results with their names.

    After the first round, processes that failed before or would not end in time are left out.

    Args:
        options: the command line. deadline: of the later rounds. run: runs a process.
    """
    plan = []
    for round_ in range(options.rounds):
        shift = round_ % len(options.modes)
        for workload in options.workloads:
            for mode in options.modes[shift:] + options.modes[:shift]:
                plan.append((round_, workload, mode))
    common = child_options(options)
    runs = []
    took: dict[tuple[str, str], float] = {}
    with tqdm(plan, unit="process") as progress:
        for round_, workload, mode in progress:
            progress.set_description(f"{workload} {mode}")
            if round_ and took[workload, mode] > deadline.left():
                continue
            start = time.monotonic()
            result = run("bench.train", ["--one", workload, mode, *common])
            took[workload, mode] = time.monotonic() - start
            if "error" in result:
                took[workload, mode] = float("inf")  # never again
            runs.append({"round": round_, "workload": workload, "mode": mode, **result})
    return runs


def paired_ratios(runs: list[dict], baseline: list[dict], value: Callable) -> list[float]:
    """value(run) / value(baseline run of the same round), for rounds in both."""
    below = {run["round"]: value(run) for run in baseline}
    return [value(run) / below[run["round"]] for run in runs if run["round"] in below]


def quiet(runs: list[dict]) -> list[dict]:
    """The runs that no other program disturbed, or all if there are none such."""
    return [run for run in runs if not is_busy(run["cpu_wait"])] or runs


def summarise(runs: list[dict], workload: str, mode: str) -> dict:
    """One row of the table: medians over rounds and paired ratios, or the error."""

    def of(name: str) -> list[dict]:
        return [run for run in runs if run["workload"] == workload and run["mode"] == name]

    mine = of(mode)
    good = [run for run in mine if "error" not in run]
    base = [run for run in of(BASELINE) if "error" not in run]
    row: dict = {"workload": workload, "mode": mode, "rounds": len(good)}
    failures = [run["error"] for run in mine if "error" in run]
    if failures:
        row["error"] = failures[0]
        row["failed_rounds"] = len(failures)
    if not good:
        return row
    timed = quiet(good)
    row["step_s"] = [statistics.median(run["step_s"][i] for run in timed) for i in range(3)]
    row["peak_mib"] = statistics.median(run["peak_mib"] for run in good)
    memory = paired_ratios(good, base, lambda run: run["peak_mib"])
    time = paired_ratios(timed, quiet(base), lambda run: run["step_s"][1])
    if not time:  # no round in which both were quiet
        time = paired_ratios(good, base, lambda run: run["step_s"][1])
    for name, ratios in (("time_ratio", time), ("memory_ratio", memory)):
        if ratios:
            row[f"{name}_rounds"] = len(ratios)
            row[name] = statistics.median(ratios)
            row[f"{name}_range"] = [min(ratios), max(ratios)]
    return row


def add_tight(rows: list[dict], tight: list[dict]) -> None:
    """tight_mib and tight_ratio, to the rows that `run_tight` has measured."""
    peaks = {(run["workload"], run["mode"]): run["peak_mib"] for run in tight if "error" not in run}
    for row in rows:
        mine, base = (peaks.get((row["workload"], mode)) for mode in (row["mode"], BASELINE))
        if mine is not None and base is not None:
            row["tight_mib"], row["tight_ratio"] = mine, mine / base


def table(rows: list[dict]) -> str:
    """The rows as text; a ratio is followed by its range over the rounds."""
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        lines.append(f"\n{WORKLOADS[workload].title}")
        lines.append(
            f"  {'mode':<18}{'step s [quartiles]':<24}{'time x':<19}{'peak MiB':>9}  memory x"
        )
        for row in rows:
            if row["workload"] == workload:
                lines.append("  " + _cells(row))
    return "\n".join(lines)


def _cells(row: dict) -> str:
    if "step_s" not in row:
        return f"{row['mode']:<18}fails: {row['error']}"
    low, middle, high = row["step_s"]
    step = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
    text = f"{row['mode']:<18}{step:<24}{_ratio(row, 'time_ratio'):<19}{row['peak_mib']:>9.0f}  "
    text += _ratio(row, "memory_ratio")
    if row.get("tight_ratio", 1.0) != 1.0:
        text += f"; without the heap's holes {row['tight_ratio']:.2f}"
    if "error" in row:
        text += f"\n  {'':<18}failed in {row['failed_rounds']} round(s): {row['error']}"
    return text


def _ratio(row: dict, name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_range"]
    return f"{row[name]:.2f} [{low:.2f}, {high:.2f}]"


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file and print the table; or, as a child, measure one pair."""
    options = parse(arguments)
    if options.one:
        workload, mode = options.one
        settings = (options.steps, options.threads, options.seconds)
        if mode == "parts":
            report(lambda: measure_parts(workload, *settings))
        else:
            report(lambda: measure(workload, mode, *settings))
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    deadline = Deadline(60 * options.minutes)
    parts = run_parts(options) if options.parts else []
    runs = run_rounds(options, deadline)
    rows = [summarise(runs, w, m) for w in options.workloads for m in options.modes]
    tight = run_tight(options)
    add_tight(rows, tight)
    result = {
        **heading("bench.train", arguments),
        "machine": machine(),
        "load_before": load,
        "steps": options.steps,
        "seconds": options.seconds,
        "summary": rows,
        "parts": parts,
        "runs": runs,
        "tight": tight,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    host = result["machine"]
    print(f"\n{host['processor']}, {host['cores']} cores; ratios to {BASELINE}: median [range]")
    print(table(rows))
    for found in parts:
        print(f"\n{WORKLOADS[found['workload']].title}: x of the step without privacy")
        print(f"  fails: {found['error']}" if "error" in found else parts_table(found))
    names = [(f"parts of {found['workload']}", found.get("cpu_wait")) for found in parts]
    names += [
        (f"{run['workload']} {run['mode']} (round {run['round'] + 1})", run.get("cpu_wait"))
        for run in runs
    ]
    if warning := busy_warning(names):
        print(f"\n{warning}")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()

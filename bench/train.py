"""End-to-end training on a CPU: private against non-private, side by side.

    python -m bench.train
    python -m bench.train --workloads bert --modes non_private fastclip --rounds 1 --steps 3

Each (workload, mode) runs in a fresh process. Processes go in rounds, the order of the modes
rotated from round to round; a mode's ratio is the median over rounds of its ratio to
`non_private` of the same round, so that a machine that slows down for a while slows both sides.
Times taken while other programs were waiting for a core are left out where a round without them
exists, and named in a warning in any case. A mode that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from bench.measure import busy_warning, is_busy, machine, now, versions
from bench.processes import report, run_module
from bench.workloads import MODES, WORKLOADS, measure

BASELINE = "non_private"
DEFAULT = ["resnet18", "bert"]
OUT = Path(__file__).resolve().parent / "results" / "train-cpu.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3, help="processes per workload and mode")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each process")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # the child: workload, mode
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


def run_rounds(options: argparse.Namespace) -> list[dict]:
    """Every process of every round, as a flat list of results with their names."""
    plan = []
    for round_ in range(options.rounds):
        shift = round_ % len(options.modes)
        for workload in options.workloads:
            for mode in options.modes[shift:] + options.modes[:shift]:
                plan.append((round_, workload, mode))
    common = ["--steps", str(options.steps)]
    if options.threads is not None:
        common += ["--threads", str(options.threads)]
    runs = []
    with tqdm(plan, unit="process") as progress:
        for round_, workload, mode in progress:
            progress.set_description(f"{workload} {mode}")
            result = run_module("bench.train", ["--one", workload, mode, *common])
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
    """One row of the table: medians over rounds, paired ratios, or the error."""

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


def table(rows: list[dict]) -> str:
    """The rows as text; a ratio is followed by its range over the rounds."""
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        lines.append(f"\n{WORKLOADS[workload].title}")
        lines.append(
            f"  {'mode':<14}{'step s [quartiles]':<24}{'time x':<19}{'peak MiB':>9}  memory x"
        )
        for row in rows:
            if row["workload"] == workload:
                lines.append("  " + _cells(row))
    return "\n".join(lines)


def _cells(row: dict) -> str:
    if "step_s" not in row:
        return f"{row['mode']:<14}fails: {row['error']}"
    low, middle, high = row["step_s"]
    step = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
    text = f"{row['mode']:<14}{step:<24}{_ratio(row, 'time_ratio'):<19}{row['peak_mib']:>9.0f}  "
    text += _ratio(row, "memory_ratio")
    if "error" in row:
        text += f"\n  {'':<14}failed in {row['failed_rounds']} round(s): {row['error']}"
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
        report(lambda: measure(workload, mode, options.steps, options.threads))
        return
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    runs = run_rounds(options)
    rows = [summarise(runs, w, m) for w in options.workloads for m in options.modes]
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    result = {
        "command": f"python -m bench.train {command}".strip(),
        "date": now(),
        "machine": machine(),
        "load_before": load,
        "versions": versions(),
        "steps": options.steps,
        "summary": rows,
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    host = result["machine"]
    print(f"\n{host['processor']}, {host['cores']} cores; ratios to {BASELINE}: median [range]")
    print(table(rows))
    if warning := busy_warning(
        (f"{run['workload']} {run['mode']} (round {run['round'] + 1})", run.get("cpu_wait"))
        for run in runs
    ):
        print(f"\n{warning}")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()

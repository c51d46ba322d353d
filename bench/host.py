"""Measures host time and launches of a private step on a GPU, on a machine without one.

    python -m bench.host
    python -m bench.host --profile 40
    python -m bench.host --first resnet50 vit_b      no times: what a first step compiles and tries

A step runs on a device that computes nothing (bench/null_gpu), at the real sizes of the workload and
under bfloat16 autocast. The time is that of the host: Python, PyTorch's dispatcher and autograd, and
Triton's launcher. It does not include the CUDA runtime's time per launch (2 to 5 us on most machines),
or the work of fastclip._C on the arguments of its two or three calls. The first dry run of the model and
the search for configurations happen in earlier steps. For the search, the result lists what it compiles
and tries.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import null_gpu
from bench.host_cases import CASES, MODES, step_of
from bench.measure import CpuWait, heading, quartiles

OUT = Path(__file__).resolve().parent / "results" / "host.json"
WARM_UP = 3
Step = Callable[[], None]


def prepared(name: str, mode: str) -> tuple[Step, nn.Module, dict[str, dict[str, int]]]:
    """A step of a case, its model, and what was compiled and tried for the first one; some have run."""
    null_gpu.install()
    step, model = step_of(name, mode)
    null_gpu.compiled()
    step()
    first = null_gpu.compiled()
    for _ in range(WARM_UP - 1):
        step()
    return step, model, first


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of so many steps in every mode, which take turns; no garbage is collected.

    Seconds of a processor: the thread of the backward pass and that of the program wait for each
    other, so theirs add up to the elapsed time if no other program runs.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for mode, step in steps.items():
                start = time.process_time()
                step()
                seconds[mode].append(time.process_time() - start)
    finally:
        gc.enable()
    return seconds


def functions(step: Step) -> list[dict[str, Any]]:
    """Where the time goes: functions by the time in themselves, in ms a step, under Python's profiler
    (which makes calls of Python slower than they are), and their calls, which no noise touches."""
    profile = cProfile.Profile(time.perf_counter)
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees its own thread alone
        step()
        profile.enable()
        for _ in range(5):
            step()
        profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # its stubs leave it out
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls": calls / 5, "own_ms": own / 5e-3, "ms": whole / 5e-3,
        }
        for (file, line, name), (_, calls, own, whole, _) in stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["own_ms"])


def measure(name: str, rounds: int, profile: int) -> dict[str, Any]:
    """Launches and host times of a step, not private and private.

    Returns:
        launches, calls (of functions of Python and C), step_ms (the least, which no other program has
        made longer, and quartiles) by mode;
        first_step: codes compiled and configurations tried by then, by kernel;
        added_us_a_linear: what the private step takes longer, for each of its Linear layers.
    """
    wait = CpuWait()
    ready = {mode: prepared(name, mode) for mode in MODES}
    steps = {mode: step for mode, (step, *_) in ready.items()}
    row: dict[str, Any] = {"workload": name, "shape": CASES[name].shape}
    for mode, step in steps.items():
        null_gpu.launches(True)
        step()
        found = null_gpu.launches(False)
        row[mode] = {"launches": {k: sum(n.values()) for k, n in found.items()}, "by_kernel": found}
        row[mode]["first_step"] = ready[mode][2]
    for mode, seconds in timed(steps, rounds).items():
        row[mode]["step_ms"] = [1e3 * s for s in (min(seconds), *quartiles(seconds))]
    for mode, step in steps.items():
        busy = functions(step)
        row[mode]["calls"] = sum(function["calls"] for function in busy)
        row[mode]["functions"] = busy[:profile]
    row["linear_layers"] = sum(isinstance(m, nn.Linear) for m in ready["fastclip"][1].modules())
    ordinary, private = (row[mode] for mode in MODES)
    row["added_launches"] = sum(private["launches"].values()) - sum(ordinary["launches"].values())
    row["added_ms"] = private["step_ms"][0] - ordinary["step_ms"][0]
    row["added_us_a_linear"] = 1e3 * row["added_ms"] / row["linear_layers"]
    row["cpu_wait"] = wait.share()
    return row


def first_steps(names: list[str]) -> str:
    """What a private first step compiles and tries, a line for each kernel."""
    lines = []
    for name in names:
        *_, first = prepared(name, "fastclip")
        codes, trials = Counter(first["codes"]), Counter(first["trials"])
        lines.append(f"{name:<32}{'codes':>8}{'trials':>8}")
        lines += [f"  {k:<30}{codes[k]:>8}{trials[k]:>8}" for k in sorted(codes | trials)]
        lines.append(f"  {'':<30}{codes.total():>8}{trials.total():>8}")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """A line for each workload and mode."""
    lines = [f"{'':<24}{'ms':>8}{'aten':>7}{'triton':>8}{'_C':>4}{'calls':>9}"]
    for row in rows:
        for mode in MODES:
            n = row[mode]["launches"]
            lines.append(
                f"{row['workload']:<12}{mode:<12}{row[mode]['step_ms'][0]:>8.1f}{n['aten']:>7}"
                f"{n['triton']:>8}{n['extension']:>4}{row[mode]['calls']:>9.0f}"
            )
        lines.append(
            f"  added: {row['added_launches']} launches, {row['added_ms']:.1f} ms, "
            f"{row['added_us_a_linear']:.0f} us a Linear"
        )
        for found in row["fastclip"]["functions"]:
            lines.append(
                f"{found['own_ms']:>9.2f} ms own {found['ms']:>9.2f} ms {found['calls']:>7.0f} calls  "
                f"{found['function']}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=["bert_base"])
    parser.add_argument("--first", nargs="+", choices=CASES, help="only what first steps compile")
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each mode")
    parser.add_argument("--profile", type=int, default=0, help="functions to show")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.first:
        print(first_steps(options.first))
        return
    rows = [measure(name, options.rounds, options.profile) for name in options.workloads]
    result = {**heading("bench.host", arguments), "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

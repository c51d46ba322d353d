"""Whole training steps, GPU tests and microbenchmarks in one command, inside a time limit.

    python -m bench.gpu                             9 minutes; bench/results/gpu-CARD.json
    python -m bench.gpu --wheels wheels --out out   with packages that the machine lacks
    python -m bench.gpu --only kernels --match ghost_norm
    python -m bench.gpu --only steps tests --modes non_private fastclip
    python -m bench.gpu --device cpu --out DIR      tries the machinery anywhere: no figures

First fastclip._C is built for this Python while kernels are compiled, then whole steps are timed, then
come tests and microbenchmarks. Every result is checked against the reference before it is timed.
Everything that touches the GPU runs in processes of its own, which are ended at their limits; what is
finished is in the JSON file, which is rewritten as results come. A short table comes last, also where
this program is told to end (SIGTERM).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.children import write
from bench.deadline import Deadline
from bench.gpu_ahead import prepare
from bench.gpu_kernels import compile_ahead, run_kernels
from bench.gpu_machine import environment, problems, wheels
from bench.gpu_runs import COMPILERS, FIRST, SECOND, run_steps, step_plan
from bench.gpu_table import table
from bench.gpu_tests import run_tests
from bench.measure import machine, now

PARTS = ("steps", "tests", "kernels")
MODES = FIRST + SECOND
SHARES = {"ahead": 0.35, "steps": 0.7, "tests": 0.4, "kernels": 1.0}
"""Of the time that is left when a part begins; what it does not use goes to the next."""
RESERVE = 8.0  # seconds kept for ending processes and the table
OUT = Path(__file__).resolve().parent / "results"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="folder of the JSON file (bench/results)")
    parser.add_argument("--wheels", type=Path, help="folder of *.whl that this machine lacks")
    parser.add_argument("--minutes", type=float, default=9.0, help="from the process' start")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts; all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of steps")
    parser.add_argument("--match", default="", help="microbenchmarks whose name holds this")
    parser.add_argument("--no-graphs", action="store_true", help="no step as a CUDA graph")
    parser.add_argument("--no-ahead", action="store_true", help="kernels were compiled before")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.out is None:
        parser.error("--device cpu writes no figures to bench/results: give --out")
    if options.minutes <= 0:
        parser.error("--minutes must be positive")
    return options


def without_folders(value: Any) -> Any:
    """Results without this machine's folders, and with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.\-/])/(?:[\w.+\-]+/)+", "", value)
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


@contextmanager
def _compiling(order: dict, deadline: Deadline) -> Iterator[None]:
    """Compile the microbenchmarks' kernels on spare cores meanwhile, and until `deadline`."""
    count = min(6, (os.cpu_count() or 1) // 2) if order["device"] == "cuda" else 0
    with ExitStack() as stack:
        children = [stack.enter_context(child) for child in compile_ahead(order, count)]
        yield
        for child in children:
            child.wait(deadline.left())


def measure(options: argparse.Namespace, result: dict, deadline: Deadline, save: Callable) -> None:
    """Run the parts into `result`, the most important first, each within its share of the time."""
    device = options.device
    order = {"device": device, "match": options.match, "small": device == "cpu"}

    last = [part for part in PARTS if part in options.only][-1]

    def wanted(part: str) -> bool:
        return part in options.only

    def begin(part: str) -> Deadline:
        print(f"{part}: {deadline.left():.0f} s left", flush=True)
        return deadline.part(1.0 if part == last else SHARES[part])

    print("ahead: fastclip._C, kernels", flush=True)
    prepare(
        deadline.part(SHARES["ahead"]), {"device": device, "tiny": device == "cpu"},
        COMPILERS if wanted("steps") and not options.no_ahead else {}, result, save,
    )  # fmt: skip
    if wanted("steps"):
        plan = [pair for pair in step_plan() if pair[2] in options.modes]
        run_steps(begin("steps"), device, result, save, plan, graphs=not options.no_graphs)
    with ExitStack() as stack:
        if wanted("kernels"):
            ahead = deadline.part(0.3)
            stack.enter_context(_compiling(order, ahead))
        if wanted("tests"):
            run_tests(begin("tests"), result, save)
    if wanted("kernels"):
        run_kernels(begin("kernels"), order, result, save)


def went_wrong(result: dict) -> bool:
    """Whether a test failed, or an operation or a fastclip step was wrong or failed."""
    tests, kernels = result.get("tests", {}), result.get("kernels", {})
    runs = result.get("steps", {}).get("runs", [])
    return bool(
        tests.get("failed") or tests.get("errors") or tests.get("error") or kernels.get("error")
        or any("error" in row for row in kernels.get("rows", []))
        or any("error" in run for run in runs if run["mode"] == "fastclip")
    )  # fmt: skip


@contextmanager
def unset(*names: str) -> Iterator[None]:
    """Without these environment variables, for this process and those that it starts."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


class Ended(BaseException):
    """This program was told to end."""


def _end(*_: Any) -> None:
    raise Ended


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the JSON file, print the table; 0 where all went well."""
    options = parse(arguments)
    if arguments is None:
        signal.signal(signal.SIGTERM, _end)
    names = ("TRITON_INTERPRET", "FASTCLIP_BACKEND") if options.device == "cuda" else ()
    with unset(*names), wheels(options.wheels) as trouble:  # figures are of what users get
        spent = time.time() - psutil.Process().create_time() if arguments is None else 0.0
        return run(options, spent, trouble)


def run(
    options: argparse.Namespace, spent: float = 0.0, trouble: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """What :func:`main` does in the environment that it has prepared.

    Args:
        spent: seconds of the time given that are gone. trouble: what is wrong with the wheels.
        clock: the present in seconds.
    """
    began = clock() - spent
    deadline = Deadline(60 * options.minutes - RESERVE - spent, clock)
    result: dict[str, Any] = {"command": command(options), "date": now(), "machine": machine()}
    result["problems"] = [trouble] if trouble else []
    result["problems"] += problems(options.device)
    if not result["problems"]:
        result |= environment(options.device)
    folder = options.out or OUT
    folder.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", result.get("card", "none").lower()).strip("-")
    path = folder / (f"gpu-{card}.json" if options.device == "cuda" else "gpu-trial.json")

    def save() -> None:
        result["seconds"] = clock() - began
        if not result["problems"] or options.out:
            write(path, without_folders(result))

    save()
    if not result["problems"]:
        try:
            measure(options, result, deadline, save)
        except (Ended, KeyboardInterrupt) as ended:
            result["ended"] = f"{type(ended).__name__} before it was done"
        save()
    print(table(without_folders(result)), flush=True)
    if not result["problems"]:
        print(f"written to {path}", flush=True)
    return 2 if result["problems"] else int("ended" in result or went_wrong(result))


def command(options: argparse.Namespace) -> str:
    """What was asked for, without this machine's folders."""
    text = "python -m bench.gpu"
    if options.device != "cuda":
        text += f" --device {options.device}"
    if set(options.only) != set(PARTS):
        text += f" --only {' '.join(options.only)}"
    if set(options.modes) != set(MODES):
        text += f" --modes {' '.join(options.modes)}"
    for name in ("no_graphs", "no_ahead"):
        text += f" --{name.replace('_', '-')}" if getattr(options, name) else ""
    if options.match:
        text += f" --match {options.match}"
    return text if options.minutes == 9.0 else f"{text} --minutes {options.minutes:g}"


if __name__ == "__main__":
    raise SystemExit(main())

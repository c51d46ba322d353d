"""GPU tests, microbenchmarks and whole training steps in one command, inside a time limit.

    python -m bench.gpu                             9 minutes; bench/results/gpu-CARD.json
    python -m bench.gpu --only kernels --match ghost_norm
    python -m bench.gpu --device cpu --out DIR      tries the machinery anywhere: no figures

Every result is checked against the reference before it is timed. Everything that touches the GPU runs
in processes of its own, which are ended at their limits; what is finished is in the JSON file, which
is rewritten as results come. A short table comes last.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.children import write
from bench.gpu_parts import compile_ahead, run_kernels, run_steps
from bench.gpu_table import table
from bench.gpu_tests import run_tests
from bench.measure import first_line, machine, now

PARTS = ("tests", "kernels", "steps")
SHARES = {"tests": 0.28, "kernels": 0.45, "steps": 1.0}
"""Of the time that is left when a part begins; what it does not use goes to the next."""
RESERVE = 8.0  # seconds kept for ending processes and the table
OUT = Path(__file__).resolve().parent / "results"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="folder of the JSON file (bench/results)")
    parser.add_argument("--minutes", type=float, default=9.0, help="from the process' start")
    parser.add_argument("--only", choices=PARTS, help="one part, with all the time")
    parser.add_argument("--match", default="", help="microbenchmarks whose name holds this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.out is None:
        parser.error("--device cpu writes no figures to bench/results: give --out")
    if options.minutes <= 0:
        parser.error("--minutes must be positive")
    return options


def problems(device: str) -> list[str]:
    """What stands in the way, and what to do about it."""
    found = []
    if device == "cuda" and not torch.cuda.is_available():
        found.append("torch sees no NVIDIA GPU: nothing can be measured here")
    needed = {
        "opacus": "fastclip builds on it, so neither its kernels nor its steps run: "
        "python -m pip install --no-deps 'opacus>=1.6,<1.7' (or a wheel of it)",
        "transformers": "the BERT and GPT-2 steps need it",
    }
    for name, why in needed.items():
        if importlib.util.find_spec(name) is None:
            found.append(f"{name} is not installed: {why}")
    if not found:
        try:
            importlib.import_module("fastclip.ops")
            if device == "cuda":
                importlib.import_module("fastclip.kernels")
        except Exception as error:
            found.append(f"fastclip cannot be imported: {first_line(error)}")
    return found


def environment(device: str) -> dict[str, Any]:
    """The card, its driver, compilers and libraries."""
    found: dict[str, Any] = {"card": "none: a trial on the CPU", "versions": _versions()}
    found["nvcc"] = _first_match(["nvcc", "--version"], r"release ([\d.]+)")
    if device != "cuda":
        return found
    card = torch.cuda.get_device_properties(0)
    found |= {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "l2_mib": round(getattr(card, "L2_cache_size", 0) / 2**20),
        "driver": _first_match(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"([\d.]+)"
        ),
        "cuda": torch.version.cuda,
        "allow_tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "opacus", "transformers", "pytest", "fastclip"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    fastclip = sys.modules.get("fastclip")
    if fastclip is not None:  # of this checkout, installed or not
        found["fastclip"] = fastclip.__version__
    return found


def _first_match(command: list[str], pattern: str) -> str:
    """The first group that `pattern` finds in what a command prints, or why there is none."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else "unknown"


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
def _compiling(order: dict, seconds: float) -> Iterator[None]:
    """Compile kernels on spare cores meanwhile, and for `seconds` at least if need be."""
    until = time.time() + seconds
    count = min(6, (os.cpu_count() or 1) // 2) if order["device"] == "cuda" else 0
    with ExitStack() as stack:
        children = [stack.enter_context(child) for child in compile_ahead(order, count)]
        yield
        for child in children:
            child.wait(until - time.time())


def measure(options: argparse.Namespace, result: dict, deadline: float, save: Callable) -> None:
    """Run the parts into `result`, each within its share of the time."""
    order = {"device": options.device, "match": options.match, "small": options.device == "cpu"}

    def share(part: str) -> float:
        left = deadline - RESERVE - time.time()
        return left if options.only else left * SHARES[part]

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    with ExitStack() as stack:
        if wanted("kernels"):
            stack.enter_context(_compiling(order, 0.1 * (deadline - time.time())))
        if wanted("tests"):
            result["tests"] = run_tests(share("tests"))
            save()
    if wanted("kernels"):
        result["kernels"] = run_kernels(share("kernels"), order, result, save)
    if wanted("steps"):
        result["steps"] = run_steps(share("steps"), options.device, result, save)


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


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the JSON file, print the table; 0 where all went well."""
    with unset("TRITON_INTERPRET", "FASTCLIP_BACKEND"):  # figures are of what users get
        return run(arguments)


def run(arguments: list[str] | None) -> int:
    """What :func:`main` does, in the environment that users have."""
    options = parse(arguments)
    began = psutil.Process().create_time() if arguments is None else time.time()
    deadline = began + 60 * options.minutes
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    command = re.sub(r"\s*--out(\s+|=)\S+", "", f"python -m bench.gpu {given}").strip()
    result: dict[str, Any] = {"command": command, "date": now(), "machine": machine()}
    result["problems"] = problems(options.device)
    if not result["problems"]:
        result |= environment(options.device)
    folder = options.out or OUT
    folder.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", result.get("card", "none").lower()).strip("-")
    path = folder / (f"gpu-{card}.json" if options.device == "cuda" else "gpu-trial.json")

    def save() -> None:
        result["seconds"] = time.time() - began
        if not result["problems"] or options.out:
            write(path, without_folders(result))

    save()
    if not result["problems"]:
        measure(options, result, deadline, save)
        save()
    print(table(without_folders(result)))
    if not result["problems"]:
        print(f"written to {path}")
    return 2 if result["problems"] else int(went_wrong(result))


if __name__ == "__main__":
    raise SystemExit(main())

"""Run programs with each engine in turn and write what was measured.

python -m bench.clients [NAME ...] [--rounds 2] [--minutes 30] [--tiny] --out FILE.json
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from importlib import metadata
from pathlib import Path

from bench.children import write
from bench.clients.programs import NAMES
from bench.measure import machine
from bench.processes import run_module

ENGINES = ("opacus", "fastclip")
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FASTCLIP_BUILD": "0",
    "TQDM_DISABLE": "1",
}
LIMIT = 600.0
"""Seconds for one run."""


def run(name: str, engine: str, *, tiny: bool = False) -> dict:
    """One program in a process of its own; what it reported, or why it did not."""
    program = ["-m", "bench.clients.once", name, *(["--tiny"] if tiny else [])]
    module, arguments = (
        ("fastclip.opacus", program) if engine == "fastclip" else (program[1], program[2:])
    )
    found = run_module(module, arguments, timeout=LIMIT, variables=VARIABLES)
    if found.get("engine", engine) != engine:
        return {"error": f"it ran with {found['engine']}", "detail": ""}
    return found


def about(name: str) -> dict:
    """What its line of the table says of it, with the version that is installed."""
    said = importlib.import_module(f"bench.clients.programs.{name}").ABOUT
    try:
        version = metadata.version(said.version)
    except metadata.PackageNotFoundError:
        version = said.version
    return {**vars(said), "version": version}


def main() -> None:
    """Rounds of all programs, one after the other; the file is whole after each."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=3, help="runs with each engine")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later")
    parser.add_argument("--tiny", action="store_true", help="a few rows, to see whether it runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no program {', '.join(sorted(unknown))}")
    begun, names = time.monotonic(), options.names or NAMES
    packages = ("torch", "opacus", "transformers", "peft", "accelerate", "datasets")
    versions = {package: metadata.version(package) for package in packages}
    result: dict = {"machine": machine(), "versions": versions, "programs": {}}
    for number in range(options.rounds):
        for name in names:
            if number and (time.monotonic() - begun) / 60 > options.minutes:
                return
            entry = result["programs"].setdefault(
                name, {"about": about(name), "opacus": [], "fastclip": []}
            )
            for engine in ENGINES if number % 2 == 0 else ENGINES[::-1]:
                if number and "error" in entry[engine][-1]:
                    continue
                found = run(name, engine, tiny=options.tiny)
                load = os.getloadavg()[0]
                entry[engine].append({**found, "load": round(load, 1)})
                print(
                    name, engine, found.get("error") or f"{found['run']['cpu']:.1f} s", flush=True
                )
                write(options.out, result)


if __name__ == "__main__":
    main()

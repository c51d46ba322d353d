"""Searches for the inputs on which a sample contributes the most, or its norm comes out too small.

    python -m bench.worst_case --minutes 10
    python -m bench.worst_case --minutes 600 --targets linear/ghost conv/ghost
    python -m bench.worst_case --replay bench/results/worst-case.json
    python -m bench.worst_case --draw bench/results/worst-case.json

For every way to a norm and a sum, and for every kernel (Triton's in its interpreter, those of
fastclip._C as loops on the host): the largest contribution of one sample over the bound that noise is
scaled to, and the largest ratio of its exact norm to the one that was used. Inputs are drawn from
anywhere (shapes, types, scales, rows that cancel along positions, gradient ascent on how much they
cancel), and the worst of them are varied. The file is rewritten after every turn; a run goes on from
what it finds there. Exit status 1 if a ratio is beyond what may be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.measure import heading, machine
from bench.worst_case.picture import draw
from bench.worst_case.ratios import MEASURES
from bench.worst_case.search import exceeded
from bench.worst_case.targets import TARGETS
from bench.worst_case.turns import Turns
from fastclip.core.system import write_whole

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "bench" / "results" / "worst-case.json"
PICTURE = ROOT / "docs" / "pictures" / "worst-case.png"
TURN = 2.0
"""Seconds of a target's turn."""


def read(path: Path) -> dict[str, Any]:
    """What is known of each target; nothing where there is no file."""
    return json.loads(path.read_text())["targets"] if path.exists() else {}


def write(path: Path, found: dict[str, Any], arguments: list[str] | None) -> None:
    """Put the file in the place of the last one, whole."""
    result = {**heading("bench.worst_case", arguments), "machine": machine(), "targets": found}
    write_whole(path, lambda part: part.write_text(json.dumps(result, indent=1) + "\n"))


def search(
    names: list[str], minutes: float, seed: int, path: Path, arguments: list[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """Give the targets turns until the time is over, each one at least; what is known then."""
    found = read(path)
    start, whole = time.monotonic(), 60 * minutes
    with Turns() as run, tqdm(total=round(whole), unit="s", disable=None) as bar:
        for i in itertools.count():
            name, spent = names[i % len(names)], time.monotonic() - start
            if i >= len(names) and spent >= whole:
                return found
            seconds = min(TURN, max(0.0, whole - spent)) if whole else 0.0
            bar.set_description(name)
            found[name] = run(
                {"target": name, "seed": seed, "seconds": seconds, "found": found.get(name)}
            )
            write(path, found, arguments)
            bar.update(min(round(time.monotonic() - start), bar.total) - bar.n)


def table(found: dict[str, Any]) -> str:
    """A line for each target."""
    lines = [f"{'':<28}{'trials':>8}{'contribution':>15}{'under-estimate':>16}  room used by each"]
    for name, row in found.items():
        ratios = "".join(
            f"{row[m]['ratio']:>{w}.9g}" if m in row else f"{'':>{w}}"
            for m, w in zip(MEASURES, (15, 16), strict=True)
        )
        rooms = ", ".join(f"{row[m]['room_used']:.3g}" for m in MEASURES if m in row)
        lines.append(f"{name:<28}{row['trials']:>8}{ratios}  {rooms}")
    return "\n".join(lines)


def verdict(found: dict[str, Any]) -> int:
    """Say which ratios are beyond what may be; the exit status."""
    beyond = [
        (name, m) for name in found if name in TARGETS for m in exceeded(TARGETS[name], found[name])
    ]
    for name, measure in beyond:
        row = found[name][measure]
        print(f"{name}: {measure} {row['ratio']!r} at {row['about']}; genome {row['genome']}")
    return 1 if beyond else 0


def replay(path: Path) -> int:
    """Make the worst inputs of a file again and print what they come to; the exit status."""
    found, again = read(path), {}
    with Turns() as run:
        for name, row in tqdm(found.items(), unit="target", disable=None):
            again[name] = {"trials": 0}
            for measure, then, now in run({"target": name, "replay": row}):
                same = "the same" if now == then else f"on record {then!r}"
                print(f"{name:<28}{measure:<15}{now!r} ({same})")
                if now is not None:
                    again[name][measure] = {**row[measure], "ratio": now}
    return verdict(again)


def main(arguments: list[str] | None = None) -> int:
    """Search, or replay, or draw; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.worst_case", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="JSON file to write, and to go on from"
    )
    parser.add_argument("--list", action="store_true", help="the names of the targets")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--draw", type=Path, metavar="FILE", help=f"draws {PICTURE.name}")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a sum's order depends on how many there are
    try:
        return run(options, arguments)
    finally:
        torch.set_num_threads(threads)


def run(options: argparse.Namespace, arguments: list[str] | None) -> int:
    """What the options ask for; the exit status."""
    if options.list:
        print("\n".join(TARGETS))
        return 0
    if options.replay:
        return replay(options.replay)
    if options.draw:
        draw(read(options.draw), options.picture)
        return 0
    found = search(options.targets, options.minutes, options.seed, options.out, arguments)
    print(table(found))
    return verdict(found)


if __name__ == "__main__":
    sys.exit(main())

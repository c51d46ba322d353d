"""What grows, drifts or bursts under load: long runs, and sizes that tests never have.

    python -m bench.load --out bench/results/load-cpu.json
    python -m bench.load --draw bench/results/load-cpu.json --out docs/pictures/load-cpu.png

Every case runs in a process of its own and holds its figures against limits that are stated beside them.
The exit status is 1 if one is passed. Limits on times are wide, since machines run other programs, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.load import runs, sizes
from bench.load.picture import draw
from bench.measure import CpuWait, heading, machine
from bench.processes import report, run_module

CASES: dict[str, Callable[[float], dict[str, Any]]] = {
    "steps": runs.steps,
    "workers": runs.workers,
    "rows": sizes.many_rows,
    "logical": sizes.logical_batch,
    "groups": sizes.many_groups,
    "vocabulary": sizes.vocabulary,
    "layers": sizes.many_layers,
}
MODULE = "bench.load"


def measure(name: str, scale: float) -> dict[str, Any]:
    """One case in a process of its own.

    Returns:
        What the case found; {"case", "error", "detail"} where it died.
    """
    wait = CpuWait()
    found = run_module(MODULE, ["--child", name, "--scale", str(scale)], 7200.0, show_progress=True)
    return {"case": name, **found, "cpu_wait": wait.share()}


def passes(row: Mapping[str, Any]) -> bool:
    """Whether the case ended, and every figure of it is within its limit."""
    return "error" not in row and all(figure["holds"] for figure in row["verdicts"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each figure."""
    lines = []
    for row in rows:
        lines.append(row.get("what", row["case"]))
        if "error" in row:
            lines.append(f"    died: {row['error']} {row['detail']}")
        for figure in row.get("verdicts", ()):
            mark = "" if figure["holds"] else "   TOO MUCH"
            value, limit = (f"{figure[key]:g}" for key in ("value", "limit"))
            lines.append(
                f"    {figure['what']:<44}{value:>10}  at most {limit} {figure['unit']}".rstrip()
                + mark
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, write the JSON file, print the table; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes and lengths")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw this file and end")
    parser.add_argument("--out", type=Path, help="JSON file, or with --draw picture, to write")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        report(lambda: CASES[options.child](options.scale))
        return 0
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.out or options.draw.with_suffix(".png"))
        return 0
    result = {**heading(MODULE, arguments), "machine": machine(), "rows": []}
    for name in tqdm(options.cases, unit="case"):
        result["rows"].append(measure(name, options.scale))
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    return 0 if all(map(passes, result["rows"])) else 1


if __name__ == "__main__":
    sys.exit(main())

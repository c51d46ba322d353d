"""What the compiled Triton kernels are made of, without a GPU: registers, spills, shared memory, loads.

    python -m bench.kernels.static             # minutes; writes kernels-static.json and .md in results/
    python -m bench.kernels.static --quick     # the first configurations on a few shapes
    python -m bench.kernels.static --match scaled_sum   # anew in the same files: forms with that name

Every kernel is compiled on the shapes of bench/kernels/launches.py, as the driver would specialise it
(bench/kernels/ahead.py): of bfloat16 for sm_90 in every configuration that its search would try, else
in the first; for sm_80 of bfloat16 and float32 (`--all`: everything in all). Ends with status 1 where
a row has a fault. It says what a kernel does not suffer from, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm

from bench.kernels.ahead import Ahead
from bench.kernels.launches import TYPES, forms, kind_of_product
from bench.measure import heading, versions

OUT = Path(__file__).resolve().parents[1] / "results" / "kernels-static.json"
QUICK = ("BERT-base T=128", "3x3/2", "layer_norm BERT-base", "lookup_", "norm ResNet-50 last")
"""Forms of a quick run: those whose names hold one of these."""
ALLOWED = {
    "ResNeXt-50 3x3": "4 channels a group: no 16 bytes of a patch lie side by side",
    "ConvNeXt 7x7": "one channel a group: the same",
    "BERT-base words": "16 does not divide 30522, and a row is read once or twice: no copy pays",
    "keep BERT-base pooler": "one position: a loop of one step has nothing to load ahead",
    "keep ResNet-50 head": "one position, and 1000 features, which 16 does not divide",
}
"""Forms whose 16-bit operands may be loaded in another way, and why."""
Task = tuple[int, str, int, bool]


def faults(row: dict[str, Any]) -> list[str]:
    """What should not be in a row of `Ahead.rows`."""
    found = []
    if row["stack"] or row["local_loads"] or row["local_stores"]:
        found.append("spills")
    if row["shared"] > row["most"]:
        found.append("more shared memory than there is")
    if row["mode"] != "native":
        return found
    config = row["config"]
    height = config.get("BLOCK_P") or config.get("BLOCK_O") or config["BLOCK_T"]
    hopper = row["arch"] == "sm_90" and height >= 64 and config["warps"] >= 4
    if not (row["wgmma"] if hopper else row["wgmma"] + row["mma"]):
        found.append("no tensor cores")
    if all(any(name in form for name in ALLOWED) for form in row["forms"]):
        return found
    if not row["copies"].get("16"):
        found.append("no asynchronous copies of 16 bytes")
    if any(int(width) < 4 for width in row["loads"]):
        found.append("narrow loads")
    return found


def compiled(task: Task) -> list[dict[str, Any]]:
    """The rows of one form: architecture, kind of product, its number in `forms`, whether all
    configurations are asked for."""
    warnings.filterwarnings("ignore")
    arch, kind, number, every = task
    name, _, launch = forms(kind)[number]
    with kind_of_product(kind), Ahead((arch,), every) as ahead:
        ahead.form = f"{name} {kind}"
        launch()
    return ahead.rows


def tasks(quick: bool, everything: bool, match: str = "") -> list[Task]:
    """What is compiled: of the forms whose names hold `match`."""
    found, kinds = [], ("bf16",) if quick else ("bf16", "fp32", "tf32x3", "fp16")
    for arch in (90, 80):
        for kind in kinds if everything or arch == 90 else kinds[:2]:
            every = everything or (arch == 90 and kind == "bf16" and not quick)
            found += [
                (arch, kind, i, every)
                for i, (name, *_) in enumerate(forms(kind))
                if match in name and (not quick or any(part in name for part in QUICK))
            ]
    return found


def others(rows: Iterable[dict[str, Any]], work: list[Task]) -> list[dict[str, Any]]:
    """The rows of an earlier run for forms that are not compiled now, and still exist."""
    names = {kind: [form for form, *_ in forms(kind)] for kind in TYPES}
    now = {(f"sm_{arch}", f"{names[kind][i]} {kind}") for arch, kind, i, _ in work}
    every = {f"{form} {kind}" for kind, of_kind in names.items() for form in of_kind}
    found = []
    for row in rows:
        left = [form for form in row["forms"] if form in every and (row["arch"], form) not in now]
        found += [{**row, "forms": left}] if left else []
    return found


def merged(parts: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each piece of code, with all forms that it serves."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for part in parts for row in part):
        same = found.setdefault((row["arch"], row["code"]), row)
        same["forms"] += [form for form in row["forms"] if form not in same["forms"]]
    return sorted(found.values(), key=lambda row: (row["kernel"], row["arch"], row["mode"]))


def _widths(counts: dict[str, int]) -> str:
    return " ".join(f"{n}x{width}" for width, n in counts.items()) or "-"


def table(rows: list[dict[str, Any]]) -> str:
    """Worst figures of each kernel, kind of product and architecture, in Markdown."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["arch"], row["mode"]].append(row)
    lines = ["| kernel | GPU | product | codes | registers | spilled | shared KiB | faults |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (kernel, arch, mode), group in groups.items():
        registers = [row["registers"] for row in group]
        spilled = sum(row["local_loads"] + row["local_stores"] > 0 for row in group)
        shared = max(row["shared"] for row in group) / 1024
        wrong = sum(bool(faults(row)) for row in group)
        lines.append(
            f"| {kernel} | {arch} | {mode or '-'} | {len(group)} | {min(registers)}-"
            f"{max(registers)} | {spilled} | {shared:.0f} | {wrong} |"
        )
    return "\n".join(lines)


def listing(rows: list[dict[str, Any]]) -> str:
    """Every row, in Markdown: copies and loads are written as instructions x bytes."""
    lines = [
        "| kernel | GPU | product | configuration | first form (of) | registers | stack | shared KiB "
        "| cp.async | loads | wgmma | mma | instructions |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        config = " ".join(f"{k.removeprefix('BLOCK_')}{v}" for k, v in row["config"].items())
        lines.append(
            f"| {row['kernel']} | {row['arch']} | {row['mode'] or '-'} | {config} | "
            f"{row['forms'][0]} ({len(row['forms'])}) | {row['registers']} | {row['stack']} | "
            f"{row['shared'] / 1024:.0f} | {_widths(row['copies'])} | {_widths(row['loads'])} | "
            f"{row['wgmma']} | {row['mma']} | {row['instructions']} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compile, write, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="first configurations, a few shapes")
    parser.add_argument("--all", action="store_true", help="every configuration of everything")
    parser.add_argument("--match", default="", metavar="TEXT",
                        help="forms whose names hold this; rows of others stay in the file")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    work = tasks(options.quick, options.all, options.match)
    kept = []
    if options.match and options.out.exists():
        before = json.loads(options.out.read_text())
        if before["versions"]["triton"] != triton.__version__:
            parser.error("the other rows are of another Triton")
        kept = others(before["rows"], work)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = merged([kept, *tqdm(pool.map(compiled, work), total=len(work), unit="form")])
    head = heading("bench.kernels.static", arguments)
    head |= {"versions": {**versions(), "triton": triton.__version__}, "allowed": ALLOWED}
    body = ",\n".join(json.dumps(row) for row in rows)
    options.out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{body}\n]}}\n')
    title = "# What the compiled kernels are made of"
    source = f"`{head['command']}`, Triton {triton.__version__}"
    options.out.with_suffix(".md").write_text(
        f"{title}\n\n{source}\n\n{table(rows)}\n\n{listing(rows)}\n"
    )
    print(table(rows))
    wrong = [(row, faults(row)) for row in rows if faults(row)]
    for row, found in wrong:
        print(
            f"{row['arch']} {row['kernel']} {row['config']} {row['forms'][0]}: {', '.join(found)}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

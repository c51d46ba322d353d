"""Disturbs small private trainings in every way that a machine has, and says how they go on.

    python -m bench.faults                                   # all of it
    python -m bench.faults --quick                           # a few runs of each case
    python -m bench.faults --case memory-plain --seed 17     # one run again, as the file names it
    python -m bench.faults --draw                            # the picture, from the file

After a fault training goes on exactly: bit for bit as a run that was not disturbed, or in which the
disturbed step was wholly absent. Or there was a clear error, nothing was released that the ledger on
disk does not hold, and nothing of the failed step is in what follows. Anything else is a failure, and
the command then ends with 1. `--planted` breaks fastclip on purpose: such failures must be found.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from bench.children import write
from bench.faults.cases import CASES, Case
from bench.faults.outcomes import EXACT, FAILED, KINDS, Broken, Outcome, tally
from bench.faults.picture import draw
from bench.faults.planted import PLANTED
from bench.measure import first_line, heading, machine, now

RESULTS = Path(__file__).resolve().parents[1] / "results" / "faults.json"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "faults.png"


def attempt(case: Case, seed: int) -> Outcome:
    """One run of a case, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case.run(seed, Path(folder))
        except Broken as broken:
            return Outcome(FAILED, str(broken))
        except Exception as error:
            return Outcome(FAILED, f"an error that nothing expects: {first_line(error)[:200]}")


def measure(case: Case, seeds: Sequence[int], progress: tqdm) -> dict:
    """All these runs of a case, as the file keeps them."""
    progress.set_description(case.name)
    outcomes = []
    for seed in seeds:
        outcomes.append(attempt(case, seed))
        progress.update()
    failures = [
        {"seed": seed, "why": outcome.note}
        for seed, outcome in zip(seeds, outcomes, strict=True)
        if outcome.kind == FAILED
    ]
    return {
        "name": case.name, "group": case.group, "title": case.title, "runs": len(seeds),
        "date": now(),
        "seeds": [min(seeds), max(seeds)], **tally(outcomes), "failures": failures,
    }  # fmt: skip


def table(found: Sequence[dict]) -> str:
    """One line a case."""
    lines = [f"{'':<84}{'runs':>6}{'exact':>7}{'error':>7}{'FAILED':>8}"]
    for row in found:
        counts = [row["outcomes"][kind] for kind in KINDS]
        name = f"{row['name']:<28}{row['title']:<56}"
        lines.append(f"{name}{row['runs']:>6}{counts[0]:>7}{counts[1]:>7}{counts[2]:>8}")
        lines += [f"    seed {f['seed']}: {f['why']}" for f in row["failures"][:3]]
    total = [sum(row["outcomes"][kind] for row in found) for kind in KINDS]
    lines.append(f"{'all':<84}{sum(total):>6}{total[0]:>7}{total[1]:>7}{total[2]:>8}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, write the JSON file and print the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--case", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE"
    )
    parser.add_argument("--seed", type=int, nargs="+", help="these runs of each case alone")
    parser.add_argument("--quick", action="store_true", help="a few runs of each case")
    parser.add_argument(
        "--planted", choices=sorted(PLANTED), help="break fastclip in this way first"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file to write; for all cases, bench/results'"
    )
    parser.add_argument("--draw", action="store_true", help="draw what the file holds, run nothing")
    options = parser.parse_args(arguments)
    whole = not (options.quick or options.planted or options.seed is not None)
    out = options.out or (RESULTS if whole and len(options.case) == len(CASES) else None)
    if options.draw:
        draw(json.loads((out or RESULTS).read_text()), PICTURE)
        print(f"drawn to {PICTURE}")
        return 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.planted:
        PLANTED[options.planted]()
    chosen = {name: CASES[name].seeds(options.quick) for name in options.case}
    chosen = {name: seeds for name, seeds in chosen.items() if len(seeds)}
    if options.seed is not None:
        chosen = dict.fromkeys(options.case, options.seed)
    with tqdm(total=sum(map(len, chosen.values())), unit="run") as progress:
        found = [measure(CASES[name], seeds, progress) for name, seeds in chosen.items()]
    print(table(found))
    if options.seed is not None:
        print(*(note for row in found for note in row["notes"].get(EXACT, {})), sep="\n")
    if out is not None:
        before = json.loads(out.read_text()) if out.exists() else {}
        kept = before.get("cases", [])
        names = {row["name"] for row in kept}
        again = {row["name"]: row for row in found}
        rows = [again.get(row["name"], row) for row in kept]
        rows += [row for row in found if row["name"] not in names]
        rows.sort(key=lambda row: list(CASES).index(row["name"]))
        result = {**heading("bench.faults", arguments), "machine": machine(), "cases": rows}
        if before:
            result["command"] = before["command"]
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, result)
        print(f"written to {out}")
    return int(any(row["outcomes"][FAILED] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m fastclip.audit`: lower bounds on epsilon of this installation, beside what it claims."""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from fastclip.audit.mechanism import Finding, audit
from fastclip.audit.neighbours import Told, audit_neighbours
from fastclip.audit.settings import NEIGHBOURS, SETTINGS

WIDTH = 36
COLUMNS = ("claimed", "bound", "share", "guesses", "noise", "canaries", "seconds")
LEGEND = """
claimed: epsilon that the engine states; bound: below the true one; share: of the tight epsilon.
guesses, noise: p-values of the right guesses and of the noise under what is claimed; below 0.001 the
claim is refuted. Bounds are of the claimed kind of mechanism at another noise, independent from entry to
entry; those of neighbours (2 x runs) assume nothing, and are at 99.9%."""


def line(name: str, found: Finding | Told) -> str:
    """Of the table."""
    cells = [f"{found.claimed:.3f}", f"{found.bound:.3f}"]
    if isinstance(found, Finding):
        share = f"{found.bound / found.tight:.3f}"
        cells += [share, f"{found.guesses:.2g}", f"{found.noise:.2g}", str(found.canaries)]
    else:
        cells += ["", "", "", f"2x{found.runs}"]
    cells.append(f"{found.seconds:.1f}")
    row = f"{name:<{WIDTH}}" + "".join(f"{cell:>9}" for cell in cells)
    return row + "  REFUTED" * found.refuted


def _settings(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Finding | Told]]]:
    given = {"delta": options.delta, "significance": options.significance}
    for setting in SETTINGS:
        if options.only is None or setting.name in options.only:
            yield setting.name, partial(audit, setting, canaries=options.canaries, **given)
    if options.only is None:
        for pair in NEIGHBOURS:
            yield pair.name, partial(audit_neighbours, pair, runs=options.runs)


def _opacus(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Finding | Told]]]:
    from fastclip.audit import opacus_engine

    given = {"delta": options.delta, "significance": options.significance}
    for mode in ("hooks", "functorch"):
        for setting in opacus_engine.SETTINGS:
            made = partial(
                opacus_engine.audit, setting, canaries=options.canaries, mode=mode, **given
            )
            yield f"{mode}: {setting.name}", made


def _mutants(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Finding | Told]]]:
    from fastclip.audit.mutants import MUTANTS

    for mutant in MUTANTS:
        yield mutant.name, partial(mutant.audited, canaries=options.canaries, runs=options.runs)


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the table, write JSON where it is asked for; 1 if a claim was refuted."""
    parser = argparse.ArgumentParser(prog="python -m fastclip.audit", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[s.name for s in SETTINGS])
    parser.add_argument("--canaries", type=int, default=100_000, help="default 100,000")
    parser.add_argument("--runs", type=int, default=400, help="with and without a row (400)")
    parser.add_argument("--delta", type=float, default=1e-5, help="default 1e-5")
    parser.add_argument("--significance", type=float, default=0.05, help="of each bound (0.05)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="audit engines that are broken on purpose",
    )
    parser.add_argument("--opacus", action="store_true", help="audit Opacus' own engine")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # every run would tell of its settings
    print(f"lower bounds at {1 - options.significance:.1%} on epsilon at delta {options.delta:g}")
    print(" " * WIDTH + "".join(f"{name:>9}" for name in COLUMNS), flush=True)
    names: list[str] = []
    found: list[Finding | Told] = []
    chosen = _mutants if options.mutants else _opacus if options.opacus else _settings
    for name, make in chosen(options):
        names.append(name)
        found.append(make())
        print(line(name, found[-1]), flush=True)
    print(LEGEND)
    if options.json is not None:
        made = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(), "torch": torch.__version__,
            "machine": platform.machine(), "cores": os.cpu_count(),
        }  # fmt: skip
        told = [
            {"name": name, **asdict(one), "refuted": one.refuted}
            for name, one in zip(names, found, strict=True)
        ]
        text = json.dumps({"made with": made, "findings": told}, indent=1)
        options.json.write_text(text.replace(": Infinity", ": null") + "\n")
    return int(any(one.refuted is not options.mutants for one in found))


if __name__ == "__main__":
    raise SystemExit(main())

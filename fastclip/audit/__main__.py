"""Compares lower bounds on epsilon of this installation with its claims: `python -m fastclip.audit`.

Exit status: 0 if no claim is refuted (with --mutants, if all are), 1 if one is (with --mutants, if one
is not), 2 for a command that could not detect anything, 3 if an attack did not work and its finding is
not informative.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastclip.audit import mechanism, neighbors
from fastclip.audit.mechanism import ALARM, Finding, audit
from fastclip.audit.neighbors import NEIGHBORS, SETTINGS, Neighbors, Told, audit_neighbors

WIDTH = 44
COLUMNS = (
    "claimed", "bound", "share", "guesses", "noise", "draws", "counts", "canaries", "seconds"
)  # fmt: skip
LEGEND = f"""
claimed: epsilon that the engine states. bound: lower bound on the true epsilon. share: bound over the
tight epsilon of the claimed mechanism. guesses, noise, draws, counts: p-values under the claim.
A claim is refuted if its p-values together are below its share of {ALARM:g}, or if epsilon is too low
for the recorded steps. If all claims are true, at most one command in {1 / ALARM:,.0f} refutes one.
Bounds hold for the claimed kind of mechanism at any noise level, with noise independent from entry to
entry. If the claim is refuted, they hold for any mechanism. Bounds of neighbors (2 x runs) assume
nothing. They are at delta 0.001 and their share of {ALARM:g}."""


class Planned(NamedTuple):
    """An audit that has not run yet: its name, and how to run it."""

    name: str
    make: Callable[[], Finding | Told]
    runs: bool


def line(name: str, found: Finding | Told) -> str:
    """A line of the table."""
    cells = [f"{found.claimed:.3f}", f"{found.bound:.3f}"]
    if isinstance(found, Finding):
        tests = [f"{found.p_of(group):.2g}" for group in ("guesses", "noise", "draws")]
        counted = f"{found.p_of('counts'):.2g}" if "counts" in found.tests else ""
        cells += [f"{found.bound / found.tight:.3f}", *tests, counted, str(found.canaries)]
    else:
        cells += ["", "", "", "", "", f"2x{found.runs}"]
    cells.append(f"{found.seconds:.1f}")
    text = f"{name:<{WIDTH}}" + "".join(f"{cell:>9}" for cell in cells)
    if found.refuted:
        return "; ".join([text + "  REFUTED", *found.faults])
    nothing = isinstance(found, Finding) and found.says_nothing
    return text + "  SAYS NOTHING: far fewer guesses are right than the claim allows" * nothing


def _settings(options: argparse.Namespace) -> list[Planned]:
    given = _given(options, len(SETTINGS))
    return [
        *(Planned(s.name, partial(audit, s, canaries=options.canaries, **given), False)
          for s in SETTINGS),
        *(Planned(n.name, partial(audit_neighbors, n, runs=options.runs), True)
          for n in NEIGHBORS),
    ]  # fmt: skip


def _opacus(options: argparse.Namespace) -> list[Planned]:
    from fastclip.audit import mechanism

    given = _given(options, 2 * len(mechanism.SETTINGS))
    made = partial(mechanism.audit_opacus, canaries=options.canaries, **given)
    return [
        Planned(f"{mode}: {s.name}", partial(made, s, mode=mode), False)
        for mode in ("hooks", "functorch")
        for s in mechanism.SETTINGS
    ]


def _mutants(options: argparse.Namespace) -> list[Planned]:
    from fastclip.audit.mutants import MUTANTS

    given = _given(options, len(MUTANTS))
    made: dict[str, Any] = {"canaries": options.canaries, "runs": options.runs, **given}
    return [
        Planned(m.name, partial(m.audited, **made), isinstance(m.setting, Neighbors))
        for m in MUTANTS
    ]


def _given(options: argparse.Namespace, audits: int) -> dict[str, Any]:
    """Options that make all bounds of a table hold together."""
    return {"delta": options.delta, "significance": options.significance / audits}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastclip.audit", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these lines of the table")
    parser.add_argument(
        "--canaries", type=int, default=100_000, help="number of canaries (100,000)"
    )
    parser.add_argument(
        "--runs", type=int, default=400, help="runs with, and without, a sample (400)"
    )
    parser.add_argument("--delta", type=float, default=1e-5, help="delta of the mechanism (1e-5)")
    parser.add_argument(
        "--significance", type=float, default=0.05, help="of all bounds together (0.05)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mutants", action="store_true", help="audit engines broken on purpose")
    which.add_argument("--opacus", action="store_true", help="audit the engine of Opacus")
    return parser


def _planned(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Planned]:
    """The audits to run; exits with status 2 if one of them could not detect anything."""
    chosen = _mutants if options.mutants else _opacus if options.opacus else _settings
    planned = chosen(options)
    if options.only is not None:
        names = [one.name for one in planned]
        if unknown := [name for name in options.only if name not in names]:
            parser.error(f"--only expects names of {names}, got {unknown}")
        planned = [one for one in planned if one.name in options.only]
    for name, low, high in (("delta", 0.0, 1.0), ("significance", 0.0, 0.5)):
        if not low < getattr(options, name) < high:
            parser.error(
                f"--{name} expects a number between {low:g} and {high:g}, got {getattr(options, name)}"
            )
    if not all(one.runs for one in planned) and options.canaries < mechanism.FEWEST:
        parser.error(
            f"--canaries expects at least {mechanism.FEWEST}, got {options.canaries}, which could not "
            "detect that half of the noise is missing"
        )
    if any(one.runs for one in planned) and options.runs < neighbors.FEWEST:
        parser.error(
            f"--runs expects at least {neighbors.FEWEST}, got {options.runs}, which could not detect a "
            "number that reveals the sample in half of the runs"
        )
    return planned


def main(arguments: list[str] | None = None) -> int:
    """Runs the audits, prints the table, writes JSON if asked to, and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    planned = _planned(parser, options)
    warnings.simplefilter("ignore")  # every run would warn about its settings
    print(
        f"lower bounds on epsilon at delta {options.delta:g}, all at {1 - options.significance:.1%}"
    )
    print(" " * WIDTH + "".join(f"{name:>9}" for name in COLUMNS), flush=True)
    found: list[Finding | Told] = []
    for one in planned:
        found.append(one.make())
        print(line(one.name, found[-1]), flush=True)
    print(LEGEND)
    if options.json is not None:
        write(options.json, [one.name for one in planned], found)
    if any(one.refuted is not options.mutants for one in found):
        return 1
    return 3 * any(isinstance(one, Finding) and one.says_nothing for one in found)


def write(file: Path, names: list[str], found: list[Finding | Told]) -> None:
    """Writes all findings as JSON."""
    made = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
    findings = [
        {"name": name, **asdict(one), "refuted": one.refuted}
        for name, one in zip(names, found, strict=True)
    ]
    text = json.dumps({"made with": made, "findings": findings}, indent=1)
    file.write_text(text.replace(": Infinity", ": null") + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m fastclip.audit`: lower bounds on epsilon of this installation, beside what it claims.

Exit status: 0 if nothing is refuted (of --mutants: if all are), 1 if something is (if one passes), 2 for
a command that cannot tell, 3 if an attack did not work, so that its finding says nothing.
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
claimed: epsilon that the engine states; bound: below the true one; share: of the tight epsilon.
guesses, noise, draws, counts: p-values under what is claimed. The claim is refuted where they are,
all together, below the setting's share of {ALARM:g}, so that of an engine whose claims are true one
command in {1 / ALARM:,.0f} at most calls one refuted; or where epsilon is stated too low for what is
recorded. Bounds are of the claimed kind of mechanism at another noise, independent from entry to
entry; where the claim is refuted, of any mechanism. Those of neighbors (2 x runs) assume nothing, and
are at delta 0.001 and their share of {ALARM:g}."""


class Planned(NamedTuple):
    """An audit that has not been made: its name, and how."""

    name: str
    make: Callable[[], Finding | Told]
    runs: bool


def line(name: str, found: Finding | Told) -> str:
    """Of the table."""
    cells = [f"{found.claimed:.3f}", f"{found.bound:.3f}"]
    if isinstance(found, Finding):
        looked = [f"{found.p_of(group):.2g}" for group in ("guesses", "noise", "draws")]
        counted = f"{found.p_of('counts'):.2g}" if "counts" in found.tests else ""
        cells += [f"{found.bound / found.tight:.3f}", *looked, counted, str(found.canaries)]
    else:
        cells += ["", "", "", "", "", f"2x{found.runs}"]
    cells.append(f"{found.seconds:.1f}")
    sample = f"{name:<{WIDTH}}" + "".join(f"{cell:>9}" for cell in cells)
    if found.refuted:
        return "; ".join([sample + "  REFUTED", *found.faults])
    nothing = isinstance(found, Finding) and found.says_nothing
    return sample + "  SAYS NOTHING: far fewer guesses are right than the claim allows" * nothing


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
    """All bounds of a table hold together."""
    return {"delta": options.delta, "significance": options.significance / audits}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fastclip.audit", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the table that is asked for")
    parser.add_argument("--canaries", type=int, default=100_000, help="default 100,000")
    parser.add_argument("--runs", type=int, default=400, help="with and without a row (400)")
    parser.add_argument("--delta", type=float, default=1e-5, help="of the mechanism (1e-5)")
    parser.add_argument("--significance", type=float, default=0.05, help="of all bounds (0.05)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mutants", action="store_true", help="audit engines broken on purpose")
    which.add_argument("--opacus", action="store_true", help="audit Opacus' own engine")
    return parser


def _planned(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Planned]:
    """What is asked for; ends with status 2 for what could not tell."""
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
            f"--canaries expects {mechanism.FEWEST} at least, got {options.canaries}: fewer do not "
            "show that half of the noise is missing"
        )
    if any(one.runs for one in planned) and options.runs < neighbors.FEWEST:
        parser.error(
            f"--runs expects {neighbors.FEWEST} at least, got {options.runs}: fewer do not show a "
            "number that tells of the row in half of them"
        )
    return planned


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the table, write JSON where it is asked for; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    planned = _planned(parser, options)
    warnings.simplefilter("ignore")  # every run would tell of its settings
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
    """All of it, as JSON."""
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
    file.write_text(text.replace(": Infinity", ": null") + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

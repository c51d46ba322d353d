"""`python -m fastclip.audit`: lower bounds on epsilon of this installation, beside what it claims."""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from fastclip.audit.mechanism import Finding, audit
from fastclip.audit.settings import SETTINGS

COLUMNS = ("claimed", "bound", "share", "guesses", "noise", "canaries", "seconds")
LEGEND = """
claimed: epsilon that the engine states; bound: below the true one; share: of the tight epsilon.
guesses, noise: p-values of the right guesses and of the noise under what is claimed; below 0.001 the
claim is refuted. Bounds assume noise that is independent from entry to entry."""


def line(found: Finding) -> str:
    """Of the table."""
    cells = (
        f"{found.claimed:.3f}", f"{found.bound:.3f}", f"{found.bound / found.tight:.3f}",
        f"{found.guesses:.2g}", f"{found.noise:.2g}", str(found.canaries), f"{found.seconds:.1f}",
    )  # fmt: skip
    row = f"{found.setting:<22}" + "".join(f"{cell:>9}" for cell in cells)
    return row + "  REFUTED" * found.refuted


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the table, write JSON where it is asked for; 1 if a claim was refuted."""
    parser = argparse.ArgumentParser(prog="python -m fastclip.audit", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[s.name for s in SETTINGS])
    parser.add_argument("--canaries", type=int, default=100_000, help="default 100,000")
    parser.add_argument("--delta", type=float, default=1e-5, help="default 1e-5")
    parser.add_argument("--significance", type=float, default=0.05, help="of each bound (0.05)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # every run would tell of its settings
    print(f"lower bounds at {1 - options.significance:.1%} on epsilon at delta {options.delta:g}")
    print(" " * 22 + "".join(f"{name:>9}" for name in COLUMNS), flush=True)
    found = []
    for setting in SETTINGS:
        if options.only is None or setting.name in options.only:
            one = audit(
                setting, canaries=options.canaries, delta=options.delta,
                significance=options.significance,
            )  # fmt: skip
            found.append(one)
            print(line(one), flush=True)
    print(LEGEND)
    if options.json is not None:
        made = {"python": platform.python_version(), "torch": torch.__version__}
        told = [asdict(one) | {"refuted": one.refuted} for one in found]
        options.json.write_text(json.dumps({"made with": made, "findings": told}, indent=1) + "\n")
    return int(any(one.refuted for one in found))


if __name__ == "__main__":
    raise SystemExit(main())

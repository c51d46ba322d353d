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

HEAD = f"{'setting':<22}{'claimed':>9}{'bound':>9}{'share':>8}{'noise':>9}{'canaries':>10}{'seconds':>9}"


def line(found: Finding) -> str:
    """Of the table."""
    text = (
        f"{found.setting:<22}{found.claimed:9.3f}{found.bound:9.3f}{found.bound / found.tight:8.3f}"
    )
    text += f"{found.noise:9.3f}{found.canaries:10}{found.seconds:9.1f}"
    return text + ("   REFUTED" if found.refuted else "")


def main(arguments: list[str] | None = None) -> int:
    """Audit, print the table, write JSON where it is asked for; 1 if a claim was refuted."""
    parser = argparse.ArgumentParser(prog="python -m fastclip.audit", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[s.name for s in SETTINGS])
    parser.add_argument("--canaries", type=int, default=100_000)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--significance", type=float, default=0.05, help="of each bound (0.05)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # every run would tell of its settings
    print(f"lower bounds at {1 - options.significance:.1%} on epsilon at delta {options.delta:g}")
    print(HEAD, flush=True)
    found = []
    for setting in SETTINGS:
        if options.only is None or setting.name in options.only:
            found.append(
                audit(
                    setting, canaries=options.canaries, delta=options.delta,
                    significance=options.significance,
                )
            )  # fmt: skip
            print(line(found[-1]), flush=True)
    print(
        "share: of the tight epsilon of what is claimed; noise: p-value of the noise under its law.\n"
        "The bound assumes that noise is independent from entry to entry, which is claimed, and looked at."
    )
    if options.json is not None:
        made = {"python": platform.python_version(), "torch": torch.__version__}
        result = {
            "made with": made,
            "findings": [asdict(one) | {"refuted": one.refuted} for one in found],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(one.refuted for one in found))


if __name__ == "__main__":
    raise SystemExit(main())

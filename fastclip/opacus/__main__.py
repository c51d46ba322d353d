"""Runs a program that uses Opacus on fastclip's engine: python -m fastclip.opacus script.py ...

`-m module ...` runs a module. fastclip.opacus.install() runs before the program begins, and in the
processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from fastclip.opacus import children
from fastclip.opacus.installation import install


def main(arguments: list[str]) -> None:
    """Runs the program with its own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m fastclip.opacus", allow_abbrev=False,
        description="Run an unchanged program that imports opacus with fastclip's engine instead.",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", dest="settings",
        help="a default keyword of every make_private: --set clipping=automatic "
        "--set gamma=0.0 --set model_loss=per_sample",
    )  # fmt: skip
    parser.add_argument(
        "program", nargs=argparse.REMAINDER,
        help="script.py, or -m module; and the program's own arguments",
    )  # fmt: skip
    given, rest = parser.parse_known_args(arguments)
    program = [*rest, *given.program]
    if not program or program == ["-m"] or (program[0] != "-m" and program[0].startswith("-")):
        parser.error(f"no program to run in {arguments}: name a script, or -m and a module")
    defaults = dict(given.settings)
    install(**defaults)
    children.include(defaults)
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, "")
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"expects NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    main(sys.argv[1:])

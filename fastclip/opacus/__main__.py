"""A program that uses Opacus, on this engine: python -m fastclip.opacus script.py ..., or -m module ...

Opacus' names are this engine's before the program begins (fastclip.opacus.install()), and in the
processes that it starts.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from fastclip.opacus import children
from fastclip.opacus.installation import install

_USAGE = "usage: python -m fastclip.opacus (script.py | -m module) [arguments of the program]"


def main(arguments: list[str]) -> None:
    """Run the program with its own arguments."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(_USAGE)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    install()
    children.include()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

"""One run of one program: `python -m bench.clients.once NAME [--tiny]`, or the same behind
fastclip.opacus.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
import warnings

import numpy
import torch

from bench.clients.clock import Clock
from bench.processes import report

SEED = 17


def measure(name: str, tiny: bool) -> dict:
    """Run it in an empty folder; its numbers, and whose engine it has found."""
    program = importlib.import_module(f"bench.clients.programs.{name}")
    torch.set_num_threads(1)
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    warnings.simplefilter("ignore")
    sys.path.insert(0, os.getcwd())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        clock = Clock()
        found = program.main(tiny)
        measured = clock.read()
        os.chdir("/")
    opacus = sys.modules["opacus"]
    return {**measured, **found, "engine": opacus.PrivacyEngine.__module__.partition(".")[0]}


def main(arguments: list[str]) -> None:
    """Run and report."""
    name, *options = arguments
    report(lambda: measure(name, "--tiny" in options))


if __name__ == "__main__":
    main(sys.argv[1:])

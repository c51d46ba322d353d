"""`python -m tests.conformance`: all of Opacus' cases, and the table of what became of them.

Further arguments are pytest's: `-n 2`, `-k Text`, `--durations=10`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.conformance.summary import Summary


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    here = str(Path(__file__).parent)
    return int(pytest.main([here, "--tb=short", *arguments], plugins=[Summary()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every kernel compiles for Ampere and Hopper, within a block's shared memory, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(*options: str) -> list[dict]:
    """A line for each kernel and architecture, from a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_for_gpu", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(entries: list[dict]) -> None:
    assert {entry["kernel"].split()[-1] for entry in entries} == {"sm_80", "sm_90"}
    for entry in entries:
        assert entry["shared"] <= entry["most"], entry


def test_first_configurations() -> None:
    check(compiled())


@pytest.mark.slow
def test_every_configuration() -> None:
    check(compiled("--all"))

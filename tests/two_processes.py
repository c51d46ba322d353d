"""Two processes of a group (gloo), each running a module of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_two(module: str, folder: Path) -> None:
    """Run `module RANK FOLDER` as ranks 0 and 1; what one of them says is shown where it fails."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in started:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()

"""Runs one measurement in a fresh process, so no run inherits another's memory or caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.measure import first_line

ROOT = Path(__file__).resolve().parents[1]
MARK = "result:"


def run_module(
    module: str, arguments: Sequence[str], timeout: float = 1800.0, show_progress: bool = False,
    variables: Mapping[str, str] | None = None,
) -> dict:  # fmt: skip
    """`python -m module arguments` from the repository root; the dictionary that it reported.

    Args:
        module: run as a script; it calls `report`.
        arguments: its command line.
        timeout: seconds until it is killed.
        variables: environment variables, in addition to those of this process.
        show_progress: pass its standard error, with tqdm's bars, to the terminal.

    Returns:
        The child's `report`, or {"error", "detail"} if it died without one.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= variables or {}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=None if show_progress else subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"TimeoutExpired: no result after {timeout:.0f} s", "detail": ""}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line[len(MARK) :])
    reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
    last = (done.stderr or "").strip().splitlines()[-1:]
    return {"error": f"ProcessDied: {reason}", "detail": " ".join(last)}


def frames(error: BaseException) -> str:
    """The innermost calls, file names alone: results are shared, the machine's folders are not."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)


def report(measure: Callable[[], dict]) -> None:
    """In the child: run `measure` and print its dictionary, or its exception, as one JSON line."""
    try:
        result = measure()
    except Exception as error:
        result = {"error": first_line(error), "detail": frames(error)}
    print(MARK + json.dumps(result), flush=True)

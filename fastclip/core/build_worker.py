"""A separate process that compiles by a plan: `python -I -S build_worker.py PLAN LOCK`.

It imports neither fastclip nor torch. A library gets its name only when it is complete and was tried. If
this process is killed, it leaves nothing that would be loaded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_KEPT = 100
"""Lines kept from a compiler that failed."""
_LONGEST = 3600.0
"""Maximal seconds of one command."""


class _Failed(Exception):
    """The output of a failed command."""


def run(command: Sequence[str], lock: int) -> None:
    """Runs one command in the build folder, which holds the lock too while it runs."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[lock], env={**os.environ, "LC_ALL": "C"}, timeout=_LONGEST, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Failed(f"{shlex.join(command)}\n{error}") from error
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").splitlines()[-_KEPT:]
        raise _Failed("\n".join([shlex.join(command), *said, f"exit status {done.returncode}"]))


def make(module: dict[str, Any], jobs: int, lock: int) -> None:
    """Compiles one module, or leaves a log of the failure."""
    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda command: run(command, lock), module["units"]))
        for command in module["whole"]:
            run(command, lock)
        put(Path(module["made"]), Path(module["library"]))
        Path(module["log"]).unlink(missing_ok=True)
    except _Failed as failed:
        part = Path("log")
        part.write_text(f"{module['tried']}\n{failed}\n")
        put(part, Path(module["log"]))


def put(part: Path, final: Path) -> None:
    """Renames a file to its final name after it is on the disk."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, final)


def main(plan: str, lock: str) -> None:
    """Detaches, and compiles at the lowest priority."""
    if os.fork():
        os._exit(0)  # the parent need not wait
    os.nice(19)
    os.umask(0o077)
    folder = Path(plan).parent
    os.chdir(folder)
    try:
        found = json.loads(Path(plan).read_text())
        for module in found["modules"]:
            make(module, found["jobs"], int(lock))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

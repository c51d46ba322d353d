"""Parts of a fault that need a process of their own: forks of this one, which has loaded everything."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

WELL = 0


def forked(work: Callable[[], None], said: Path) -> int:
    """Begin `work` in a fork, in a process group of its own; its number.

    What it prints is lost; an error that it ends with is written to the file `said`.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        sys.setprofile(None)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        work()
        code = WELL
    except BaseException as error:
        said.write_text("".join(traceback.format_exception(error)))
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for it; its exit code, or minus the signal that ended it. What it has started ends, too."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # loader workers
    return code


def in_fork(work: Callable[[], None], said: Path) -> None:
    """Run `work` in a fork, to its end.

    Raises:
        RuntimeError: it did not end well; the message is the last line of what it said.
    """
    code = ended(forked(work, said))
    if code != WELL:
        lines = said.read_text().strip().splitlines() if said.exists() else []
        raise RuntimeError(f"a process ended with {code}: {' '.join(lines[-1:])}")

"""A child process that reports messages as it runs, with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from bench.processes import MARK, ROOT

KEPT_LINES = 30


class Child:
    """Runs `python *arguments` from the repository root, in its own process group.

    Lines after `MARK` are its messages, in JSON (`tell`). The last lines of other output are kept in
    `said`. It is killed, with every process that it started, when the block or this program ends.

    Args:
        arguments: arguments of the interpreter: ["-m", module, ...].
        environment: variables to set; None removes one.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str | None] | None = None
    ) -> None:
        variables: dict[str, str | None] = {
            **os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1", **(environment or {}),
        }  # fmt: skip
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._messages: queue.Queue[dict | None] = queue.Queue()
        self.said: deque[str] = deque(maxlen=KEPT_LINES)
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self.kill)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                with contextlib.suppress(json.JSONDecodeError):  # cut off by the child's death
                    self._messages.put(json.loads(line[len(MARK) :]))
            else:
                self.said.append(line.rstrip())
        self._messages.put(None)

    def send(self, job: Mapping) -> None:
        """Sends one JSON line to its standard input, and closes it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `message` will say so
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.close()

    def message(self, limit: float) -> dict | None:
        """Returns its next message, or None if it has ended.

        Raises:
            TimeoutError: there was none within `limit` seconds.
        """
        try:
            return self._messages.get(timeout=max(limit, 0.0))
        except queue.Empty:
            raise TimeoutError(f"no answer within {limit:.0f} s") from None

    def wait(self, limit: float) -> bool:
        """Whether it ended within `limit` seconds."""
        try:
            self._process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> dict[str, str]:
        """The reason why it ended, for the report: {"error", "detail"}."""
        self.wait(5.0)
        code = self._process.returncode
        reason = "it does not end" if code is None else f"exit {code}"
        if code is not None and code < 0:
            reason = f"signal {-code}"
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        return {"error": f"ProcessDied: {reason}", "detail": " ".join(last)}

    def kill(self) -> None:
        """Ends it and all that it started; ninja gives its compilers their own process groups."""
        with contextlib.suppress(psutil.Error):
            for started in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    started.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(10.0)  # a driver may hold it for longer; the limits of others must hold
        atexit.unregister(self.kill)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._errors.close()


def tell(message: Mapping) -> None:
    """Sends one message from the child to the parent."""
    print(MARK + json.dumps(message), flush=True)


def job() -> dict:
    """Returns, in the child, what the parent sent."""
    return json.loads(sys.stdin.readline() or "{}")


def write(path: Path, content: Mapping) -> None:
    """Writes JSON to `path` atomically, so a reader never finds half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)

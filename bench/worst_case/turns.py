"""Where a turn of a search runs: in this process, or in one whose Triton interprets its kernels.

Triton asks for its interpreter when it is imported, so those targets have a process of their own. It
takes one request a line and answers each by one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from bench.processes import MARK, ROOT
from bench.worst_case.search import Search, replayed
from bench.worst_case.targets import TARGETS


def turn(request: Mapping[str, Any]) -> Any:
    """What one request comes to.

    Args:
        request: target; and seconds, seed and found of a search, or replay, the findings to be made
            again.
    """
    target = TARGETS[request["target"]]
    if "replay" in request:
        return [*replayed(target, request["replay"])]
    search = Search(target, request["seed"], request["found"])
    return search.run(request["seconds"])


class Turns:
    """Runs requests where they belong; the process that interprets is started when it is needed."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __call__(self, request: Mapping[str, Any]) -> Any:
        """What the request comes to.

        Raises:
            RuntimeError: the other process has died.
        """
        if not TARGETS[request["target"]].interpreted:
            return turn(request)
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        for line in child.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError(f"the process that interprets kernels ended with {child.wait()}")

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "bench.worst_case.turns"], cwd=ROOT, text=True,
                env={**os.environ, "TRITON_INTERPRET": "1"}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
        return self._child

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._child is not None:
            assert self._child.stdin is not None
            if error is None:
                self._child.stdin.close()  # its loop ends
            else:
                self._child.kill()
            self._child.wait()


def _answer() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(MARK + json.dumps(turn(json.loads(line))), flush=True)


if __name__ == "__main__":
    _answer()

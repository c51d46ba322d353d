"""examples.distributed under torchrun, of which one rank is killed once, in the middle of an epoch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from examples import distributed
from fastclip.engine.optimizer import FastDPOptimizer

FATAL = 5


def main(arguments: list[str]) -> None:
    """One rank, of the first start or the second; the last argument is the checkpoint."""
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(f"{arguments[-1]}.{start}").touch()
    plain, taken = FastDPOptimizer.step, []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        if len(taken) == FATAL:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args, **kwargs)

    if (start, os.environ["RANK"]) == ("0", "1"):
        FastDPOptimizer.step = step  # type: ignore[method-assign]
    distributed.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

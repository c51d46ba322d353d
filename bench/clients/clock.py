"""When each optimizer step ends, seen from outside: the program knows nothing of it."""

from __future__ import annotations

import resource
import statistics
import time
from itertools import pairwise
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.measure import PeakMemory

FIRST = 3
"""Steps that are traced, or nearly: what comes before the end of the third is the start."""


def cpu() -> float:
    """CPU seconds of this process and of children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


class Clock:
    """Runs from its making on.

    Both engines end a private step with a call of the program's own optimizer; torch tells of it.
    Virtual steps of a BatchMemoryManager are parts of the step that they lead to.
    """

    def __init__(self) -> None:
        self._wall, self._cpu, self._memory = time.perf_counter(), cpu(), PeakMemory()
        self._steps: list[tuple[float, float]] = []
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._steps.append((time.perf_counter(), time.process_time()))

    def read(self) -> dict[str, Any]:
        """Seconds of the run and of its median step, by the wall and by the CPU."""
        wall, used = time.perf_counter() - self._wall, cpu() - self._cpu
        self._handle.remove()
        found: dict[str, Any] = {
            "steps": len(self._steps),
            "run": {"wall": wall, "cpu": used},
            "memory_mib": self._memory.above_start() / 2**20,
        }
        if len(self._steps) > FIRST:
            found["start"] = {"wall": self._steps[FIRST - 1][0] - self._wall}
            later = self._steps[FIRST - 1 :]
            for which, name in enumerate(("wall", "cpu")):
                times = [b[which] - a[which] for a, b in pairwise(later)]
                found.setdefault("step", {})[name] = statistics.median(times)
                found.setdefault("least_step", {})[name] = min(times)
        return found

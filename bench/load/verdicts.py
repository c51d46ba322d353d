"""What a case of load says: figures, each beside the limit that it must not pass."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil

from bench.measure import MIB


def verdict(what: str, value: float, limit: float, unit: str = "") -> dict[str, Any]:
    """One figure and its limit.

    Args:
        what: is measured. value: as measured. limit: largest value that passes. unit: of both.
    """
    return {
        "what": what, "value": round(float(value), 4), "limit": limit, "unit": unit,
        "holds": bool(value <= limit),
    }  # fmt: skip


def handles() -> int:
    """Open files, sockets and pipes of this process."""
    return psutil.Process().num_fds() if os.name == "posix" else psutil.Process().num_handles()


class Curve:
    """Samples of this process along a run: memory, handles, objects, and the time of a step."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {
            key: [] for key in ("step", "rss_mib", "handles", "objects", "step_ms")
        }
        self._times: list[float] = []
        self._last = time.perf_counter()

    def tick(self) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now

    def sample(self, step: int) -> None:
        """Note what the process holds, and the median time of the steps since the last sample."""
        gc.collect()
        found = {
            "step": step,
            "rss_mib": round(psutil.Process().memory_info().rss / MIB, 2),
            "handles": handles(),
            "objects": len(gc.get_objects()),
            "step_ms": round(statistics.median(self._times or [0.0]) * 1e3, 4),
        }
        for key, value in found.items():
            self.samples[key].append(value)
        self._times.clear()
        self._last = time.perf_counter()

    def verdicts(self) -> list[dict[str, Any]]:
        """Growth from the middle of the run to its end, and drift of the step's time."""
        memory, open_files, objects = (self.samples[k] for k in ("rss_mib", "handles", "objects"))
        return [
            verdict("memory grown in the second half", _grown(memory), 4.0, "MiB"),
            verdict("handles grown in the second half", _grown(open_files), 0),
            verdict("objects grown in the second half", _grown(objects), 200),
            verdict(
                "step's time, last tenth over second", _drift(self.samples["step_ms"]), 1.5, "x"
            ),
        ]


def _tenth(values: Sequence[float], number: int) -> float:
    """Median of one tenth of the values, counted from 0."""
    size = max(len(values) // 10, 1)
    return statistics.median(values[number * size : (number + 1) * size] or values[-size:])


def _grown(values: Sequence[float]) -> float:
    return _tenth(values, 9) - _tenth(values, 5)


def _drift(values: Sequence[float]) -> float:
    return _tenth(values, 9) / _tenth(values, 1)

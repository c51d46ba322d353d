"""Measures memory of this process, and describes the machine and the libraries."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

MIB = 2**20


class PeakMemory:
    """Peak resident memory of this process above what it held when this object was made.

    `resource.getrusage().ru_maxrss` is not used: on Linux it survives fork and exec, so a
    child starts at its parent's peak. The kernel's VmHWM belongs to the new address space, and
    writing 5 to /proc/self/clear_refs resets it to the present. Where that file is missing (not
    Linux) or refuses, a thread samples the resident size every 2 ms; `method` says which.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._sampled = 0
        self._stop = threading.Event()
        self.method = "VmHWM"
        try:
            Path("/proc/self/clear_refs").write_text("5")
            _high_water_mark()
        except (OSError, ValueError):
            self.method = "sampled"
            threading.Thread(target=self._sample, daemon=True).start()
        self.start = self._process.memory_info().rss  # bytes

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._sampled = max(self._sampled, self._process.memory_info().rss)

    def above_start(self) -> int:
        """Bytes of the peak so far above the start; ends the measurement."""
        if self.method == "VmHWM":
            return _high_water_mark() - self.start
        self._stop.set()
        return max(self._sampled, self._process.memory_info().rss) - self.start


def _high_water_mark() -> int:
    """VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no VmHWM in /proc/self/status")


class CpuWait:
    """Share of the time since this object was made in which some process waited for a core.

    From Linux' pressure stall information, over the whole machine (a container's view of it may
    be its host's): near 0 on a quiet machine. A benchmark that ran under pressure measured its
    neighbours too, the worse the more threads have to meet at barriers.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stalled = _cpu_stall()

    def share(self) -> float | None:
        """Between 0 and 1, or None if the kernel does not report it."""
        stalled = _cpu_stall()
        if stalled is None or self._stalled is None:
            return None
        return min((stalled - self._stalled) / (time.perf_counter() - self._start), 1.0)


def _cpu_stall() -> float | None:
    """Seconds since boot in which some process waited for a core."""
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return int(some.rsplit("total=", 1)[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def is_busy(share: float | None) -> bool:
    """Whether a `CpuWait.share` is too large to trust a time (quiet: 0.02, a neighbour: 0.9)."""
    return share is not None and share > 0.1


def busy_warning(runs: Iterable[tuple[str, float | None]]) -> str | None:
    """A sentence for the report that names the runs on a busy machine; None if there were none."""
    names = dict.fromkeys(name for name, share in runs if is_busy(share))
    if not names:
        return None
    return (
        f"CAUTION: other programs were busy during {', '.join(names)}: "
        "those times are too long and their ratios unreliable; memory is not affected."
    )


def machine() -> dict[str, object]:
    """Name and size of this machine: processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Installed versions of the libraries that decide the result."""
    found = {}
    for name in ("torch", "opacus", "transformers", "fastclip"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def now() -> str:
    """The present, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def heading(module: str, arguments: Sequence[str] | None) -> dict[str, object]:
    """What every file of results begins with: the command, the date and the versions.

    Args:
        module: that was run. arguments: of its `main`; None: those of this process.
    """
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    return {
        "command": f"python -m {module} {given}".strip(),
        "date": now(),
        "versions": versions(),
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile of one value or more."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, q2, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, q2, q3


def first_line(error: BaseException) -> str:
    """`Type: first line of the message`, for reports of expected errors."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""Times functions side by side on a device.

Each repetition empties the cache, lets the CPU run ahead of the device, and puts a stamp before and
after the function; what counts is the time between the stamps on the device. The functions take
turns, so that a card that slows down slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.measure import first_line, quartiles

_LONGEST_LEAD = 0.005  # seconds the device is held back, so that launches queue up
_CYCLES_PER_SECOND = 2.0e9  # no card is faster by much; slower ones wait a little longer


class CpuClock:
    """The CPU: stamps are times."""

    device = torch.device("cpu")

    def stamp(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return end - start

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def hold_back(self, seconds: float) -> None: ...

    def release_memory(self) -> None: ...


class CudaClock(CpuClock):
    """An NVIDIA GPU: stamps are events in the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch: torch.Tensor | None = None

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3  # milliseconds

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Write 256 MiB, several times the L2 of any card."""
        if self._scratch is None:
            self._scratch = torch.empty(256 << 20, dtype=torch.int8, device=self.device)
        self._scratch.zero_()

    def hold_back(self, seconds: float) -> None:
        """Spin on the device, so that what comes next is queued before it starts."""
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))

    def release_memory(self) -> None:
        self._scratch = None
        torch.cuda.empty_cache()


def clock_for(device: torch.device) -> CpuClock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class _Run:
    """The measurements of one function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.seconds: list[float] = []
        self.host: list[float] = []
        self.repetitions = 0
        self.error: str | None = None

    def once(self, clock: CpuClock, lead: float) -> tuple[float, float]:
        """Seconds on the device, and seconds until the call returned."""
        clock.empty_cache()
        clock.hold_back(lead)
        start = clock.stamp()
        called = time.perf_counter()
        self.function()
        host = time.perf_counter() - called
        end = clock.stamp()
        clock.synchronize()
        return clock.seconds(start, end), host

    def failed(self, clock: CpuClock, error: Exception) -> None:
        self.error = first_line(error)
        if isinstance(error, torch.OutOfMemoryError):
            clock.release_memory()

    def report(self) -> dict:
        if self.error is not None:
            return {"error": self.error}
        return {
            "seconds": list(quartiles(self.seconds)),
            "host_s": statistics.median(self.host),
            "repetitions": len(self.seconds),
        }


def time_functions(
    clock: CpuClock,
    functions: Mapping[str, Callable[[], Any]],
    budget: float,
    least: int = 5,
    most: int = 50,
) -> dict[str, dict]:
    """Time every function, in turns.

    Args:
        clock: of the device. functions: by name; what they return is dropped.
        budget: seconds of measuring, shared evenly.
        least, most: repetitions whatever the budget (3 where one takes half a second).

    Returns:
        name -> {"seconds": [first quartile, median, third], "host_s": median time until the call
        returned, "repetitions"}, or {"error"} where it failed.
    """
    runs = {name: _Run(function) for name, function in functions.items()}
    for run in runs.values():
        try:
            run.once(clock, 0.0)  # compiles, tunes, fills allocator pools
            begin = time.perf_counter()
            _, host = run.once(clock, 0.0)
            whole = max(time.perf_counter() - begin, 1e-6)
        except Exception as error:
            run.failed(clock, error)
            continue
        run.host.append(host)
        run.repetitions = max(least, min(most, int(budget / len(runs) / whole)))
        if whole > 0.5:  # minutes are short
            run.repetitions = min(run.repetitions, 3)
    for turn in range(most):
        for run in runs.values():
            if run.error is not None or turn >= run.repetitions:
                continue
            lead = min(1.5 * statistics.median(run.host) + 2e-5, _LONGEST_LEAD)
            try:
                seconds, host = run.once(clock, lead)
            except Exception as error:
                run.failed(clock, error)
                continue
            run.seconds.append(seconds)
            run.host.append(host)
    return {name: run.report() for name, run in runs.items()}


def ceilings(clock: CpuClock) -> dict[str, Any]:
    """What this device reaches now: TFLOP/s of a large matmul of random data, GB/s of a large copy.

    Returns:
        "matmul_tflops": type -> rate, float32 in full precision; "copy_gbps": bytes read and
        written; "matmul_size", "copy_bytes": of the operands; or "error" in place of a rate.
    """
    on_gpu = clock.device.type == "cuda"
    n, nbytes = (8192, 4 << 30) if on_gpu else (256, 16 << 20)
    found: dict[str, Any] = {"matmul_size": n, "copy_bytes": nbytes, "matmul_tflops": {}}
    generator = torch.Generator(clock.device).manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, y = (
            torch.randn(n, n, generator=generator, device=clock.device).to(dtype) for _ in range(2)
        )
        row = time_functions(clock, {"matmul": lambda x=x, y=y: x @ y}, 0.5)["matmul"]
        rate = row.get("error") or 2 * n**3 / row["seconds"][1] / 1e12
        found["matmul_tflops"][str(dtype).removeprefix("torch.")] = rate
        del x, y
    source = torch.randint(127, (nbytes,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    row = time_functions(clock, {"copy": lambda: target.copy_(source)}, 0.5)["copy"]
    found["copy_gbps"] = row.get("error") or 2 * nbytes / row["seconds"][1] / 1e9
    clock.release_memory()
    return found

"""Profiles a step on the device: its kernels, their load, the plan and the configurations.

Kernels are read from the trace that torch.profiler exports. It says for each event whether it is a
kernel, a copy or an annotation.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.kernels import tuning

TOP, STEPS = 40, 3
LONGEST = 160  # characters of a kernel's name
KERNEL, MOVES = "kernel", ("gpu_memcpy", "gpu_memset")
OPERATOR = "cpu_op"  # used instead of kernels without a GPU


def profiled(step: Callable[[], Any], device: torch.device, steps: int = STEPS) -> dict[str, Any]:
    """Run a step `steps` times under the profiler.

    Returns:
        what `summarise` finds in the trace. On a CPU operators stand for kernels, nested ones too.
    """
    on_gpu = device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[kind]) as record:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return summarise(events, steps, KERNEL if on_gpu else OPERATOR)


def summarise(events: Iterable[Mapping], steps: int, kind: str = KERNEL) -> dict[str, Any]:
    """A trace's kernels, over `steps` steps.

    Args:
        events: of a Chrome trace, microseconds. kind: category of what counts as a kernel.

    Returns:
        a step's "launches" (kernels), "moves" (copies and fills by the copy engine), "busy_s"
        (seconds in which a kernel, copy or fill ran), "kernel_s" (their sum), and "kernels": the 40
        that take the most, with "name", "calls" and "seconds" a step, "share" of all kernels.
    """
    spans: list[tuple[float, float]] = []
    found: dict[str, list[float]] = {}
    moves = 0
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in (kind, *MOVES):
            continue
        start, length = float(event["ts"]), float(event.get("dur", 0.0))
        spans.append((start, start + length))
        if category == kind:
            found.setdefault(str(event["name"]), []).append(length)
        else:
            moves += 1
    total = sum(map(sum, found.values()))
    order = sorted(found, key=lambda name: -sum(found[name]))
    return {
        "profiled_steps": steps, "counted": kind,
        "launches": sum(map(len, found.values())) / steps, "moves": moves / steps,
        "busy_s": union(spans) / 1e6 / steps, "kernel_s": total / 1e6 / steps,
        "kernels": [
            {
                "name": name[:LONGEST], "calls": len(found[name]) / steps,
                "seconds": sum(found[name]) / 1e6 / steps,
                "share": sum(found[name]) / total if total else 0.0,
            }
            for name in order[:TOP]
        ],
    }  # fmt: skip


def union(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what intervals cover together: streams overlap."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(last - max(first, end), 0.0)
        end = max(end, last)
    return covered


def plan_of(optimizer: Any) -> list[dict[str, Any]]:
    """The norm method of each layer in the last pass of a private optimizer, one row per layer."""
    grad_state = optimizer.grad_state
    return [
        {"layer": row.path, "rule": row.rule, "input": row.shape, "norm": row.method,
         "held_bytes": row.nbytes}
        for row in grad_state.plan_log.plan().rows
    ]  # fmt: skip


def chosen_configurations() -> list[dict[str, Any]]:
    """The configurations that Triton chose in this process, one row per kernel and kind of arguments.

    Returns:
        "kernel", "arguments" (the search's key), "configuration", and "ms" of all that were tried
        since `tuning.anew`. Empty in the interpreter, which does not search.
    """
    rows = []
    for name, tuned in tuned_kernels():
        if tuned.search is None:
            continue
        keys = list(getattr(tuned.search, "keys", ()))
        for key, config in tuned.search.cache.items():
            named = dict(zip(keys, key, strict=False))
            rows.append({"kernel": name, "arguments": {k: str(v) for k, v in named.items()},
                         "configuration": str(config),
                         "ms": tuning.times(tuned.search, key)})  # fmt: skip
    return rows


def tuned_kernels() -> list[tuple[str, Any]]:
    """(name, kernel) of kernels with several configurations; none without Triton."""
    try:
        package = importlib.import_module("fastclip.ops.triton")
    except ImportError:
        return []
    found: dict[int, tuple[str, Any]] = {}
    for module in pkgutil.iter_modules(package.__path__, "fastclip.ops.triton."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "configs") and hasattr(value, "search"):
                short = module.name.rpartition(".")[2]
                found.setdefault(id(value), (f"{short}.{name}", value))
    return sorted(found.values(), key=lambda pair: pair[0])

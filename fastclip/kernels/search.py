"""The search for a kernel's fastest configuration, which a model's first step waits for.

A few trials tell slow configurations from fast ones: as many as take `_ENOUGH`, where Triton's own way
takes 125 ms for each, and a ResNet-50 has a hundred searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from fastclip.waiting import Work

_ENOUGH = 8.0
"""Milliseconds of trials of one configuration."""
_FEWEST, _MOST = 2, 20
_CACHE = 256 << 20
"""Bytes written before each trial: more than any L2 holds, so that operands come from memory, and so
many that the host is ahead of the device."""
_TRYING = Work("tries configurations of kernels")


def search(kernel: Any, configs: list[triton.Config], key: list[str], prune: Any) -> Any:
    """triton.autotune of the kernel; what it finds is kept on disk where Triton can."""

    def measured(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        with _TRYING.bit(kernel.__name__):
            return trials(call, quantiles)

    options: dict[str, Any] = {"do_bench": measured}
    if prune is not None:
        options["prune_configs_by"] = {"early_config_prune": prune}
    try:
        return triton.autotune(configs, key, cache_results=True, **options)(kernel)
    except TypeError:  # a Triton that keeps no cache
        return triton.autotune(configs, key, **options)(kernel)


def trials(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds that a launch takes, at these quantiles.

    Args:
        call: launches it; the first time compiles it.
    """
    call()
    times = _timed(call, _FEWEST)
    enough = int(_ENOUGH / max(min(times), 1e-3))
    times += _timed(call, min(enough, _MOST) - len(times))
    times.sort()
    return [times[round(q * (len(times) - 1))] for q in quantiles]


def _timed(call: Callable[[], Any], times: int) -> list[float]:
    """Milliseconds of so many calls."""
    written = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(times):
        written.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]

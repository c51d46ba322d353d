"""How Triton's autotuner behaves in a benchmark run, which has minutes for hundreds of searches.

`short`: fewer repetitions of each configuration. `compile_only`: every configuration is compiled
and launched once, none is timed, nothing is remembered but the compiled code on disk: what several
processes do ahead, so that the one that measures finds it. `first_config`: no search; for the tests.
Each patches triton's Autotuner (3.2 and newer) for the rest of the process; without triton they do
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _autotuner() -> Any:
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return None
    return Autotuner


def _once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
    call()
    return [0.0, 0.0, 0.0]


def _not_remembered(self: Any, key: Any, configs: Any, search: Callable[[], Any]) -> bool:
    search()
    return False


def short(warmup: int = 5, rep: int = 30) -> None:
    """Time each configuration for `rep` milliseconds after `warmup`."""
    if (tuner := _autotuner()) is None:
        return

    def bench(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        from triton.testing import do_bench

        return do_bench(call, warmup=warmup, rep=rep, quantiles=quantiles)

    tuner.do_bench = property(lambda self: bench)


def compile_only() -> None:
    """Launch every configuration once; keep no choice."""
    if (tuner := _autotuner()) is None:
        return
    tuner.do_bench = property(lambda self: _once)
    tuner.check_disk_cache = _not_remembered


def first_config() -> None:
    """Take the first configuration that pruning leaves."""
    if (tuner := _autotuner()) is None:
        return
    compile_only()
    prune = tuner.prune_configs

    def first(self: Any, *args: Any, **kwargs: Any) -> list:
        return list(prune(self, *args, **kwargs))[:1]

    tuner.prune_configs = first

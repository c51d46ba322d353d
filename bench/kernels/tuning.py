"""How Triton's autotuner behaves in a benchmark run.

`anew`: a choice serves this process alone: what another batch size found, here or on disk, must not
decide what is timed. `forget`: search again.
`compile_only`: every configuration is compiled and launched once, none is timed, nothing is
remembered but the compiled code on disk: what several processes do ahead, so that the one that
measures finds it. `first_config`: no search; for the tests. Each patches triton's Autotuner (3.2 and
newer) for the rest of the process; without triton they do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
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
    self.__dict__.setdefault("times", {})[key] = self.configs_timings
    return False


def times(search: Any, key: Any) -> dict[str, float]:
    """Milliseconds of all configurations tried since `anew` for this key, the fastest first."""
    tried = getattr(search, "times", {}).get(key, {})
    median = {str(config): found[0] for config, found in tried.items()}
    return dict(sorted(median.items(), key=lambda pair: pair[1]))


SEARCHED = {"trials": 0, "search_s": 0.0}
"""Configurations tried since `anew`, and seconds that took, compiling included."""


def anew() -> None:
    """Nothing on disk decides; the times of all configurations are kept."""
    if (tuner := _autotuner()) is None:
        return
    tuner.check_disk_cache = _not_remembered
    from fastclip.ops.triton import runtime

    trials = runtime.trials

    def counted(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        begin = time.perf_counter()
        try:
            return trials(call, quantiles)
        finally:
            SEARCHED["trials"] += 1
            SEARCHED["search_s"] += time.perf_counter() - begin

    runtime.trials = counted


def forget(kernels: Iterable[Any]) -> None:
    """Let the next launch of each of these tuned kernels search, whatever an earlier one found."""
    for kernel in kernels:
        if kernel.search is not None:
            kernel.search.cache.clear()


def compile_only(share: tuple[int, int] = (0, 1)) -> None:
    """Launch every configuration once, or of (k, n) the k-th and every n-th after it; keep no
    choice."""
    if (tuner := _autotuner()) is None:
        return
    tuner.do_bench = property(lambda self: _once)
    tuner.check_disk_cache = _not_remembered
    _take(tuner, lambda configs: configs[share[0] :: share[1]] or configs[:1])


def first_config() -> None:
    """Take the first configuration that pruning leaves."""
    if (tuner := _autotuner()) is None:
        return
    compile_only()
    _take(tuner, lambda configs: configs[:1])


def _take(tuner: Any, part: Callable[[list], list]) -> None:
    """Of the configurations that pruning leaves, a part."""
    prune = tuner.prune_configs

    def pruned(self: Any, *args: Any, **kwargs: Any) -> list:
        return part(list(prune(self, *args, **kwargs)))

    tuner.prune_configs = pruned

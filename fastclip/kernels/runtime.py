"""What every kernel needs: where it can run, how it is launched and tuned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run on the CPU, in Triton's interpreter (set before triton is imported)."""
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
Prune = Callable[..., list[triton.Config]]
"""(configs, arguments by name, **options) -> those that suit the arguments: `early_config_prune`."""


def runs_on(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: one device, an NVIDIA GPU or the interpreter's CPU,
    and types that accumulate in float32 (float64 stays with the reference)."""
    first = tensors[0].device
    if any(x.device != first for x in tensors):
        return False
    if any(x.is_floating_point() and x.dtype not in INPUTS for x in tensors):
        return False
    return first.type == "cuda" or (first.type == "cpu" and INTERPRETED)


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """triton.jit for a kernel that is launched: `launched(f)[grid](...)` runs where its tensors lie.

    Functions that only kernels call are plain triton.jit. options: of triton.jit.
    """
    if function is None:
        return lambda function: Launched(triton.jit(function, **options))
    return Launched(triton.jit(function))


class Launched:
    """A kernel whose device is that of its tensors: Triton itself takes the current device, where
    the address of another GPU's memory is wrong, and its current stream."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _device_of(args):
                self.run(grid, args, kwargs)

        return launch

    def run(self, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """One launch on the current device."""
        self.kernel[grid](*args, **kwargs)


def _device_of(args: tuple) -> AbstractContextManager:
    first = next(x for x in args if isinstance(x, Tensor))
    return torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext()


def autotuned(
    configs: Sequence[triton.Config], key: Sequence[str], prune: Prune | None = None
) -> Callable[[Launched], Tuned]:
    """A small search for the fastest configuration, once a key; cached on disk where Triton can.

    A trial runs on the real arguments, so a kernel only stores (it never adds to what is there), and
    whoever reads what it stored reads no more than the configuration of the last launch has written.

    Which configuration is fastest differs from machine to machine, and from search to search, and
    with it the last bits of a result. torch.use_deterministic_algorithms(True) stops the search: the
    first configuration that suits the arguments is taken then, as in the interpreter.

    Args:
        configs: the search space, the best guess first. key: names of arguments whose value starts
            a new search. prune: leaves the configurations that suit the arguments.
    """
    return lambda kernel: Tuned(kernel.kernel, list(configs), list(key), prune)


class Tuned(Launched):
    """A kernel that is launched with one of several configurations."""

    def __init__(
        self, kernel: Any, configs: list[triton.Config], key: list[str], prune: Prune | None
    ) -> None:
        super().__init__(kernel)
        self.configs, self.prune = configs, prune
        self.search = None if INTERPRETED else _search(kernel, configs, key, prune)

    def usable(self, args: tuple, kwargs: dict[str, Any]) -> list[triton.Config]:
        """The configurations that suit the arguments of a launch, the best guess first."""
        if self.prune is None:
            return self.configs
        return self.prune(
            self.configs, dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs
        )

    def run(self, grid: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """One launch, which a search may precede."""
        if self.search is None or torch.are_deterministic_algorithms_enabled():
            self.run_with(self.usable(args, kwargs)[0], grid, args, kwargs)
        else:
            self.search[grid](*args, **kwargs)

    def run_with(
        self, config: triton.Config, grid: Any, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """One launch with this configuration."""
        options = config.kwargs if INTERPRETED else config.all_kwargs()
        self.kernel[grid](*args, **kwargs, **options)


def _search(kernel: Any, configs: list[triton.Config], key: list[str], prune: Prune | None) -> Any:
    """triton.autotune of the kernel."""
    options = {} if prune is None else {"prune_configs_by": {"early_config_prune": prune}}
    try:
        return triton.autotune(configs, key, cache_results=True, **options)(kernel)
    except TypeError:  # a Triton that keeps no cache
        return triton.autotune(configs, key, **options)(kernel)


def product_configs(*tiles: tuple[int, int, int, int, int]) -> list[triton.Config]:
    """Configurations of a tiled product g^T a from (block_p, block_d, block_t, warps, stages)."""
    return [
        triton.Config(
            {"BLOCK_P": block_p, "BLOCK_D": block_d, "BLOCK_T": block_t},
            num_warps=warps,
            num_stages=stages,
        )
        for block_p, block_d, block_t, warps, stages in tiles
    ]

"""What every kernel needs: where it can run, how it is tuned, how types are accumulated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run on the CPU, in Triton's interpreter (set before triton is imported)."""
INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def runs_on(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: one device, an NVIDIA GPU or the interpreter's CPU,
    and types that accumulate in float32 (float64 stays with the reference)."""
    first = tensors[0].device
    if any(x.device != first for x in tensors):
        return False
    if any(x.is_floating_point() and x.dtype not in INPUTS for x in tensors):
        return False
    return first.type == "cuda" or (first.type == "cpu" and INTERPRETED)


def precision(*tensors: Tensor) -> str:
    """`input_precision` of tl.dot: full float32 products, unless the user allows tf32 in torch."""
    if all(x.dtype != torch.float32 for x in tensors):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def autotuned(configs: Sequence[triton.Config], key: Sequence[str], **options: Any) -> Any:
    """triton.autotune with a small search, cached on disk; the first config in the interpreter.

    Args:
        configs: the search space, the best guess first. key: names of arguments whose value starts
            a new search. options: of triton.autotune (`reset_to_zero`, `prune_configs_by`).
    """
    if not INTERPRETED:
        try:
            return triton.autotune(list(configs), list(key), cache_results=True, **options)
        except TypeError:  # a Triton that keeps no cache
            return triton.autotune(list(configs), list(key), **options)

    def first_config(kernel: Any) -> Any:
        return _FirstConfig(kernel, configs[0])

    return first_config


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


class _FirstConfig:
    """A kernel that is launched with one configuration: autotuning needs a device."""

    def __init__(self, kernel: Any, config: triton.Config) -> None:
        self.kernel, self.config = kernel, config

    def __getitem__(self, grid: Any) -> Any:
        constants = self.config.kwargs

        def launch(*args: Any, **kwargs: Any) -> None:
            size = grid({**kwargs, **constants}) if callable(grid) else grid
            self.kernel[size](*args, **kwargs, **constants)

        return launch

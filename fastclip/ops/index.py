"""Indices on the device, made once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=256)
def index_on(places: tuple[int, ...], device: torch.device) -> Tensor:
    """`places` as int64 on the device; not to be written to.

    A copy of pageable memory would wait in every step and break the capture of a CUDA graph, so it is
    made in the first pass that needs it and kept.
    """
    with torch.inference_mode(False):
        return torch.tensor(places, dtype=torch.int64, device=device)

"""Graphs of operators that run as they are, where CUDA graphs, or a compiler's, are expected."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fastclip.engine.graphs import CudaRecorder, TracedRecorder


def as_it_is(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """No compiler."""
    return graph


class Uncompiled(TracedRecorder):
    """Takes the place of CudaRecorder."""

    what, without = CudaRecorder.what, CudaRecorder.without

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, as_it_is)

"""CUDA graphs, behind as little as a pass needs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Replayed(Protocol):
    """Operations that were captured."""

    def replay(self) -> None:
        """Run them again, on the same memory."""


class Recorder(Protocol):
    """Captures operations of one device."""

    def aside(self, work: Callable[[], T]) -> T:
        """Run `work` where captures run, without capturing it."""

    def capture(self, work: Callable[[], T]) -> tuple[Replayed, T]:
        """Capture the operations of `work`; what it returns is written at each replay."""

    def random_state(self) -> Tensor:
        """Of the generator that captured operations draw from."""

    def set_random_state(self, state: Tensor) -> None:
        """Draw from this state on."""


class CudaRecorder:
    """CUDA graphs of one pool of memory, to be replayed in the order in which they were captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def aside(self, work: Callable[[], T]) -> T:
        """On the stream of the captures, as PyTorch asks before one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        return out

    def capture(self, work: Callable[[], T]) -> tuple[Replayed, T]:
        """One graph; threads that load data may go on meanwhile."""
        graph: Any = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"capture_error_mode": "thread_local"}
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, **options),
        ):
            out = work()
        return graph, out

    def random_state(self) -> Tensor:
        """Of CUDA's default generator, the only one that a graph may draw from."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Draw from this state on."""
        torch.cuda.set_rng_state(state, self._device)


def recorder_of(device: torch.device) -> Callable[[torch.device], Recorder] | None:
    """What captures on such a device; None where nothing can."""
    return CudaRecorder if device.type == "cuda" else None

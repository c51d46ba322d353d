"""CUDA graphs, behind as little as a pass needs of them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fastclip._torch import end_of_pool

T = TypeVar("T")
_WAITED = "called a synchronizing CUDA operation"
"""What torch says of one under `set_sync_debug_mode`."""


class Replayed(Protocol):
    """Operations that were captured."""

    def replay(self) -> None:
        """Run them again, on the same memory."""


class Recorder(Protocol):
    """Captures operations of one device."""

    def aside(self, work: Callable[[], T]) -> T:
        """Run `work` where captures run, without capturing it."""

    def rehearse(self, work: Callable[[], T]) -> T:
        """The same, of work that is to be captured.

        Raises:
            RuntimeError: it waits for the device, which would break a capture.
        """

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
        try:
            with torch.cuda.stream(self._stream):
                out = work()
        finally:
            current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        return out

    def rehearse(self, work: Callable[[], T]) -> T:
        """Aside, where it is noted what waits: a capture that broke there could not be undone."""

        def noted() -> T:
            with _noted_waits() as waits:
                out = work()
            if waits:
                raise RuntimeError(_WAITED)
            return out

        return self.aside(noted)

    def capture(self, work: Callable[[], T]) -> tuple[Replayed, T]:
        """One graph; threads that load data may go on meanwhile."""
        graph: Any = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"capture_error_mode": "thread_local"}
        current = torch.cuda.current_stream(self._device)
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, **options),
            ):
                out = work()
        except BaseException:
            self._let_go(current)
            raise
        return graph, out

    def _let_go(self, current: torch.cuda.Stream) -> None:
        """A capture that broke leaves its stream, its pool and, before torch 2.13, the generator as they
        were inside: nothing could be drawn on this device any more."""
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it has ended
            end_of_pool(self._device.index, self._pool)
        # What broke it is told, not what may break here; the end of this one is the generator's.
        with suppress(RuntimeError), torch.cuda.device(self._device):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                torch.zeros(1, dtype=torch.float32, device=self._device)

    def random_state(self) -> Tensor:
        """Of CUDA's default generator, the only one that a graph may draw from."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Draw from this state on."""
        torch.cuda.set_rng_state(state, self._device)


@contextmanager
def _noted_waits() -> Iterator[list[Any]]:
    """What this thread says of operations that wait for a device; others may wait, and say nothing."""
    found: list[Any] = []
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WAITED)
        show = warnings.showwarning

        def note(message: Warning | str, *rest: Any, **more: Any) -> None:
            if not str(message).startswith(_WAITED):
                show(message, *rest, **more)
            elif threading.get_ident() == here:
                found.append(message)

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode(max(mode, 1))  # 1: it warns; 2: it raises already
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def recorder_of(device: torch.device) -> Callable[[torch.device], Recorder] | None:
    """What captures on such a device; None where nothing can."""
    return CudaRecorder if device.type == "cuda" else None

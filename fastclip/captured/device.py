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
    """Operations that were captured.

    Attributes:
        fresh: what a replay returns is memory of its own.
    """

    fresh: bool

    def replay(self) -> list[Tensor]:
        """Run them again; what they are to return."""

    def let_go(self) -> None:
        """Nothing runs on what the last replay has left for others."""

    def has_moved(self) -> bool:
        """A tensor that it reads, and no capture has made, lies elsewhere than it did."""


class Recorder(Protocol):
    """Captures operations of one device.

    Attributes:
        what: it makes of a pass, for messages. without: the argument of make_step that makes none.
        waits: to look at results is to wait for the device.
    """

    what: str
    without: str
    waits: bool

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` where captures run, without capturing it, if that is to be done before."""

    def rehearse(self, work: Callable[[], object]) -> None:
        """The same, of work that is to be captured.

        Raises:
            RuntimeError: it waits for the device, which would break a capture.
        """

    def capture(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[Replayed, T]:
        """Capture the operations of `work`, which says what its replays are to return."""

    def random_state(self) -> Tensor:
        """Of the generator that captured operations draw from."""

    def set_random_state(self, state: Tensor) -> None:
        """Draw from this state on."""


class CudaRecorder:
    """CUDA graphs of one pool of memory, to be replayed in the order in which they were captured."""

    what, without = "captured as a CUDA graph", "cuda_graph=False"
    waits = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """On the stream of the captures, as PyTorch asks before one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Likewise, where it is noted what waits: a capture that broke there could not be undone."""

        def noted() -> None:
            with _noted_waits() as waits:
                work()
            if waits:
                raise RuntimeError(_WAITED)

        self.warm_up(noted)

    def capture(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[Replayed, T]:
        """One graph; threads that load data may go on meanwhile."""
        graph: Any = torch.cuda.CUDAGraph()
        options: dict[str, Any] = {"capture_error_mode": "thread_local"}
        current = torch.cuda.current_stream(self._device)
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, **options),
            ):
                out, tensors = work()
        except BaseException:
            self._let_go(current)
            raise
        return _CudaGraph(graph, tensors), out

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
        return random_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Draw from this state on."""
        set_random_state(self._device, state)


def random_state(device: torch.device) -> Tensor:
    """Of the default generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Its default generator draws from this state on."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _CudaGraph:
    """A CUDA graph, which writes to the same memory each time."""

    fresh = False

    def __init__(self, graph: Any, tensors: list[Tensor]) -> None:
        self._graph, self._tensors = graph, tensors

    def replay(self) -> list[Tensor]:
        self._graph.replay()
        return self._tensors

    def let_go(self) -> None:
        """The memory is the graph's."""

    def has_moved(self) -> bool:
        """Not known here."""
        return False


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

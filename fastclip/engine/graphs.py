"""Graphs of a pass: recorded as CUDA graphs, or traced and compiled whole."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from fastclip.core.compiler import compile_graph
from fastclip.core.torch_names import (
    TorchDispatchMode,
    end_of_pool,
    hear_exports,
    traced,
    tree_leaves,
    tree_map,
)
from fastclip.errors import say
from fastclip.ops import library  # noqa: F401 - says what operations are in a graph

T = TypeVar("T")
_WAITED = "called a synchronizing CUDA operation"
"""torch's warning about such an operation under `set_sync_debug_mode`."""


class Replayed(Protocol):
    """Captured operations.

    Attributes:
        fresh: each replay returns new memory.
    """

    fresh: bool

    def replay(self) -> list[Tensor]:
        """Run them again and return their results."""

    def let_go(self) -> None:
        """Drop what the last replay has left for later graphs."""

    def has_moved(self) -> bool:
        """Whether a tensor that it reads, and no capture has made, has moved in memory."""


class Recorder(Protocol):
    """Captures operations of one device.

    Attributes:
        what: what it does to a pass, for messages. without: the argument of make_step that disables it.
        waits: reading results waits for the device.
    """

    what: str
    without: str
    waits: bool

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` once before the capture, where captures run, without capturing it."""

    def rehearse(self, work: Callable[[], object]) -> None:
        """Run `work` once more, exactly as it will be captured.

        Raises:
            RuntimeError: it waits for the device, which would break a capture.
        """

    def capture(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[Replayed, T]:
        """Capture the operations of `work`, which returns a result and the outputs of replays."""

    def random_state(self) -> Tensor:
        """The state of the generator that captured operations draw from."""

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of this generator."""


class CudaRecorder:
    """Captures CUDA graphs in one memory pool. They must be replayed in the order of their capture."""

    what, without = "captured as a CUDA graph", "cuda_graph=False"
    waits = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` on the stream of the captures, as PyTorch requires before a capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Run `work` likewise and detect waits, which would break a capture beyond repair."""

        def noted() -> None:
            with _noted_waits() as waits:
                work()
            if waits:
                raise RuntimeError(_WAITED)

        self.warm_up(noted)

    def capture(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[Replayed, T]:
        """Capture one graph. Threads that load data may continue meanwhile."""
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
        """Restore stream, pool and generator after a failed capture.

        Before torch 2.13 the generator would stay in capture mode, and could not be used any more.
        """
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it has ended
            end_of_pool(self._device.index, self._pool)
        # The first error is raised, not one from here. The end of this capture resets the generator.
        with suppress(RuntimeError), torch.cuda.device(self._device):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                torch.zeros(1, dtype=torch.float32, device=self._device)

    def random_state(self) -> Tensor:
        """The state of CUDA's default generator, the only one that a graph may draw from."""
        return random_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of CUDA's default generator."""
        set_random_state(self._device, state)


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the default generator of a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _CudaGraph:
    """A CUDA graph, which writes to the same memory in every replay."""

    fresh = False

    def __init__(self, graph: Any, tensors: list[Tensor]) -> None:
        self._graph, self._tensors = graph, tensors

    def replay(self) -> list[Tensor]:
        self._graph.replay()
        return self._tensors

    def let_go(self) -> None:
        """Does nothing: the memory belongs to the graph."""

    def has_moved(self) -> bool:
        """False: a CUDA graph does not know."""
        return False


@contextmanager
def _noted_waits() -> Iterator[list[Any]]:
    """Warnings about operations of this thread that wait for a device; other threads may wait."""
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
    """The recorder for a device; None if it has no graphs."""
    return CudaRecorder if device.type == "cuda" else None


# -------------------------------------------------------------------------------------------------
# Work that is traced once, as graphs of aten operators, and compiled whole.
#
# In every run a graph reads parameters, buffers and other tensors that it has not made in place. It is
# compiled when it first runs. Until then later graphs may use its intermediate results.


Compiler = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]
"""Compiles a graph, with example inputs, into a function of such inputs."""
_KIND = attrgetter("shape", "dtype")
_OPERANDS = (
    Tensor, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_READ = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators whose result Python reads, or whose output shape depends on values."""


@dataclass(frozen=True)
class _Value:
    """A tensor of the traced run."""

    number: int


class TracedGraph(TorchDispatchMode):
    """Records operators in the order of their calls while it is entered.

    Args:
        compiler: compiles the graph. earlier: graphs that run before it every time.
        random_state: returns the state of the generator that operators draw from.
    """

    hears = fresh = is_graph = True

    def __init__(
        self, compiler: Compiler, earlier: Sequence[TracedGraph], random_state: Callable[[], Tensor]
    ) -> None:
        super().__init__()
        self._state_now, self._random = random_state, random_state()
        self._compiler, self._earlier = compiler, [*earlier]
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._sources: dict[int, Tensor | Callable[[], Tensor]] = {}
        """Inputs of the graph, or functions that give them in a run."""
        self._lent: set[int] = set()
        """Memory addresses of inputs that no graph makes."""
        self._originals: list[Tensor] = []
        self._addresses: list[int] = []
        """These inputs, and their addresses when traced."""
        self._lies: dict[int, int] = {}
        """Memory addresses of values when they were made."""
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._returned: list[int] = []
        self._own = 0
        """Number of these that a run returns; the rest goes to later graphs."""
        self._handed: dict[int, Tensor] = {}
        self._run: Callable[..., Sequence[Tensor]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if _READ.intersection(func.tags) and not _is_plain_index(func, leaves):
            raise RuntimeError(f"{func.name()} reads values")
        if any(isinstance(x, torch.Generator) for x in leaves):
            raise RuntimeError(f"{func.name()} draws from a generator of its own")
        if not all(isinstance(x, _OPERANDS) for x in leaves):
            raise RuntimeError(f"{func.name()} has an argument that no graph can hold")
        given = tree_map(self._given, (args, kwargs))
        if any(_memory_of(x) in self._lent for x in _written(func, args, kwargs)):
            raise RuntimeError(f"{func.name()} writes to a tensor from outside the pass")
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self.check_random_state()
        out = func(*args, **kwargs)
        if draws:
            self._random = self._state_now()
        if func is torch.ops.aten.lift_fresh.default:
            func = self._anew(out)
        self._calls.append((func, *given, tree_map(self._made, out)))
        return out

    def _anew(self, constant: Tensor) -> Any:
        """Copy a constant of `torch.tensor(numbers)` anew in each run, in case the run writes to it."""
        self._sources[self._values.pop(constant).number] = constant.detach().clone()
        self._lent.discard(_memory_of(constant))
        del self._originals[-1], self._addresses[-1]
        return torch.ops.aten.clone.default

    def check_random_state(self) -> None:
        """Raise an error if the work has set the generator's state, as a checkpoint does."""
        if not torch.equal(self._random, self._state_now()):
            raise RuntimeError("the state of the random number generator is set")

    def _given(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        known = self._values.get(x)
        if known is not None and self._lies.get(known.number, _memory_of(x)) != _memory_of(x):
            raise RuntimeError("the memory of a tensor is replaced inside the pass")
        if known is None and not self._is_alias(x):
            maker = next((graph for graph in self._earlier if graph.made(x)), None)
            if maker is None:
                self._lent.add(_memory_of(x))
                self._originals.append(x)
                self._addresses.append(x.data_ptr() if x.layout == torch.strided else 0)
            self._sources[self._count] = x.detach() if maker is None else maker.handing(x)
        return self._made(x)

    def _is_alias(self, x: Tensor) -> bool:
        """Whether a tensor is another object for a known one; then it gets the known one's value.

        torch makes such objects without an operator (`Tensor._make_subclass`).

        Raises:
            RuntimeError: it is a part of a result of the pass.
        """
        own = _memory_of(x)
        if type(x) is nn.Parameter or not own or own in self._lent:
            return False
        for graph in (self, *self._earlier):
            same_memory = [(y, value) for y, value in graph._values.items() if _memory_of(y) == own]
            if any(y is x for y, _ in same_memory):
                return False
            for y, value in same_memory:
                if (
                    y.data_ptr() == x.data_ptr()
                    and y.stride() == x.stride()
                    and _KIND(y) == _KIND(x)
                ):
                    self._values[x] = value if graph is self else self._given(y)
                    return True
            if same_memory and own not in graph._lent:
                raise RuntimeError("a part of a result is used that no operator returned")
        return False

    def _made(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x not in self._values:
            self._values[x] = _Value(self._count)
            self._lies[self._count] = _memory_of(x)
            self._count += 1
        return self._values[x]

    def made(self, x: Tensor) -> bool:
        """Whether a call of this graph has returned this tensor, and it was no input."""
        value = self._values.get(x)
        return value is not None and value.number not in self._sources

    def returns(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors that each run returns."""
        self._returned = [self._given(x).number for x in tensors]
        self._own = len(tensors)

    def handing(self, x: Tensor) -> Callable[[], Tensor]:
        """A function that gives this tensor of the last run once, for a later graph."""
        self._returned.append(self._values[x].number)
        return partial(self._handed.pop, len(self._returned) - 1)

    def has_moved(self) -> bool:
        """Whether a tensor that it reads, and no graph has made, has moved in memory."""
        return self._strided() != self._addresses

    def _strided(self) -> list[int]:
        return [x.data_ptr() if x.layout == torch.strided else 0 for x in self._originals]

    def let_go(self) -> None:
        """Drop what the last run has left for later graphs."""
        self._handed.clear()

    def replay(self) -> list[Tensor]:
        """Run the graph; the results are new memory."""
        inputs = [x if isinstance(x, Tensor) else x() for x in self._sources.values()]
        with torch.no_grad():
            if self._run is None:
                if not self._earlier:
                    say(
                        "The step is being compiled, which takes seconds to minutes and happens once.",
                        doc="compile-and-graphs",
                    )
                self._run = self._compiler(self._module(), inputs)
            found = self._run(*inputs)
        self._handed.update(enumerate(found[self._own :], self._own))
        return [*found[: self._own]]

    def _module(self) -> fx.GraphModule:
        """The graph module; drops the objects that it was traced from."""
        graph = fx.Graph()
        nodes = {number: graph.placeholder(f"x{number}") for number in self._sources}

        def node_of(x: Any) -> Any:
            return nodes[x.number] if isinstance(x, _Value) else x

        for func, args, kwargs, out in self._calls:
            node = graph.call_function(func, *map_aggregate((args, kwargs), node_of))
            if isinstance(out, _Value):
                nodes.setdefault(out.number, node)
            for k, part in enumerate(out if type(out) in (tuple, list) else ()):
                if isinstance(part, _Value):
                    nodes.setdefault(part.number, graph.call_function(operator.getitem, (node, k)))
        graph.output(tuple(nodes[number] for number in self._returned))
        self._calls.clear()
        self._lies.clear()
        self._values.clear()
        self._earlier.clear()
        return fx.GraphModule({}, graph)


def _memory_of(x: Tensor) -> int:
    """The address of a tensor's storage; 0 for a tensor without one."""
    return x.untyped_storage().data_ptr() if x.layout == torch.strided and x.numel() else 0


def _check_not_exported(what: str, x: Tensor) -> None:
    if what != "register_hook":
        raise RuntimeError(f"Tensor.{what} reads values")


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The operands that an operator writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [*named, *((x, kwargs[x.name]) for x in func._schema.arguments if x.name in kwargs)]
    written = [value for x, value in given if x.alias_info is not None and x.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, Tensor)]


def _is_plain_index(func: Any, leaves: list[Any]) -> bool:
    """Whether an index uses numbers and no mask, so the output shape is known."""
    masks = torch.bool, torch.uint8
    chosen = [x for x in leaves[1:] if isinstance(x, Tensor)]
    return func is torch.ops.aten.index.Tensor and not any(x.dtype in masks for x in chosen)


class TracedRecorder:
    """Traces the work of a pass as graphs, which run in the order in which they were traced.

    Args:
        device: of the model. compiler: compiles the graphs.
    """

    what, without = "compiled whole", "compile=False"
    waits = False

    def __init__(self, device: torch.device, compiler: Compiler = compile_graph) -> None:
        self._device, self._compiler = device, compiler
        self._graphs: list[TracedGraph] = []

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work`, so that no dry run happens while it is traced."""
        work()

    def rehearse(self, work: Callable[[], object]) -> None:
        """Does nothing: tracing raises an error for what a graph does not support."""

    def capture(self, work: Callable[[], tuple[T, list[Tensor]]]) -> tuple[Replayed, T]:
        """Trace one graph, with its backward passes on this thread."""
        graph = TracedGraph(self._compiler, self._graphs, self.random_state)
        end = hear_exports(_check_not_exported)
        try:
            with torch.autograd.set_multithreading_enabled(False), traced(graph):
                result, tensors = work()
        finally:
            end()
        graph.check_random_state()
        graph.returns(tensors)
        self._graphs.append(graph)
        return graph, result

    def random_state(self) -> Tensor:
        """The state of the default generator, the only one that a graph may draw from."""
        return random_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the default generator."""
        set_random_state(self._device, state)

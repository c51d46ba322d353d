"""Private names of torch that fastclip needs, and what each is for.

Modules import these names from here. If a release of torch changes one of them, see this file and
tests/test_torch_names.py, which tests what is assumed of each. fastclip.ops imports this file. FSDP
takes longer to import than the rest of torch, so functions that need it import it.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter, methodcaller
from types import CodeType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as Native
from torch._C import _DisableTorchDispatch as Undispatched
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from fastclip.core.noted import Noted

__all__ = [
    "CheckpointFunction",  # reentrant checkpoints: its `apply` runs the part without a graph
    "LoaderIterator",  # what iter() of a DataLoader gives
    "Native",  # inside, classes of tensors do not hear of functions
    "StorageWeakRef",  # keeps the number of a tensor's memory, not the memory
    "TorchDispatchMode",  # hears of every operation
    "TreeSpec",  # the nesting of inputs and outputs, which the pytree functions take apart
    "Undispatched",  # inside, no mode hears of operations
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

torch.ones(1, dtype=torch.float32, device="cpu").sqrt()
"""The first call of one of MKL's vector functions readies them all. While several threads make it, what
they compute has 11 bits (sqrt, exp, log; torch 2.13), and norms are 3e-4 too small. So one does."""

T = TypeVar("T", bound=Tensor)
R = TypeVar("R", bound=Callable[..., Any])

BatchNormBase = nn.modules.batchnorm._BatchNorm
"""Every BatchNorm, SyncBatchNorm and the lazy ones."""
InstanceNormBase = nn.modules.instancenorm._InstanceNorm
"""Every InstanceNorm."""
DropoutBase = nn.modules.dropout._DropoutNd
"""Every dropout; its rate is `p`."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""What a tensor is a view of; None if of nothing."""
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Counts the changes in place of a tensor's memory."""
coo_indices: Callable[[Tensor], Tensor] = methodcaller("_indices")
coo_values: Callable[[Tensor], Tensor] = methodcaller("_values")
"""Of what a sparse tensor is made, coalesced or not: its own method asks for one that is."""
foreach_add_: Callable[..., None] = torch._foreach_add_
"""x += alpha y for every pair of two lists, in one call."""


pad_sequences: Callable[..., Tensor] = torch._C._nn.pad_sequence
"""The function behind torch.nn.utils.rnn.pad_sequence: one to three operations per sequence."""

plain_results = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a tensor class, it makes results plain tensors."""

# Autograd

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward pass that runs on this thread; -1 outside of any."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the graph that this thread runs."""
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running pass will reach a node; RuntimeError if autograd.grad asked for tensors."""
saving_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""(False) -> the pair of hooks for tensors saved for a backward pass, or None."""
RECOMPUTATION = "_recomputation_hook"
"""Part of the names of such hooks while a non-reentrant checkpoint recomputes."""
SAVED_REDUCTION, SAVED_WEIGHT = "_saved_reduction", "_saved_weight"
"""Attributes of the nodes of torch's losses: a code of the reduction, the class weights."""


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Runs `callback` when the running backward pass has run all nodes and is about to return."""
    Variable._execution_engine.queue_callback(callback)


node_type: Callable[[type[Function]], type] = attrgetter("_backward_cls")
"""The type of the graph nodes of a function."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns how many modes of this thread see its operations."""


def invents() -> bool:
    """Whether the mode is on under which new tensors have no memory."""
    kind = torch._C._TorchDispatchModeKey.FAKE
    return bool(dispatch_modes()) and torch._C._get_dispatch_mode(kind) is not None


Invented = FakeTensor, FunctionalTensor
"""Tensors of torch's compilers, which have shapes and no memory."""
is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""Unwraps a tensor of a transform that has ended; other tensors are unchanged."""


def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """Returns `function.apply` without its checks for transforms and their wrappers."""
    return super(Function, function).apply  # type: ignore[misc]


def gradient_hooks(parameter: Tensor) -> Collection[Any]:
    """Returns hooks on a tensor's gradient, before and after it is accumulated."""
    before = parameter._backward_hooks
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    found: Collection[Any] = () if before is None else before.values()
    return [*found, *after.values()] if after else found


def hooks_of(parameters: Iterable[Tensor]) -> list[Any]:
    """Returns all hooks on the gradients of these parameters, without a Python loop."""
    before = filter(None, map(_BEFORE, parameters))
    after = filter(None, map(_AFTER, parameters))
    return [*chain.from_iterable(map(_VALUES, chain(before, after)))]


_BEFORE, _AFTER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_VALUES = methodcaller("values")


def of_class(kind: type[T], x: Tensor) -> T:
    """Makes a leaf of this class in the memory of x, without calling functions of the class."""
    return Tensor._make_subclass(kind, x.detach(), True)


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """Returns the tables of global module hooks, by their numbers."""
    from torch.nn.modules import module

    forward = ("pre_hooks", "hooks", "hooks_with_kwargs", "hooks_always_called")
    kinds = [*(f"forward_{kind}" for kind in forward), "backward_pre_hooks", "backward_hooks"]
    return [getattr(module, f"_global_{kind}") for kind in kinds]


def called_with(module: nn.Module) -> tuple[tuple, dict] | None:
    """Returns the (args, kwargs) of the call of a module whose forward runs, before hooks, or None if
    unknown. (A hook would be one of several, and slow every module down.)
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            held = frame.f_locals
            return (held["args"], held["kwargs"]) if held["self"] is module else None
        frame = frame.f_back
    return None


end_of_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
"""(GPU, pool): ends allocations from this memory, as after a capture."""


def memory_of(x: Tensor) -> int:
    """Returns an equal number for tensors that share memory, as long as one of them lives."""
    return x.untyped_storage()._cdata


overload_of: Callable[[Any], str] = attrgetter("_overloadname")
"""The overload of an operator: `dim` of aten.max.dim."""


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def hear_functions_given(listener: Callable[[Any], None]) -> Iterator[None]:
    """Context in which `listener` gets operators of this thread that run functions (torch.cond),
    before they run. Those that transforms use themselves are left out.
    """
    operator: Any = torch._ops.HigherOrderOperator
    plain, here = operator.__call__, threading.get_ident()

    @functools.wraps(plain)
    def heard(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and not transformed():
            listener(self)
        return plain(self, *args, **kwargs)

    operator.__call__ = heard
    try:
        yield
    finally:
        operator.__call__ = plain


def is_profiled() -> bool:
    """Whether torch's profiler runs."""
    return torch.autograd.profiler._is_profiler_enabled


# Frames, read only if no public function gives the callers

CallingPlace = tuple[tuple[CodeType, int], ...]
"""Code, and the instruction in it, of a call, and of the call that it was made for."""


def calling_place(above: int, passed_by: tuple[str, ...]) -> CallingPlace:
    """Returns the place from which the running function was called.

    An overridden function does not get it from torch. A running number of the call would not identify it
    after a branch, or a loop of another length.

    Args:
        above: number of frames. passed_by: suffixes of names of files that are skipped.
    """
    frame: Any = sys._getframe(above + 1)
    while (code := frame.f_code).co_filename.endswith(passed_by):
        frame = frame.f_back
    places = [(code, frame.f_lasti)]
    while code.co_filename.endswith("torch/nn/functional.py"):  # the caller of F.embedding
        frame = frame.f_back
        code = frame.f_code
        if not any(folder in code.co_filename for folder in ("/torch/", "/fastclip/")):
            places.append((code, frame.f_lasti))
    return tuple(places)


_PRECALL = dis.opmap.get("PRECALL")


def settled(place: CallingPlace) -> CallingPlace:
    """Returns the same place for all calls from there. Python 3.11 calls built-in functions
    (operator.mul, sum) from the instruction before CALL, after their line has run several times."""
    if _PRECALL is None:
        return place
    before = (code.co_code[last] == _PRECALL for code, last in place)
    return tuple((x, n + 4 * early) for (x, n), early in zip(place, before, strict=True))


def in_compiled_call() -> bool:
    """Whether a compiled function was called and has not returned: it then disables modes opened inside.
    Torch does not tell inside code that was not compiled, as here.
    """
    frame: Any = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("_dynamo/eval_frame.py"):
            owner = type(frame.f_locals.get("self")).__name__
            if code.co_name == "compile_wrapper" or owner == "OptimizeContext":
                return True
        frame = frame.f_back
    return False


# Settings of torch

are_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def current_gpu() -> int:
    """Returns the GPU's number if CUDA is running. torch's own function checks that in every launch."""
    return torch._C._cuda_getDevice()


def stream_of(gpu: int) -> int:
    """Returns the address of a GPU's current stream if CUDA is running."""
    return torch._C._cuda_getCurrentRawStream(gpu)


precision_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
"""(backend, operation) -> how its float32 products may round; None before torch 2.9."""
set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
"""(backend, operation, value); None before torch 2.9."""


@contextmanager
def parametrizations_apart() -> Iterator[None]:
    """Context in which weights kept by parametrize.cached() are recomputed, and not kept afterwards."""
    kept, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = kept


class _Attribute(property):
    """An attribute whose accessor for `__torch_function__` has its name."""

    __name__ = "grad_fn"


_HEARD = ("tolist", "numpy", "register_hook", "__dlpack__", "data_ptr")


def hear_exports(listener: Callable[[str, Tensor], None]) -> Callable[[], None]:
    """Reports tensors whose numbers Python, NumPy or a kernel takes all at once, or whose gradient a
    hook gets: no mode sees that.

    Args:
        listener: called before, with the method's name and the tensor. Calls of this package, and
            addresses read by torch, are left out: frames identify them, because torch reads addresses
            inside of operators that the user calls.

    Returns:
        A function that ends this.
    """
    node_of = vars(torch._C.TensorBase)["grad_fn"].__get__

    def node(x: Tensor) -> Any:  # its hooks are not reported
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "torch.autograd.graph":
            frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith(("fastclip.", "torch.")):
            listener("register_hook", x)
        return node_of(x)

    def heard(name: str) -> Any:
        plain = getattr(Tensor, name)
        own = ("fastclip.", "torch.") if name == "data_ptr" else "fastclip."

        @functools.wraps(plain)
        def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(own):
                listener(name, x)
            return plain(x, *args, **kwargs)

        return method

    hearing = {name: heard(name) for name in _HEARD} | {"grad_fn": _Attribute(node)}
    before = {name: vars(Tensor).get(name) for name in hearing}

    def end() -> None:
        for name, own in before.items():
            if own is None:
                delattr(Tensor, name)  # its base class has it
            else:
                setattr(Tensor, name, own)

    for name, method in hearing.items():
        setattr(Tensor, name, method)
    return end


@contextmanager
def at_rest(modules: Iterable[Any]) -> Iterator[None]:
    """Context in which the hooks of fully_shard's modules cast, but neither gather nor reshard, as when
    a backward pass recomputes a part of the model."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    states = {id(state): state for state in (m._get_fsdp_state() for m in modules)}
    before = [(state, state._training_state) for state in states.values()]
    for state in states.values():
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state, was in before:
            state._training_state = was


def casts_at_rest(module: Any) -> bool:
    """Whether the hooks follow the module's policy inside `at_rest`, as since torch 2.13."""
    state = module._get_fsdp_state()
    policy = state._mp_policy
    asks = policy.param_dtype is not None and policy.cast_forward_inputs
    return not (asks or policy.output_dtype) or hasattr(state, "_cast_forward_inputs")


def running_ddp() -> Any:
    """Returns the DistributedDataParallel whose forward runs, if any."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def timeout_of(group: Any) -> Any:
    """Returns the timeout of a process group; None if its backend does not say."""
    for kind in group._device_types:
        options: Any = getattr(group._get_backend(kind), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout
    return None


# Iterators of DataLoader

SENT, RECEIVED = "_send_idx", "_rcvd_idx"
"""With workers: numbers of the next batch to be requested, and of the next to be returned."""
YIELDED = "_num_yielded"
"""The number of returned batches."""
INDEX_SAMPLER = "_index_sampler"
"""The batch sampler of the iterator."""

ATTRIBUTES = {
    "torch.Tensor": ("_version", "_is_view"),
    "torch.nn.Module": (
        "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
        "_is_full_backward_hook",
    ),
    "torch.nn.Conv2d": ("_reversed_padding_repeated_twice",),
    "torch.compile": ("_orig_mod", "_torchdynamo_disable"),
    "lightning.DDPStrategy": (
        "_start_method", "_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper",
        "_model_averaging_period",
    ),
    "transformers.Trainer": ("_get_train_sampler", "_signature_columns", "_train_batch_size"),
    "torch.ops": ("_schema",),
    "sys": ("_getframe",),
    "os": ("_exit",),
    "namedtuple": ("_asdict", "_replace"),
}  # fmt: skip
"""Attributes of other classes that are read where they are needed, by class."""


_FLAGS = "old_dispatch_mode_flags"
"""A mode's stack of flags, one for each time it was opened."""


_placed: weakref.WeakSet[TorchDispatchMode] = weakref.WeakSet()


def place_beneath(mode: TorchDispatchMode) -> bool:
    """Puts a mode below those that this thread has opened: each removes the top one when it is closed.

    Returns:
        Whether it was placed: not if torch's own modes make fake or functional tensors.
    """
    others = _modes()
    if any(hasattr(other, "_mode_key") or not getattr(other, _FLAGS, None) for other in others):
        return False
    with _lifted(others):
        TorchDispatchMode.__enter__(mode)
    _placed.add(mode)
    return True


@contextmanager
def traced(mode: TorchDispatchMode) -> Iterator[None]:
    """Context in which `mode` makes a graph of this thread's operations; RuntimeError if other modes are
    active."""
    if dispatch_modes():
        raise RuntimeError("Another dispatch mode is active.")
    _placed.add(mode)
    with mode:
        yield


def makes_graph() -> bool:
    """Whether this thread's computations become a part of a graph (`traced`)."""
    return bool(dispatch_modes()) and any(getattr(mode, "is_graph", False) for mode in _modes())


def foreign_modes() -> bool:
    """Whether this thread has modes that `place_beneath` has not put there."""
    return bool(dispatch_modes()) and any(mode not in _placed for mode in _modes())


def followed() -> bool:
    """Whether this thread has a mode that `place_beneath` has put there."""
    return bool(dispatch_modes()) and any(mode in _placed and mode.hears for mode in _modes())


def take_away(mode: TorchDispatchMode) -> bool:
    """Removes a mode from those that this thread has opened.

    Returns:
        Whether it was there.
    """
    modes = _modes()
    place = next((k for k, other in enumerate(modes) if other is mode), None)
    if place is None or not all(getattr(other, _FLAGS, None) for other in modes[place + 1 :]):
        return False
    with _lifted(modes[place + 1 :]):
        TorchDispatchMode.__exit__(mode, None, None, None)
    return True


def _modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(k) for k in range(dispatch_modes())]


@contextmanager
def _lifted(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Context without the uppermost modes, which are not notified."""
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


def creation_number() -> int:
    """Returns the number of the next node of this thread's graph."""
    return torch._C._autograd._get_sequence_nr()


def number_of(node: Any) -> int:
    """Returns the creation number of a graph node."""
    return node._sequence_nr()


class BatchCalls(Noted):
    """Requests of batches from iterators of data loaders, and the listeners of these batches.

    It watches torch's class, because BatchMemoryManager and Accelerate make their own loaders.
    """

    def __init__(self) -> None:
        super().__init__(LoaderIterator, "__next__")
        self._listeners: dict[Any, Callable[[], AbstractContextManager[None]]] = {}

    def add(
        self,
        listener: Callable[[Any, Any], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Calls `listener` with every batch from now on: (iterator, batch), drawn in `around()`."""
        self._listeners[listener] = around
        self.watch(listener)

    def remove(self, listener: Callable[[Any, Any], None]) -> None:
        """Removes a listener."""
        self._listeners.pop(listener, None)
        self.forget(listener)

    def _called(self, plain: Callable[..., Any], iterator: Any) -> Any:  # type: ignore[override]
        around = next(iter(self._listeners.values()), nullcontext)
        with self._noting(iterator), around():
            batch = plain(iterator)
        for listener in list(self._listeners):
            listener(iterator, batch)
        return batch


class BackwardListener(Protocol):
    """A listener of the backward passes of this process."""

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A pass is about to begin on these losses, with gradients given by the user."""

    def ended(self, failed: bool) -> None:
        """The pass has ended."""


class BackwardCall(NamedTuple):
    """The arguments of torch.autograd.backward."""

    losses: tuple[Any, ...]
    """Tensors, or gradient edges."""
    gradients: tuple[Any, ...]
    """The gradients given for them; None for those without."""

    @property
    def seeded(self) -> bool:
        """Whether a gradient was given: then more than the losses is differentiated."""
        return any(gradient is not None for gradient in self.gradients)


class BackwardCalls(Noted):
    """The calls of torch.autograd.backward, and their listeners.

    `loss.backward()` and reentrant checkpoints look it up in torch.autograd. A reference imported by
    name before is not seen.
    """

    def __init__(self) -> None:
        super().__init__(torch.autograd, "backward")
        self._listeners: WeakSet[BackwardListener] = WeakSet()

    def running(self) -> BackwardCall | None:
        """Returns the call whose pass runs here; None if that is unknown."""
        own = self.innermost()
        # on a device's thread of autograd, the call waits on another thread
        waiting = [[own]] if own is not None else [*self._running.values()]
        return next(reversed(waiting[0]), None) if len(waiting) == 1 else None

    @property
    def none_runs(self) -> bool:
        """Whether a running pass was begun in another way."""
        return not self._running

    def add(self, listener: BackwardListener) -> None:
        """Adds a listener of every call, which is not kept alive."""
        self._listeners.add(listener)
        self.watch(listener)

    def remove(self, listener: BackwardListener) -> None:
        """Removes a listener."""
        self._listeners.discard(listener)
        self.forget(listener)

    def _called(  # type: ignore[override]
        self, plain: Callable[..., None], tensors: Any, grad_tensors: Any = None,
        retain_graph: bool | None = None, create_graph: bool = False, grad_variables: Any = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        losses, given, old = map(_listed, (tensors, grad_tensors, grad_variables))
        call = BackwardCall(losses or (), given or old or (None,) * len(losses or ()))
        run = functools.partial(
            plain, losses, given, retain_graph, create_graph, old, *args, **kwargs
        )
        with self._noting(call):
            if current_task() == -1:
                self._notified(call, run)
            else:
                run()

    def _notified(self, call: BackwardCall, run: Callable[[], None]) -> None:
        listeners, failed = list(self._listeners), True
        losses = [x for x in call.losses if isinstance(x, Tensor)]
        try:
            for listener in listeners:
                listener.begins(losses, call.gradients)
            run()
            failed = False
        finally:
            for listener in listeners:
                listener.ended(failed)


def _listed(x: Any) -> tuple[Any, ...] | None:
    if x is None:
        return None
    return (x,) if isinstance(x, (Tensor, GradientEdge)) else tuple(x)


backward_calls = BackwardCalls()
batch_calls = BatchCalls()
_loader_calls = Noted(DataLoader, "__iter__")
sampler_calls = Noted(LoaderIterator, "_next_index")
"""Requests of a batch by a data loader's iterator from its sampler: (iterator,)."""
fetch_calls = Noted(_MapDatasetFetcher, "fetch")
"""Reads of samples from a data set, in any process, and calls of collate_fn: (fetcher, keys)."""


def watch_loaders(asker: Any) -> None:
    """Records whether data loaders run, as long as `asker` is alive."""
    _loader_calls.watch(asker)
    batch_calls.watch(asker)


def loader_runs() -> bool:
    """Whether this thread runs a data loader, which begins a pass or returns a batch."""
    return _loader_calls.innermost() is not None or batch_calls.innermost() is not None


TARGET, TOTAL_WEIGHT = "_saved_target", "_saved_total_weight"
"""Attributes of the node of a mean over classes: the labels, and the sum of their weights."""

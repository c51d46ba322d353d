"""What torch keeps to itself and fastclip needs: every such name, and what it is for.

Modules import these names from here. Where a release of torch changes one of them, this file and
tests/test_torch_names.py, which holds each to what is assumed of it, are the places to look at.
fastclip.ops imports this file: FSDP, which takes longer to import than the rest of torch, is imported by
the functions that need it.
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
"""What torch.nn.utils.rnn.pad_sequence calls, an operation or three for each of the sequences."""

plain_results = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a kind of tensors: what is computed of them is plain."""

# Autograd

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward pass that runs on this thread; -1 outside of any."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the graph that this thread runs."""
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running pass will reach a node; RuntimeError where autograd.grad asked for tensors."""
saving_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)
"""(False) -> the hooks that take what is saved for a backward pass, a pair, or None."""
RECOMPUTATION = "_recomputation_hook"
"""In the names of such hooks while a checkpoint without reentry computes what it has not kept."""
SAVED_REDUCTION, SAVED_WEIGHT = "_saved_reduction", "_saved_weight"
"""What the nodes of torch's losses hold: a code of the reduction, the weights of the classes."""


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward pass, its nodes all run, is about to return."""
    Variable._execution_engine.queue_callback(callback)


node_type: Callable[[type[Function]], type] = attrgetter("_backward_cls")
"""The type of the graph's nodes that a function leaves."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes of this thread hear of its operations."""


def invents() -> bool:
    """The mode is on under which new tensors have no memory."""
    kind = torch._C._TorchDispatchModeKey.FAKE
    return bool(dispatch_modes()) and torch._C._get_dispatch_mode(kind) is not None


Invented = FakeTensor, FunctionalTensor
"""Tensors of torch's compilers, which have shapes and no memory."""
is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""What a wrapper of a transform that has ended holds; any other tensor as it is."""


def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without what it looks for first: transforms, and wrappers that they left."""
    return super(Function, function).apply  # type: ignore[misc]


def gradient_hooks(parameter: Tensor) -> Collection[Any]:
    """Hooks on a tensor's gradient, before and after it is accumulated."""
    before = parameter._backward_hooks
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    found: Collection[Any] = () if before is None else before.values()
    return [*found, *after.values()] if after else found


def hooks_of(parameters: Iterable[Tensor]) -> list[Any]:
    """All hooks on the gradients of these parameters, without a line of Python for each."""
    before = filter(None, map(_BEFORE, parameters))
    after = filter(None, map(_AFTER, parameters))
    return [*chain.from_iterable(map(_VALUES, chain(before, after)))]


_BEFORE, _AFTER = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_VALUES = methodcaller("values")


def of_class(kind: type[T], x: Tensor) -> T:
    """A leaf of this class in the memory of x; none of the class's functions are called."""
    return Tensor._make_subclass(kind, x.detach(), True)


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """The tables of hooks that every module calls, by their numbers."""
    from torch.nn.modules import module

    forward = ("pre_hooks", "hooks", "hooks_with_kwargs", "hooks_always_called")
    kinds = [*(f"forward_{kind}" for kind in forward), "backward_pre_hooks", "backward_hooks"]
    return [getattr(module, f"_global_{kind}") for kind in kinds]


def called_with(module: nn.Module) -> tuple[tuple, dict] | None:
    """(args, kwargs) with which the module was called whose forward runs, before hooks saw them; None if
    that is not known. (A hook of ours would be one of several, and slow every module down.)
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            held = frame.f_locals
            return (held["args"], held["kwargs"]) if held["self"] is module else None
        frame = frame.f_back
    return None


end_of_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
"""(GPU, pool): its allocator gives out no more of this memory, as after a capture."""


def memory_of(x: Tensor) -> int:
    """The same number for tensors that share their memory, as long as one of them lives."""
    return x.untyped_storage()._cdata


overload_of: Callable[[Any], str] = attrgetter("_overloadname")
"""Of an operator: `dim` of aten.max.dim."""


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def hear_functions_given(told: Callable[[Any], None]) -> Iterator[None]:
    """Inside, hear of operators of this thread that run functions they are given (torch.cond), before
    they do; not of those that transforms use themselves.
    """
    operator: Any = torch._ops.HigherOrderOperator
    plain, here = operator.__call__, threading.get_ident()

    @functools.wraps(plain)
    def heard(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and not transformed():
            told(self)
        return plain(self, *args, **kwargs)

    operator.__call__ = heard
    try:
        yield
    finally:
        operator.__call__ = plain


def is_profiled() -> bool:
    """Whether torch's profiler runs."""
    return torch.autograd.profiler._is_profiler_enabled


# Frames: read only where no public way tells what runs above

CallingPlace = tuple[tuple[CodeType, int], ...]
"""Code, and the instruction in it, of a call, and of that which it was made for."""


def calling_place(above: int, passed_by: tuple[str, ...]) -> CallingPlace:
    """From where the function that runs was called.

    torch does not tell whoever overrides a function, and the number of the call would not do: after a
    loop of other length, or a branch, it would be another call's.

    Args:
        above: so many frames. passed_by: ends of the names of files that do not call by themselves.
    """
    frame: Any = sys._getframe(above + 1)
    while (code := frame.f_code).co_filename.endswith(passed_by):
        frame = frame.f_back
    places = [(code, frame.f_lasti)]
    while code.co_filename.endswith("torch/nn/functional.py"):  # who has called F.embedding
        frame = frame.f_back
        code = frame.f_code
        if not any(folder in code.co_filename for folder in ("/torch/", "/fastclip/")):
            places.append((code, frame.f_lasti))
    return tuple(places)


_PRECALL = dis.opmap.get("PRECALL")


def settled(place: CallingPlace) -> CallingPlace:
    """The same for all calls from there: Python 3.11 calls built-in functions (operator.mul, sum) from
    the instruction before CALL, once their line has run some times."""
    if _PRECALL is None:
        return place
    before = (code.co_code[last] == _PRECALL for code, last in place)
    return tuple((x, n + 4 * early) for (x, n), early in zip(place, before, strict=True))


def in_compiled_call() -> bool:
    """Whether a compiled function has been called and has not returned: it then takes out of force what
    modes were opened inside. Where it has not compiled what runs, as here, torch does not tell.
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
    """Its number; CUDA is running. torch's own function asks for that first, in every launch."""
    return torch._C._cuda_getDevice()


def stream_of(gpu: int) -> int:
    """The address of its current stream; CUDA is running."""
    return torch._C._cuda_getCurrentRawStream(gpu)


precision_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
"""(backend, operation) -> how its float32 products may round; None before torch 2.9."""
set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
"""(backend, operation, value); None before torch 2.9."""


@contextmanager
def parametrizations_apart() -> Iterator[None]:
    """Weights that parametrize.cached() keeps are computed anew inside, and not kept afterwards."""
    kept, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = kept


class _Attribute(property):
    """What torch hands to `__torch_function__` of an attribute has its name."""

    __name__ = "grad_fn"


_HEARD = ("tolist", "numpy", "register_hook", "__dlpack__", "data_ptr")


def hear_exports(told: Callable[[str, Tensor], None]) -> Callable[[], None]:
    """Be told of tensors whose numbers Python, NumPy or a kernel takes all at once, or whose gradient a
    hook gets: no mode sees that.

    Args:
        told: called before, with the method's name and the tensor, but not for this package's own calls,
            nor for addresses that torch asks for: their frames say whose they are, for torch asks inside
            of operators that the user calls.

    Returns:
        Ends it.
    """
    node_of = vars(torch._C.TensorBase)["grad_fn"].__get__

    def node(x: Tensor) -> Any:  # whose hooks nobody hears of
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "torch.autograd.graph":
            frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith(("fastclip.", "torch.")):
            told("register_hook", x)
        return node_of(x)

    def heard(name: str) -> Any:
        plain = getattr(Tensor, name)
        own = ("fastclip.", "torch.") if name == "data_ptr" else "fastclip."

        @functools.wraps(plain)
        def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(own):
                told(name, x)
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
    """Inside, the hooks of fully_shard's modules cast, but neither gather nor reshard: so they do where
    a backward pass computes a part of the model again."""
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
    """Whether the hooks do inside `at_rest` what the module's policy asks for, as since torch 2.13."""
    state = module._get_fsdp_state()
    policy = state._mp_policy
    asks = policy.param_dtype is not None and policy.cast_forward_inputs
    return not (asks or policy.output_dtype) or hasattr(state, "_cast_forward_inputs")


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward runs, if one does."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def timeout_of(group: Any) -> Any:
    """How long the exchanges of a process group wait; None if its backend does not tell."""
    for kind in group._device_types:
        options: Any = getattr(group._get_backend(kind), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout
    return None


# Iterators of DataLoader

SENT, RECEIVED = "_send_idx", "_rcvd_idx"
"""With workers: places of the next batch to be drawn, and of the next to be handed out."""
YIELDED = "_num_yielded"
"""Batches that were handed out."""
INDEX_SAMPLER = "_index_sampler"
"""The batch sampler that it asks."""

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
"""Attributes of others that are read where they are needed, by whose they are."""


_FLAGS = "old_dispatch_mode_flags"
"""What a mode keeps of those that were open when it was opened, each time."""


_placed: weakref.WeakSet[TorchDispatchMode] = weakref.WeakSet()


def place_beneath(mode: TorchDispatchMode) -> bool:
    """Put a mode under those that this thread has opened: each takes away, when it is closed, what lies
    on top.

    Returns:
        Whether it was: not where torch's own modes invent or functionalize tensors.
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
    """This thread's operations are heard by `mode`, which makes a graph of them; RuntimeError where
    others hear of them, too."""
    if dispatch_modes():
        raise RuntimeError("Another dispatch mode is active.")
    _placed.add(mode)
    with mode:
        yield


def makes_graph() -> bool:
    """Whether what this thread computes now becomes a part of a graph (`traced`)."""
    return bool(dispatch_modes()) and any(getattr(mode, "is_graph", False) for mode in _modes())


def foreign_modes() -> bool:
    """Whether this thread's operations are heard by modes that `place_beneath` has not put there."""
    return bool(dispatch_modes()) and any(mode not in _placed for mode in _modes())


def followed() -> bool:
    """Whether a mode that `place_beneath` has put there hears of what this thread computes now."""
    return bool(dispatch_modes()) and any(mode in _placed and mode.hears for mode in _modes())


def take_away(mode: TorchDispatchMode) -> bool:
    """Take a mode from where it lies among those that this thread has opened.

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
    """The uppermost modes are away inside; none of them is told."""
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


def creation_number() -> int:
    """The number that the next node of this thread's graph gets."""
    return torch._C._autograd._get_sequence_nr()


def number_of(node: Any) -> int:
    """The number that a node of the graph got when it was made."""
    return node._sequence_nr()


class BatchCalls(Noted):
    """Iterators of data loaders are asked for a batch, and who hears of what they hand out.

    It is torch's class that is watched, for BatchMemoryManager and Accelerate make loaders of their own.
    """

    def __init__(self) -> None:
        super().__init__(LoaderIterator, "__next__")
        self._told: dict[Any, Callable[[], AbstractContextManager[None]]] = {}

    def add(
        self, told: Callable[[Any, Any], None], around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """From now on `told` hears of every batch: (iterator, batch). They are drawn in `around()`."""
        self._told[told] = around
        self.watch(told)

    def remove(self, told: Callable[[Any, Any], None]) -> None:
        """It hears of no more."""
        self._told.pop(told, None)
        self.forget(told)

    def _called(self, plain: Callable[..., Any], iterator: Any) -> Any:  # type: ignore[override]
        around = next(iter(self._told.values()), nullcontext)
        with self._noting(iterator), around():
            batch = plain(iterator)
        for told in list(self._told):
            told(iterator, batch)
        return batch


class BackwardListener(Protocol):
    """Hears of the backward passes of this process."""

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A pass is about to begin on these losses, with the gradients that the user gives for them."""

    def ended(self, failed: bool) -> None:
        """It is over."""


class BackwardCall(NamedTuple):
    """What torch.autograd.backward was called with."""

    losses: tuple[Any, ...]
    """Tensors, or gradient edges."""
    gradients: tuple[Any, ...]
    """Those that were given for them; None where none was."""

    @property
    def seeded(self) -> bool:
        """One was given, so the losses are not all of what is differentiated."""
        return any(gradient is not None for gradient in self.gradients)


class BackwardCalls(Noted):
    """The calls of torch.autograd.backward, and who hears of them.

    `loss.backward()` and reentrant checkpoints look it up in torch.autograd. What was imported from
    there by name before is not seen.
    """

    def __init__(self) -> None:
        super().__init__(torch.autograd, "backward")
        self._listeners: WeakSet[BackwardListener] = WeakSet()

    def running(self) -> BackwardCall | None:
        """The one whose pass runs here; None where that cannot be told."""
        own = self.innermost()
        # on a thread of the engine's own, which runs the pass of a device, it waits on another
        waiting = [[own]] if own is not None else [*self._running.values()]
        return next(reversed(waiting[0]), None) if len(waiting) == 1 else None

    @property
    def none_runs(self) -> bool:
        """A pass that runs was begun by something else."""
        return not self._running

    def add(self, listener: BackwardListener) -> None:
        """It hears of every call from now on, and is not kept alive."""
        self._listeners.add(listener)
        self.watch(listener)

    def remove(self, listener: BackwardListener) -> None:
        """It hears of no more."""
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
                self._told(call, run)
            else:
                run()

    def _told(self, call: BackwardCall, run: Callable[[], None]) -> None:
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
"""An iterator of a data loader asks its sampler for a batch: (iterator,)."""
fetch_calls = Noted(_MapDatasetFetcher, "fetch")
"""Samples of a data set are read, in whatever process, and collate_fn is called: (fetcher, keys)."""


def watch_loaders(asker: Any) -> None:
    """It is known whether data loaders run as long as this lives."""
    _loader_calls.watch(asker)
    batch_calls.watch(asker)


def loader_runs() -> bool:
    """Whether what runs on this thread is a data loader, which begins a pass or gives a batch."""
    return _loader_calls.innermost() is not None or batch_calls.innermost() is not None


TARGET, TOTAL_WEIGHT = "_saved_target", "_saved_total_weight"
"""What the node of a mean over classes holds: the labels, and the sum of their weights."""

"""What torch and Opacus keep to themselves and fastclip needs: every such name, and what it is for.

Modules import these names from here. Where a release of torch or Opacus changes one of them, this file
and tests/test_torch_names.py, which holds each to what is assumed of it, are the places to look at.
fastclip.ops imports this file: Opacus and FSDP, which take longer to import than torch, are imported by
the functions that need them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as Native
from torch._C import _DisableTorchDispatch as Undispatched
from torch._compile import _disable_dynamo as disable_dynamo
from torch.autograd import Function, Variable
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
from torch.utils.data._utils.fetch import _BaseDatasetFetcher as Fetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "CheckpointFunction",  # reentrant checkpoints: its `apply` runs the part without a graph
    "Fetcher",  # reads the samples of a batch, in whatever process; its `fetch` calls collate_fn
    "LoaderIterator",  # what iter() of a DataLoader gives
    "Native",  # inside, classes of tensors do not hear of functions
    "StorageWeakRef",  # keeps the number of a tensor's memory, not the memory
    "TorchDispatchMode",  # hears of every operation
    "TreeSpec",  # the nesting of inputs and outputs, which the pytree functions take apart
    "Undispatched",  # inside, no mode hears of operations
    "disable_dynamo",  # torch.compiler.disable, without importing dynamo
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

T = TypeVar("T", bound=Tensor)

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


def storage_number(x: Tensor) -> int:
    """The same for tensors that lie in one memory; errors where a tensor has none of its own."""
    return int(x.untyped_storage()._cdata)


pad_sequences: Callable[..., Tensor] = torch._C._nn.pad_sequence
"""What torch.nn.utils.rnn.pad_sequence calls, an operation or three for each of the sequences."""

KEYS = "possibly_batched_index"
"""What `fetch` is given: the keys of a batch."""

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
BACKWARD_CODE = getattr(inspect.unwrap(torch.autograd.backward), "__code__", None)
"""Of the function that waits for a pass: frames that run it hold what it was called with."""
LOSSES, SEEDS = "tensors", ("grad_tensors", "grad_variables")
"""Its arguments: the losses, and gradients that were given for them."""


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


is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""What a wrapper of a transform that has ended holds; any other tensor as it is."""


def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without what it looks for first: transforms, and wrappers that they left."""
    return super(Function, function).apply  # type: ignore[misc]


def is_one_graph(compiled: Any) -> bool:
    """Whether a compiled module may have no graph breaks (fullgraph=True)."""
    told = getattr(compiled.dynamo_ctx, "fullgraph", None)
    if told is not None:
        return told
    # torch 2.6 remembers it by the class of what converts frames alone.
    made = getattr(compiled.dynamo_ctx.callback, "_torchdynamo_orig_callable", None)
    return type(made).__name__ == "ConvertFrameAssert"


def gradient_hooks(parameter: Tensor) -> Collection[Any]:
    """Hooks on a tensor's gradient, before and after it is accumulated."""
    before = parameter._backward_hooks
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    found: Collection[Any] = () if before is None else before.values()
    return [*found, *after.values()] if after else found


def of_class(kind: type[T], x: Tensor) -> T:
    """A leaf of this class in the memory of x; none of the class's functions are called."""
    return Tensor._make_subclass(kind, x.detach(), True)


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """The tables of hooks that every module calls, by their numbers."""
    from torch.nn.modules import module

    forward = ("pre_hooks", "hooks", "hooks_with_kwargs", "hooks_always_called")
    kinds = [*(f"forward_{kind}" for kind in forward), "backward_pre_hooks", "backward_hooks"]
    return [getattr(module, f"_global_{kind}") for kind in kinds]


end_of_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
"""(GPU, pool): its allocator gives out no more of this memory, as after a capture."""


def memory_of(x: Tensor) -> int:
    """The same number for tensors that share their memory, as long as one of them lives."""
    return x.untyped_storage()._cdata


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad) runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""torch.export traces; never before torch 2.7."""


def can_compile() -> bool:
    """Whether anything has been compiled, or can have been: dynamo is imported."""
    return "torch._dynamo" in sys.modules


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

NEXT_INDEX = "_next_index"
"""The method that asks the sampler for a batch: a frame of it says who is asking."""
SENT, RECEIVED = "_send_idx", "_rcvd_idx"
"""With workers: places of the next batch to be drawn, and of the next to be handed out."""
YIELDED = "_num_yielded"
"""Batches that were handed out."""
INDEX_SAMPLER = "_index_sampler"
"""The batch sampler that it asks."""

# Opacus

OPACUS_MARK = "_forward_counter"
"""Opacus keeps it on every trainable parameter until cleanup(): its uses that had no backward yet."""
OPACUS_HOOKS = "autograd_grad_sample_hooks"
"""The list, on a wrapped model, of the handles that its cleanup() removes."""


def check_unprocessed(gradient: Any) -> None:
    """Raises ValueError if a gradient, or one of a list, has Opacus' mark of those that were clipped."""
    from opacus.optimizers.optimizer import _check_processed_flag

    _check_processed_flag(gradient)


def mark_processed(gradient: Any) -> None:
    """Sets that mark on a gradient, or on each of a list."""
    from opacus.optimizers.optimizer import _mark_as_processed

    _mark_as_processed(gradient)


def forget_passes(module: nn.Module) -> None:
    """What Opacus keeps of passes that did not end: inputs of layers, counts, sums of one pass."""
    for part in module.modules():
        for left in ("activations", "max_batch_len"):
            part.__dict__.pop(left, None)
    for p in module.parameters():
        p.__dict__.pop("_current_grad_sample", None)
        if OPACUS_MARK in p.__dict__:
            setattr(p, OPACUS_MARK, 0)


ATTRIBUTES = {
    "torch.Tensor": ("_version", "_is_view"),
    "torch.nn.Module": (
        "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
        "_is_full_backward_hook",
    ),
    "torch.nn.Conv2d": ("_reversed_padding_repeated_twice",),
    "torch.compile": ("_orig_mod",),
    "opacus.DPOptimizer": ("_get_flat_grad_sample",),
    "opacus.GradSampleModule": ("_module", "_per_sample_gradient_norms"),
    "lightning.DDPStrategy": (
        "_start_method", "_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper",
        "_model_averaging_period",
    ),
    "transformers.Trainer": ("_get_train_sampler", "_signature_columns", "_train_batch_size"),
    "torch.ops": ("_schema",),
    "sys": ("_getframe", "_current_frames"),
    "namedtuple": ("_asdict", "_replace"),
}  # fmt: skip
"""Attributes of others that are read where they are needed, by whose they are."""


def top_dispatch_mode() -> Any:
    """The mode of this thread that hears of an operation first; None without one."""
    modes = dispatch_modes()
    return torch._C._get_dispatch_stack_at(modes - 1) if modes else None

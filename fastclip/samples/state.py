"""A probe leaves generators, buffers, attributes and parameters unchanged.

Inside, constant or tiny parameters and entries get random values (they are stirred). Behind a zero
head, a gate of zero, a LayerScale of 1e-6 or zero columns of a wide head, samples may be coupled from
the first step on, which must be found.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from fastclip.core.compiler import can_compile
from fastclip.core.numerics import full_float32
from fastclip.core.torch_names import (
    CheckpointFunction,
    DropoutBase,
    TorchDispatchMode,
    current_task,
    hear_functions_given,
    hooks_of_all_modules,
    memory_of,
    parametrizations_apart,
    tree_leaves,
)
from fastclip.errors import UnsupportedLayerError
from fastclip.samples.inputs import parts_of
from fastclip.samples.randomness import Generators
from fastclip.trace.findings import line_of

# -------------------------------------------------------------------------------------------------
# Gradients in a dry run: the same backward pass gives the same result twice, to the last bit.
#
# Two backward passes together identify the sample of an entry. A sum that is added up in another order
# each time would be taken for a sum over several samples. On a GPU, many kernels add up in the order in
# which their threads arrive, attention kernels above all. Their gradients may be rounded to 16 bits
# afterwards, and one entry in a hundred then differs by 2^-8. Here other kernels of PyTorch use a fixed
# order, and a backward pass of attention is computed from its inputs, sample by sample.


Found = tuple[Tensor | None, ...]
ATTENTION_BACKWARD = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward").default
    for name in ("flash", "efficient", "cudnn")
)
"""Operators that compute the gradients of fused attention on a GPU."""
_SCORES = 2**26
"""Number of scores [h, l, s] in memory at a time, unless one head has more: 256 MiB, four times."""


def normal(like: Tensor, seed: int) -> Tensor:
    """Random float32 numbers in the shape of `like`, on its device: logits may be 10^9 numbers."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)


def gradients(
    outputs: Sequence[Tensor], edges: Sequence[GradientEdge], seeds: Sequence[Tensor],
    *, keep_graph: bool = False,
) -> Found:  # fmt: skip
    """Gradients of the outputs, each times its seed, with respect to the edges; None if not reached."""
    with RowByRow() if _gpu_in_use() else nullcontext():
        return torch.autograd.grad(
            outputs, edges, seeds, retain_graph=keep_graph, allow_unused=True
        )


@contextmanager
def in_order() -> Iterator[None]:
    """Make kernels add up in a fixed order inside, if PyTorch has such a kernel and a GPU is in use.

    A CPU's order is fixed. Forward passes run inside, too. Some compute their gradients differently
    there, and a checkpoint computes them again.
    """
    if not _gpu_in_use():
        yield
        return
    mode, memory = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    filled = memory.fill_uninitialized_memory
    try:
        memory.fill_uninitialized_memory = False
        torch.set_deterministic_debug_mode(mode or "warn")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?is).*determinis")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filled


def _gpu_in_use() -> bool:
    """Whether a GPU is in use, by the model or others: inner tensors of a CPU model may lie on a GPU."""
    return torch.cuda.is_initialized()


class RowByRow(TorchDispatchMode):
    """Replaces backward passes of fused attention by those of plain attention, a few heads of one sample
    at a time. Like the fused kernel, it does not hold all scores."""

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTENTION_BACKWARD:
            schema = function._schema  # type: ignore[attr-defined]  # of an operator
            names = [argument.name.rstrip("_") for argument in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            # only the kernel knows its dropout mask
            if not given["dropout_p"] and not given["query"].is_nested:
                last = "flash" in schema.name  # its causal mask ends at the last key
                return attention_backward(given, ends_last=last)[: len(schema.returns)]
        return function(*args, **kwargs)


def attention_backward(given: Mapping[str, Any], *, ends_last: bool = False) -> Found:
    """Gradients of attention without dropout.

    With scores S = scale q k^T + bias, P = softmax(S) and the gradient dO of P v:
    dv = P^T dO, dS = P (dO v^T - rowsum(P dO v^T)), dq = scale dS k, dk = scale dS^T q.

    Args:
        given: by name: query [b, h, l, e]; key and value [b, k, s, e], with each head used by h / k
            query heads; grad_out, is_causal, scale; and attn_bias, if any, broadcast to [b, h, l, s].
            The last entry of grad_input_mask asks for the gradient of attn_bias.
        ends_last: with is_causal, the last query sees the last key, not the first one the first.

    Returns:
        of query, key, value and the bias; the last is None if it is not asked for.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    bias: Any = given.get("attn_bias")
    bias = bias if bias is None or not bias.numel() else bias[(None,) * (4 - bias.dim())]
    asked = bias is not None and given.get("grad_input_mask", (False,))[-1]
    of_bias: Any = torch.zeros_like(bias, dtype=torch.float32) if asked else None
    (heads, positions), (of_keys, seen) = query.shape[1:3], key.shape[1:3]
    found = [torch.empty_like(x) for x in (query, key, value)]
    for sample in range(len(query)):
        sums = [x.new_zeros(x.shape, dtype=torch.float32) for x in (key[sample], value[sample])]
        for mine in _blocks(heads, heads // of_keys, _SCORES // max(positions * seen, 1)):
            theirs = slice(mine.start * of_keys // heads, -(-mine.stop * of_keys // heads))
            each = (mine.stop - mine.start) // (theirs.stop - theirs.start)
            q, out = (x[sample, mine].float() for x in (query, given["grad_out"]))
            k, v = (x[sample, theirs].float().repeat_interleave(each, 0) for x in (key, value))
            scores = scale * q @ k.mT
            if given.get("is_causal"):
                first = 1 + (seen - positions if ends_last else 0)
                scores.masked_fill_(
                    torch.ones_like(scores[0], dtype=torch.bool).triu(first), -torch.inf
                )
            if bias is not None:
                at = sample % len(bias), mine if bias.shape[1] > 1 else slice(None)
                scores += bias[at]
            p = scores.softmax(-1).nan_to_num_(0.0)  # of a position that attends to nothing
            del scores
            of_scores = out @ v.mT
            of_scores.sub_((p * of_scores).sum(-1, keepdim=True)).mul_(p)
            found[0][sample, mine] = (scale * of_scores @ k).to(query.dtype)
            for total, x in zip(sums, (scale * of_scores.mT @ q, p.mT @ out), strict=True):
                total[theirs] += x.unflatten(0, (-1, each)).sum(1)
            if asked:
                of_bias[at] += of_scores.sum_to_size(of_bias[at].shape)
        found[1][sample], found[2][sample] = sums
    if asked:
        of_bias = of_bias.to(bias.dtype).view(given["attn_bias"].shape)
    return (*found, of_bias)


def _blocks(heads: int, shared: int, few: int) -> Iterator[slice]:
    """Groups of about `few` heads that are computed together: all heads of some keys, each of which is
    used by `shared` heads, or a part of the heads of one key."""
    step = max(few // shared * shared, min(max(few, 1), shared))
    for begin in range(0, heads, max(step, shared)):
        end = min(begin + max(step, shared), heads)
        yield from (slice(at, min(at + step, end)) for at in range(begin, end, step))


# -------------------------------------------------------------------------------------------------
# The function that runs torch's reentrant checkpoints, while they are observed.


_APPLIED: list[tuple[Callable[..., Any], int]] = []
"""The functions, and the backward pass that each was entered in."""


@contextmanager
def applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Run reentrant checkpoints by this function inside; of several functions, by the last one."""
    entered = (apply, current_task())
    _APPLIED.append(entered)
    _apply_the_last()
    try:
        yield
    finally:  # in whatever order they are left
        if entered in _APPLIED:
            _APPLIED.remove(entered)
        _apply_the_last()


def _apply_the_last() -> None:
    if current_task() == -1:  # left by a failed backward pass
        _APPLIED[:] = [entered for entered in _APPLIED if entered[1] == -1]
    if _APPLIED:
        CheckpointFunction.apply = staticmethod(_APPLIED[-1][0])  # type: ignore[method-assign, assignment]
    elif "apply" in CheckpointFunction.__dict__:
        del CheckpointFunction.apply


# -------------------------------------------------------------------------------------------------
# A run's writes into a model's own tensors are undone, through whichever tensor they were made. So is
# new memory that it gives them (`.data = `, a module's `.to` in its forward).


def written_by(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


class Writes(TorchDispatchMode):
    """Copies a tensor before the first write to it inside, also through `.data` or a view.

    Args:
        state: the tensors of a model by name.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._state: dict[int, list[tuple[str, Tensor]]] = {}
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        """Each tensor, and a tensor on its original memory."""
        for name, x in state.items():
            try:
                for part in parts_of(x):
                    self._state.setdefault(memory_of(part), []).append((name, part))
                self._held[name] = x, x.data
            except (NotImplementedError, RuntimeError):  # shards have no single memory
                continue
        self._saved: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._put_back: list[str] = []

    @property
    def written(self) -> list[str]:
        """Names of tensors that were written to, or have other memory."""
        return list(
            dict.fromkeys([*(name for name, _ in self._saved), *self._put_back, *self._moved()])
        )

    def _moved(self) -> list[str]:
        return [name for name, (x, lain) in self._held.items() if not _lies_as(x, lain)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._save(written_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _save(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            try:
                places = [memory_of(part) for part in parts_of(x)]
            except (NotImplementedError, RuntimeError):
                continue
            for place in places:
                for name, kept in self._state.get(place, ()):
                    if (name, place) not in self._saved:
                        self._saved[name, place] = kept, kept.detach().clone()

    def check(self, holds: Callable[[Tensor], bool]) -> None:
        """Check that no parameter takes numbers of the batch.

        Args:
            holds: whether a tensor holds such numbers.

        Raises:
            UnsupportedLayerError: naming those that do.
        """
        changed = {name: self._held[name][0] for name in self.written}
        names = [n for n, x in changed.items() if isinstance(x, nn.Parameter) and holds(x)]
        if names:
            raise UnsupportedLayerError(
                f"Parameters {names} take values of the batch in the forward pass, and these values get "
                "no noise. Let the optimizer train the parameters, and omit max_norm.",
                doc="carried-state",
            )

    def put_back(self) -> None:
        """Restore all tensors that were written to, in their original memory."""
        self._put_back = self._moved()
        for name in self._put_back:
            x, lain = self._held[name]
            x.data = lain
        for x, before in self._saved.values():
            x.data.copy_(before)


def _lies_as(x: Tensor, other: Tensor) -> bool:
    """Whether they are the same entries of the same memory."""
    return x.shape == other.shape and [*map(_where, parts_of(x))] == [*map(_where, parts_of(other))]


def _where(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, memory_of(x), x.shape, x.stride(), x.storage_offset()


# -------------------------------------------------------------------------------------------------


STIR = 0.1
"""Standard deviation of the noise that is added to a constant or tiny parameter."""
_SMALL = 1e-2
"""A parameter below this is tiny, and so is an entry that is so many times smaller than the largest."""
PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""Types that hold no other objects; most attributes have these types."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_OTHERS = frozenset({"builtins", "functools", "torch", "numpy", "fastclip"})
"""Packages with objects that keep nothing of a batch."""
_DEEPEST = 3
_LONGEST = 64
"""Length up to which containers are searched."""
TORCHS = frozenset(vars(nn.Module()))
"""Names of the attributes that torch keeps on every module."""
_PARTS = frozenset(
    name
    for name, kept in vars(nn.Module()).items()
    if isinstance(kept, dict) and ("hook" in name or name == "_modules")
)


class Trains(BaseException):
    """The function of a dry run computes gradients itself: it is a loop, or a step of one."""


@contextmanager
def no_training() -> Iterator[None]:
    """Let a backward pass raise `Trains` inside, before anything is computed."""
    backward, here = torch.autograd.backward, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != here:
            return backward(*args, **kwargs)
        raise Trains

    torch.autograd.backward = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward = backward  # type: ignore[assignment]


@contextmanager
def undisturbed(model: nn.Module, seed: int, *, followed: bool = True) -> Iterator[Writes]:
    """Run without dropout, with generators of `seed`, inside; afterwards everything is restored.

    Products are in full float32. Libraries may use tf32 for one batch size and not for another, and the
    rounding would be taken for an effect of another sample.

    Args:
        followed: follow operations; else writes through `.data` are not undone.

    Yields the writes inside.

    Raises:
        UnsupportedLayerError: buffers have changed.
    """
    buffers = [(name, b, b._version, b.clone()) for name, b in model.named_buffers()]
    named = dict(model.named_buffers()) | dict(model.named_parameters())
    writes = Writes({**named, **{f" {n}": x for n, x in enumerate(own_tensors(model))}})
    with ExitStack() as stack:
        stack.enter_context(_own_attributes(model))
        stack.enter_context(generators_of(model).seeded(seed))
        stack.enter_context(_uncompiled())
        stack.enter_context(in_order())
        stack.enter_context(full_float32())
        stack.enter_context(parametrizations_apart())
        stack.enter_context(_whole_checkpoints())
        stack.callback(writes.put_back)
        if followed:
            stack.enter_context(hear_functions_given(_check_functions))
            stack.enter_context(writes)
        for module in model.modules():
            if isinstance(module, DropoutBase):
                module.p = 0.0  # an attribute like any other: put back
        try:
            yield writes
        finally:
            changed = [name for name, buffer, version, _ in buffers if buffer._version != version]
            with torch.no_grad():
                for _, buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)
            _forget_casts()  # of weights cast without a graph
    replaced = [name for name, buffer, _, _ in buffers if model.get_buffer(name) is not buffer]
    through_data = [name for name, *_ in buffers if name in writes.written]
    if names := list(dict.fromkeys([*changed, *replaced, *through_data])):
        of_numbers = all(b.is_floating_point() for name, b, *_ in buffers if name in names)
        count = "" if of_numbers else ", and count calls in a Python number (self.calls += 1)"
        raise UnsupportedLayerError(
            f"Buffers {names} change in the forward pass, and values of the batch in them get no noise. "
            f"Freeze them with .eval(), or remove them{count}.",
            doc="carried-state",
        )


def _check_functions(operator: Any) -> None:
    raise UnsupportedLayerError(
        f"{operator} at {line_of(sys._getframe(1))} calls functions in which samples and private layers "
        "cannot be followed. Use Python's if and for, or torch.where."
    )


def _forget_casts() -> None:
    """Let autocast cast weights anew."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        torch.clear_autocast_cache()


@contextmanager
def _own_attributes(model: nn.Module) -> Iterator[None]:
    """Restore what the forward pass sets on modules (counters, stashes, hooks, parts)."""
    saved = [(table, dict(table)) for _, table in tables_of(model)]
    parts = [(table, table.copy()) for table in _parts_of(model)]
    filled = [(one, copy.copy(one)) for one in _held(model) if type(one) in _CONTAINERS]
    tensors = [(x, x._version, x.detach().clone()) for x in own_tensors(model)]
    try:
        yield
    finally:
        for now, before in saved:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for table, before in parts:  # the next run finds no note of them: it would add more
            if [*table.items()] != [*before.items()]:
                table.clear()
                table.update(before)
        for container, before in filled:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(before)
        with torch.no_grad():
            for tensor, version, numbers in tensors:
                if tensor._version != version:  # such as the counts of a metric
                    tensor.copy_(numbers)


def _parts_of(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """The tables of torch's hooks, of each module and of all modules, and of the parts of a module."""
    yield from hooks_of_all_modules()
    for module in model.modules():
        tables = (vars(module).get(name) for name in _PARTS)
        yield from (table for table in tables if isinstance(table, dict))  # TorchScript has others


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold in addition to their parameters and buffers."""
    return (x for x in _held(model) if type(x) is Tensor and not x.is_inference())


def generators_of(model: nn.Module) -> Generators:
    """The generators that the model may draw from."""
    return Generators(_held(model))


def tables_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attributes of the modules, and of the objects that they hold (running statistics), by path."""
    known: set[int] = set()
    for path, module in model.named_modules():
        yield path, vars(module)
        for name, value in list(vars(module).items()):
            for one in () if name in TORCHS or type(value) in PLAIN else tree_leaves(value):
                if is_object(one) and id(one) not in known:
                    known.add(id(one))
                    yield f"{path}.{name}".lstrip("."), vars(one)


def is_object(value: Any) -> bool:
    """Whether it is an object of a custom class, which may keep anything."""
    if isinstance(value, (nn.Module, Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OTHERS


def _held(model: nn.Module) -> Iterator[Any]:
    """The objects that modules hold, also in containers or objects, except torch's own attributes."""
    known: set[int] = set()
    level = [v for _, table in tables_of(model) for n, v in table.items() if n not in TORCHS]
    for _ in range(_DEEPEST):
        level = [one for one in level if id(one) not in known]
        known.update(map(id, level))
        yield from level
        few = [one for one in level if type(one) in _CONTAINERS and len(one) <= _LONGEST]
        level = [x for one in few for x in (one.values() if isinstance(one, dict) else one)]


def _uncompiled() -> AbstractContextManager:
    """Run compiled parts of the model uncompiled inside: nothing is compiled for a few samples."""
    if not can_compile():  # and importing the compiler is slow
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _whole_checkpoints() -> Iterator[None]:
    """Run the parts of reentrant checkpoints with a graph inside, because gradients are needed."""

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        return run_function(*args)

    with applied_by(apply):
        yield


@contextmanager
def stirred(parameters: Iterable[nn.Parameter], *, entries: bool = True) -> Iterator[None]:
    """Give constant or tiny parameters random values inside, because they could hide coupled samples. So
    do entries that are tiny next to the others (the columns of a widened head). Change the others a
    little, because equal rows of a table would hide which row a sample takes.

    They keep their signs, because the model may take their logarithm.

    Args:
        entries: of the other parameters change, too.
    """
    saved: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter in parameters:
            values = parameter.data
            size = _deviation(values, entries)
            if size is None:
                continue
            before = values.clone()
            saved.append((values, before))
            noise = torch.randn(
                before.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            noise = noise.to(values.device, values.dtype)
            noise = torch.where(before == 0, noise, noise.abs() * before.sign())
            values.copy_(before + size * noise)
        _forget_casts()  # of weights as they were
        yield
    finally:
        for values, before in reversed(saved):  # views of one storage were stirred in turn
            values.copy_(before)


def _deviation(values: Tensor, entries: bool) -> float | Tensor | None:
    """The standard deviation of the noise that is added to entries; None: no noise."""
    if not values.is_floating_point() or not values.numel():
        return None
    low, high = torch.aminmax(values)
    largest = torch.maximum(-low, high)
    if bool(low == high) or bool(largest < _SMALL):
        return STIR
    if not entries:
        return None
    rms = float(torch.linalg.vector_norm(values)) / math.sqrt(values.numel())
    return torch.where(values.abs() < _SMALL * largest, rms, _SMALL * rms).to(values.dtype)

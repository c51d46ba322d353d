"""A probe leaves no trace: generators, buffers, attributes and parameters are as before.

Inside, parameters and entries that say nothing yet are stirred: rows coupled behind a zero head, a gate
of zero, a LayerScale of 1e-6 or zero columns of a wide head are coupled from the first step on, and must
show.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._dynamo import can_compile
from fastclip._torch import (
    DropoutBase,
    hear_functions_given,
    hooks_of_all_modules,
    parametrizations_apart,
    tree_leaves,
)
from fastclip.errors import UnsupportedLayerError
from fastclip.ops.precision import full_float32
from fastclip.samples.gradients import in_order
from fastclip.samples.randomness import Generators
from fastclip.samples.reentrant import applied_by
from fastclip.samples.writes import Writes
from fastclip.trace.findings import line_of

STIR = 0.1
"""Standard deviation of what is added to a parameter that says nothing."""
_SMALL = 1e-2
"""A parameter below that says nothing, and an entry so many times smaller than the largest."""
PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""What holds nothing else; most attributes are of these types."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_OTHERS = frozenset({"builtins", "functools", "torch", "numpy", "fastclip"})
"""Whose objects keep nothing of a batch."""
_DEEPEST = 3
_LONGEST = 64
"""Containers are looked into so far."""
TORCHS = frozenset(vars(nn.Module()))
"""What torch keeps on every module."""
_PARTS = frozenset(
    name
    for name, kept in vars(nn.Module()).items()
    if isinstance(kept, dict) and ("hook" in name or name == "_modules")
)


class Trains(BaseException):
    """What is run for a look computes gradients itself: it is a loop, or a step of one."""


@contextmanager
def no_training() -> Iterator[None]:
    """Inside, a backward pass raises `Trains` before anything is computed."""
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
    """Without dropout, from generators of `seed`; afterwards everything is as before.

    And in full float32: libraries take tf32 for batches of one size, for another they may not, and what
    that rounds away would look like another row's.

    Args:
        followed: operations are; what is written through `.data` stays else.

    Yields what is written to inside.

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
            stack.enter_context(hear_functions_given(_refuse_functions))
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
    if told := list(dict.fromkeys([*changed, *replaced, *through_data])):
        of_numbers = all(b.is_floating_point() for name, b, *_ in buffers if name in told)
        count = "" if of_numbers else ", and count calls in a Python number (self.calls += 1)"
        raise UnsupportedLayerError(
            f"buffers {told} change in the forward pass: what they learn from the batch is not private; "
            f"freeze them (eval mode) or remove them{count}"
        )


def _refuse_functions(operator: Any) -> None:
    raise UnsupportedLayerError(
        f"{operator} at {line_of(sys._getframe(1))} runs functions that it is given where samples, and "
        "private layers inside, cannot be followed. Use Python's if and for, or torch.where"
    )


def _forget_casts() -> None:
    """Autocast casts weights anew."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        torch.clear_autocast_cache()


@contextmanager
def _own_attributes(model: nn.Module) -> Iterator[None]:
    """What the forward pass sets on modules (counters, stashes, hooks, parts) is put back."""
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
    """The tables in which torch keeps hooks, of each module and of all, and the modules of a module."""
    yield from hooks_of_all_modules()
    for module in model.modules():
        tables = (vars(module).get(name) for name in _PARTS)
        yield from (table for table in tables if isinstance(table, dict))  # TorchScript has others


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold beside their parameters and buffers."""
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
    """Whether somebody's own class made it, whose objects may keep anything."""
    if isinstance(value, (nn.Module, Tensor, type)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _OTHERS


def _held(model: nn.Module) -> Iterator[Any]:
    """What modules hold, themselves, in containers or in objects; not what torch keeps on them."""
    known: set[int] = set()
    level = [v for _, table in tables_of(model) for n, v in table.items() if n not in TORCHS]
    for _ in range(_DEEPEST):
        level = [one for one in level if id(one) not in known]
        known.update(map(id, level))
        yield from level
        few = [one for one in level if type(one) in _CONTAINERS and len(one) <= _LONGEST]
        level = [x for one in few for x in (one.values() if isinstance(one, dict) else one)]


def _uncompiled() -> AbstractContextManager:
    """Compiled parts of the model run as they were written: nothing is compiled for a few rows."""
    if not can_compile():  # and to import what compiles is slow
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _whole_checkpoints() -> Iterator[None]:
    """Reentrant checkpoints run their part with the graph, so that gradients can be asked for."""

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        return run_function(*args)

    with applied_by(apply):
        yield


@contextmanager
def stirred(parameters: Iterable[nn.Parameter], *, entries: bool = True) -> Iterator[None]:
    """Constant or tiny parameters get random values inside, and so do entries that say nothing beside
    the others (the columns of a widened head): nothing hides behind them. The others change a little,
    so that no two are equal: a row of a table for each number of a sample shows.

    They keep their signs: a logarithm may be taken of them.

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
    """The standard deviation of what is added to entries; None: nothing is."""
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

"""Modules that run around uses of parameters: which one returns rows that were moved in their places."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip._dynamo import as_written, disable_dynamo, is_exporting, pass_over
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.errors import BatchSizeError, where
from fastclip.model.own_forward import plain_forward, run_plain
from fastclip.samples.calls import Forward
from fastclip.samples.inputs import flatten, rebuild
from fastclip.uses.arguments import leaves_of
from fastclip.uses.proxy import is_private
from fastclip.uses.routing import Routing


def follow(
    path: str, keeper: BookKeeper, inner: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """Run a module that is no private layer; where it moves rows, their owners will be told."""
    probe = keeper.calls.probe
    if probe is not None:
        if any(is_private(x) for x in leaves_of((args, kwargs))):
            probe.layout.users.add(path)
        probe.inside.append(path)
        try:
            out = inner(*args, **kwargs)
        finally:
            probe.inside.pop()
        if any(is_private(x) for x in leaves_of(out)):
            probe.layout.users.update((path, *probe.inside[-1:]))
        probe.leaves(path, out)
        return out
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    forward = keeper.running_forward()
    if forward is not None and forward.layout is not None and path in forward.layout.users:
        inner = partial(eagerly, inner)
    if forward is None or forward.layout is None or forward.batch_size is None:
        return inner(*args, **kwargs)
    enter(path, forward)
    try:
        out = inner(*args, **kwargs)
    finally:
        _, routing = forward.inside.pop()
    return left(path, forward, routing, out)


def exports_as_it_was(private: Callable[..., Any]) -> FunctionType:
    """Decorator of the forward of an intercepted module: torch.export finds the one that it had.

    What is exported is a program that is not private: no gradient comes back from it to the engine.
    """

    @functools.wraps(private, updated=())  # not what torch.compile is told of `private`
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            return run_plain(self, *args, **kwargs)
        return private(self, *args, **kwargs)

    pass_over(either)
    return cast(FunctionType, either)


def shown_as(forward: FunctionType, module: nn.Module) -> MethodType:
    """`forward` bound to the module, with the signature that it had, which torch.export asks for.

    Names of inputs and of dynamic shapes are those of the arguments there.
    """
    own = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    own.__dict__.update(forward.__dict__)
    with contextlib.suppress(TypeError, ValueError):  # a forward that is not Python's
        asked = inspect.signature(vars(module).get("forward") or plain_forward(module))
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        known = [first, *asked.parameters.values()]
        own.__signature__ = asked.replace(parameters=known)  # type: ignore[attr-defined]
    return MethodType(own, module)


@disable_dynamo
def eagerly(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run code that uses parameters by itself: a compiler would not see what becomes of them."""
    return as_written(inner)(*args, **kwargs)


def enter(path: str, forward: Forward) -> None:
    """This module runs; what is learnt inside may say that it moves rows."""
    forward.inside.append((path, Routing(forward.batch_size or 0)))


def left(path: str, forward: Forward, routing: Routing, out: Any) -> Any:
    """What the module returns; if it moves rows, gradients come in there whose owners are known."""
    if forward.layout is None or path not in forward.layout.returns:
        return out
    leaves, structure = flatten(out)
    places = forward.layout.returns[path]
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, PackedSequence))]
    numbers = [
        i for number, i in enumerate(tensors)
        if number in places and type(leaves[i]) is Tensor and leaves[i].requires_grad
    ]  # fmt: skip
    batch = forward.batch_size or 0
    if not all(places[tensors.index(i)].fits(leaves[i], batch) for i in numbers):
        forward.layout.lost([path])
        forward.layout.watch = None  # which the next call looks at again
        raise BatchSizeError(
            f"{where(path)}: it returns other rows than in all calls before, so whose the rows inside "
            "are was not followed; call the model on this batch again, which is known now"
        )
    passed = routing.leave(
        [leaves[i] for i in numbers], [places[tensors.index(i)] for i in numbers]
    )
    for i, x in zip(numbers, passed, strict=True):
        leaves[i] = x
    return rebuild(leaves, structure)

"""A probe leaves no trace: generators, buffers, attributes and parameters are as before.

Inside, parameters that say nothing yet are stirred: rows coupled behind a zero head, a gate of zero or a
LayerScale of 1e-6 are coupled from the first step on, and must show.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from fastclip.errors import UnsupportedLayerError

STIR = 0.1
"""Standard deviation of what is added to a parameter that says nothing."""
_SMALL = 1e-2
_MODULES = frozenset(vars(nn.Module()))
"""Attributes that are torch's own."""


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
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Without dropout, from generators of `seed`; afterwards everything is as before.

    Raises:
        UnsupportedLayerError: buffers have changed.
    """
    saved = [(name, b, b._version, b.clone()) for name, b in model.named_buffers()]
    with ExitStack() as stack:
        stack.enter_context(_own_attributes(model))
        stack.enter_context(_generators(seed))
        stack.enter_context(_uncompiled())
        stack.enter_context(_whole_checkpoints())
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0  # an attribute like any other: put back
        try:
            yield
        finally:
            changed = [name for name, buffer, version, _ in saved if buffer._version != version]
            with torch.no_grad():
                for _, buffer, version, value in saved:
                    if buffer._version != version:
                        buffer.copy_(value)
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    torch.clear_autocast_cache()  # of weights cast without a graph
    replaced = [name for name, buffer, _, _ in saved if model.get_buffer(name) is not buffer]
    if changed or replaced:
        raise UnsupportedLayerError(
            f"buffers {[*changed, *replaced]} change in the forward pass: what they learn from the "
            "batch is not private; freeze them (eval mode) or remove them"
        )


@contextmanager
def _own_attributes(model: nn.Module) -> Iterator[None]:
    """What the forward pass sets on modules (counters, stashes) is put back."""
    saved = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = [value for _, before in saved for name, value in before.items() if name not in _MODULES]
    tensors = [
        (x, x._version, x.detach().clone())
        for x in held if type(x) is Tensor and not x.is_inference()
    ]  # fmt: skip
    lists = [(value, value.copy()) for value in held if type(value) in (list, dict, set)]
    try:
        yield
    finally:
        for now, before in saved:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for kept, contents in lists:
            kept.clear()
            (kept.extend if isinstance(kept, list) else kept.update)(contents)
        with torch.no_grad():
            for tensor, version, numbers in tensors:
                if tensor._version != version:  # such as the counts of a metric
                    tensor.copy_(numbers)


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Every generator that a model may draw from starts at `seed`, and is put back."""
    numpy = sys.modules.get("numpy")
    python = random.getstate()
    array = None if numpy is None else numpy.random.get_state()
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


def generators_now() -> list[Any]:
    """The states of the generators that a model's layers draw from."""
    states: list[Any] = [random.getstate(), torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def drew_since(before: list[Any]) -> bool:
    """Whether random numbers were drawn since `generators_now()` returned this."""
    python, *states = before
    now = generators_now()
    same = all(torch.equal(a, b) for a, b in zip(states, now[1:], strict=True))
    return python != now[0] or not same


def _uncompiled() -> AbstractContextManager:
    """Compiled parts of the model run as they were written: nothing is compiled for a few rows."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and the import is slow
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _whole_checkpoints() -> Iterator[None]:
    """Reentrant checkpoints run their part with the graph, so that gradients can be asked for."""

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        return run_function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del CheckpointFunction.apply


@contextmanager
def stirred(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Constant or tiny parameters get random values inside: nothing hides behind them."""
    saved: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter in parameters:
            values = parameter.data
            if not values.is_floating_point() or not values.numel() or not _says_nothing(values):
                continue
            saved.append((parameter, values.clone()))
            noise = torch.randn(
                values.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            values.add_(noise.to(values.device, values.dtype), alpha=STIR)
        yield
    finally:
        for parameter, before in saved:
            parameter.data.copy_(before)


def _says_nothing(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    return bool(low == high) or bool(torch.maximum(-low, high) < _SMALL)

"""Which backend computes an operation: the PyTorch reference, Triton, or CUDA C++.

`FASTCLIP_BACKEND` is one of auto (default), reference, triton, cuda. "auto" takes a kernel if tensors
are on an NVIDIA GPU and one exists. "triton" takes Triton's kernels, also on the CPU through Triton's
interpreter (TRITON_INTERPRET=1). If a kernel is missing or its first launch fails, the reference
replaces it, with one warning. Errors in results are never hidden: kernels either equal the reference or
raise an error.

References compute traced steps (fastclip.trace), because torch does not see the launches of kernels. The
same holds while a compiler of torch traces.

On a CPU, "auto" takes the loops of fastclip._host ("host"), which are one loop in C++ and a chain of
operations in PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastclip.core.torch_names import Invented, followed, makes_graph
from fastclip.errors import ArgumentError, FastclipError, say

BACKENDS = ("auto", "reference", "triton", "cuda")
_MODULES = {
    "triton": "fastclip.ops.triton",
    "cuda": "fastclip.ops.cuda",
    "host": "fastclip.ops.host",
}
_HOST = ("host",)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class _State:
    requested: str
    kernels: dict[str, dict[str, Callable[..., Any]]] = field(default_factory=dict)
    """Backend -> operation -> launcher; filled when a backend is first asked for."""
    why_not: dict[str, str] = field(default_factory=dict)
    """Backend, or "backend operation" -> why it cannot be used."""
    proven: set[str] = field(default_factory=set)
    """"backend operation" of launches that have worked."""


def _from_environment() -> str:
    name = os.environ.get("FASTCLIP_BACKEND", "auto").strip().lower()
    if name not in BACKENDS:
        raise ArgumentError(f"FASTCLIP_BACKEND expects one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


_STATE = _State(_from_environment())
_NONE: dict[str, Callable[..., Any]] = {}
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Name -> reference of every operation that may have kernels."""
LOOPS: dict[str, Callable[..., Any]] = {}
"""Name -> reference of the parts of operations that fastclip._host may compute on a CPU."""
CALLS: dict[str, Callable[..., Any]] = {}
"""Name -> the operation in a compiler's graph (fastclip.ops.library): one call, whose backend is chosen
when it runs. An operation without one uses its reference there."""


def operation(reference: _Function) -> _Function:
    """Makes a reference the operation of its name: kernels replace it where they can."""
    OPERATIONS[reference.__name__] = reference
    return _dispatched(reference, _candidates)


def host_operation(reference: _Function) -> _Function:
    """Makes a reference a part of operations that only fastclip._host may compute, on a CPU."""
    LOOPS[reference.__name__] = reference
    return _dispatched(reference, lambda device: _HOST if computes_on(device) else ())


def _dispatched(
    reference: _Function, candidates: Callable[[torch.device], tuple[str, ...]]
) -> _Function:
    name = reference.__name__
    keys = {backend: f"{backend} {name}" for backend in _MODULES}

    @functools.wraps(reference)
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args and isinstance(args[0], Tensor) else _first_tensor(args)
        if tensor is None or isinstance(tensor, Invented):
            return in_graph(name, reference)(*args, **kwargs)
        if _STATE.requested == "reference" or followed():
            return in_graph(name, reference)(*args, **kwargs)
        for backend in candidates(tensor.device):
            key = keys[backend]
            if key in _STATE.why_not:
                continue
            kernel = _STATE.kernels.get(backend, _NONE).get(name) or _kernel(backend, name)
            if kernel is None:
                continue
            if key in _STATE.proven:  # an error is one of the call, not of the machine
                result = kernel(*args, **kwargs)
            else:
                result = _first_launch(key, kernel, args, kwargs)
            if result is not NotImplemented:  # a shape or type this kernel does not take
                return result
        return reference(*args, **kwargs)

    dispatched.reference = reference  # type: ignore[attr-defined]
    return dispatched  # type: ignore[return-value]


def in_graph(name: str, otherwise: Any) -> Any:
    """Returns the operation for a graph that this thread makes for a compiler, else `otherwise`."""
    if not CALLS or _STATE.requested == "reference" or not makes_graph():
        return otherwise
    return CALLS.get(name, otherwise)


def computes_on(device: torch.device) -> bool:
    """Whether loops of fastclip._host are used on this device: a CPU, if no backend is named."""
    return device.type == "cpu" and _STATE.requested == "auto"


def has_kernel(name: str) -> bool:
    """Whether a Triton kernel is currently used for this operation on a GPU."""
    asked, key = _STATE.requested in ("auto", "triton"), f"triton {name}"
    return asked and key not in _STATE.why_not and name in _load("triton")


def has_loops(name: str) -> bool:
    """Whether fastclip._host currently computes this operation on a CPU."""
    return _STATE.requested == "auto" and name in _load("host")


def computes_reference(x: Tensor) -> bool:
    """Whether the reference computes norms of tensors like this one, in steps to be joined."""
    return _STATE.requested == "reference" or computes_on(x.device)


def _first_tensor(values: Any) -> Tensor | None:
    """Returns the first tensor among arguments, sequences of tensors included."""
    for value in values:
        found = _first_tensor(value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, Tensor):
            return found
    return None


def _candidates(device: torch.device) -> tuple[str, ...]:
    """Returns backends to try for tensors on `device`, in order."""
    if computes_on(device):
        return _HOST
    if _STATE.requested in ("triton", "cuda"):
        return (_STATE.requested,)
    return ("cuda", "triton") if device.type == "cuda" else ()


def _kernel(backend: str, name: str) -> Callable[..., Any] | None:
    """Returns the launcher, or None if it is missing or has failed; warns once."""
    key = f"{backend} {name}"
    if key in _STATE.why_not:
        return None
    found = _load(backend).get(name)
    if found is None:
        reason = _STATE.why_not.get(backend, "no kernel is written")
        _give_up(key, reason, warn=_STATE.requested == backend)
    return found


def _load(backend: str) -> dict[str, Callable[..., Any]]:
    if backend not in _STATE.kernels:
        try:
            module = _MODULES[backend]
            _STATE.kernels[backend] = dict(importlib.import_module(module).KERNELS)
        except ImportError as error:
            _STATE.kernels[backend] = {}
            _STATE.why_not[backend] = f"it cannot be imported: {error}"
    return _STATE.kernels[backend]


def _first_launch(key: str, kernel: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns the result, or NotImplemented if the kernel declined or its first launch failed."""
    try:
        result = kernel(*args, **kwargs)
    except (torch.OutOfMemoryError, FastclipError):
        raise
    except Exception as error:
        _give_up(key, f"its first launch failed: {type(error).__name__}: {error}", warn=True)
        return NotImplemented
    if result is not NotImplemented:
        _STATE.proven.add(key)
    return result


def _give_up(key: str, reason: str, *, warn: bool) -> None:
    _STATE.why_not[key] = reason
    if warn:
        backend, name = key.split()
        say(
            f"The {backend} kernel of {name} is not used ({reason}), and its PyTorch reference "
            "replaces it. Run `python -m fastclip.doctor` for details.",
            doc="missing-libraries",
        )


def backend_of(name: str, device: torch.device) -> tuple[str, str]:
    """Returns which backend an operation will use on `device`, and why, for the doctor."""
    if name not in OPERATIONS and name not in LOOPS:
        raise ArgumentError(f"name expects one of {sorted(OPERATIONS | LOOPS)}, got {name!r}.")
    if _STATE.requested == "reference":
        return "reference", "FASTCLIP_BACKEND=reference"
    reasons = []
    for backend in _candidates(device):
        key = f"{backend} {name}"
        if name in _load(backend) and key not in _STATE.why_not:
            return backend, "launched" if key in _STATE.proven else "available"
        if backend == "host":  # few operations have one, and none needs it
            continue
        reason = _STATE.why_not.get(key) or _STATE.why_not.get(backend, "no kernel is written")
        reasons.append(f"{backend}: {reason}")
    return "reference", "; ".join(reasons) or f"kernels run on NVIDIA GPUs, not on {device.type}"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Uses one backend inside the block, independent of the environment (tests, benchmarks)."""
    if name not in BACKENDS:
        raise ArgumentError(f"backend expects one of {', '.join(BACKENDS)}, got {name!r}.")
    before, _STATE.requested = _STATE.requested, name
    try:
        yield
    finally:
        _STATE.requested = before

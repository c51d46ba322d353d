"""Checks of a backward pass: leaked gradients, second engines, BatchNorm, tensors outside."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastclip.core.autograd import above_private
from fastclip.core.opacus_names import OPACUS_MARK
from fastclip.core.torch_names import BatchNormBase, gradient_hooks, hooks_of, transformed
from fastclip.errors import (
    GradSampleError,
    GraphError,
    ParameterLeakError,
    StepError,
    UnsupportedLayerError,
    say,
    where,
)
from fastclip.trace.findings import Report

# -------------------------------------------------------------------------------------------------
# The value of `p.grad_sample` of a private parameter after a pass: reading it raises an error.
#
# Programs around Opacus read per-sample gradients between backward and step. None are kept here, and
# `None` instead of them would only lead to an error about `None`.


_SAYS = (
    "p.grad_sample was read, but the fast mode keeps no per-sample gradients. Read "
    "optimizer.per_sample_norms and p.summed_grad, or pass grad_sample_mode='hooks' to make_private."
)


def _raise(*args: Any, **options: Any) -> NoReturn:
    raise GradSampleError(_SAYS)


class NotKept:
    """Stands for per-sample gradients that are not kept; false, and saved as an empty dict."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<per-sample gradients are not kept>"

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # torch.load accepts it, but not None's type

    def __deepcopy__(self, memo: dict[int, Any]) -> NotKept:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _raise()

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> NoReturn:
        _raise()

    __len__ = __getitem__ = __iter__ = __neg__ = __abs__ = __float__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _raise


NOT_KEPT = NotKept()


def show(parameters: Iterable[nn.Parameter], kept: NotKept | None = NOT_KEPT) -> None:
    """Set `p.grad_sample`, because a pass has contributed or the sums were cleared."""
    for p in parameters:
        p.grad_sample = kept  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------


class LeakGuard:
    """Raises an error when autograd computes a gradient of a private parameter.

    Private layers and uses return no gradient for their parameters. So a gradient comes from something
    that torch does not show (custom and scripted functions, a loss), and would be unclipped. A copy is
    unarmed, because hooks belong to the parameters.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._others: set[nn.Parameter] = set()
        """Guarded while they are trainable, although they are not trained privately."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LeakGuard:
        return LeakGuard()

    def __reduce__(self) -> Any:
        return LeakGuard, ()

    def arm(self, names: Mapping[nn.Parameter, str], grad_state: Any) -> None:
        """Guard these parameters; does nothing if armed.

        Args:
            grad_state: says which gradients hold no data.
        """
        if not self._handles:
            self._handles = [
                p.register_hook(partial(_check_private, name, ref(p), ref(grad_state)))
                for p, name in names.items()
                if p.requires_grad
            ]

    def arm_others(self, others: Mapping[nn.Parameter, str], grad_state: Any) -> None:
        """Guard parameters outside the private optimizer that have become trainable.

        Args:
            others: their names. grad_state: says whether a private backward pass runs; in other
                passes they may train.
        """
        for p, name in others.items():
            if p.requires_grad and p not in self._others:
                self._others.add(p)
                self._handles.append(
                    p.register_hook(partial(_check_gradient, name, ref(grad_state)))
                )

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._others.clear()


def _check_private(
    name: str, parameter: ref[nn.Parameter], grad_state: ref[Any], gradient: Tensor | None
) -> None:
    state, p = grad_state(), parameter()
    if gradient is None:
        return
    if state is None or p is None or not state.is_penalty(p, gradient):
        raise ParameterLeakError(
            f"Parameter {name!r} is used where fastclip cannot follow it, such as a custom autograd "
            "function or the loss, so its gradient would not be clipped. Use torch's functions in the "
            "model's forward, or register a rule for the layer."
        )
    state.penalties.take(p, grad_state)


def arm(grad_state: Any) -> None:
    """Guard every trainable parameter of a model, in the private optimizer or not."""
    grad_state.guard.arm(grad_state.names, grad_state)
    grad_state.guard.arm_others(grad_state.others, grad_state)


def _check_gradient(name: str, grad_state: ref[Any], gradient: Tensor | None) -> None:
    state = grad_state()
    if gradient is not None and state is not None and state.running:
        raise ParameterLeakError(
            f"Parameter {name!r} is trainable but not in the private optimizer, so its gradient would "
            "get neither clipping nor noise. Freeze it with requires_grad_(False), or pass it to the "
            "optimizer before make_private.",
            doc="optimizers",
        )


_OWN = (_check_private, _check_gradient)
"""Hooks that check whether there is a gradient."""
_FUNCTION = attrgetter("func")


def is_guarded(x: Tensor) -> bool:
    """Whether it is a parameter of a private model, which has a guard of its own."""
    return any(getattr(hook, "func", None) in _OWN for hook in gradient_hooks(x))


def say_untrained(others: Mapping[nn.Parameter, str]) -> None:
    """Warn of trainable parameters that no optimizer trains."""
    names = [name for p, name in others.items() if p.requires_grad]
    if names:
        say(untrained(names), doc="optimizers")


def untrained(names: Sequence[str]) -> str:
    """The warning about trainable parameters that the private optimizer does not have."""
    return (
        f"{len(names)} trainable parameters ({names[0]}, ...) are not in the private optimizer, so no "
        "optimizer trains them. Freeze them with requires_grad_(False), or pass all parameters to one "
        "optimizer before make_private."
    )


def check_plain() -> None:
    """Check that the forward pass is not inside a transform or a trace.

    Raises:
        GraphError: it is, so its samples cannot be followed.
    """
    if transformed() or torch.jit.is_tracing():
        raise GraphError(
            "The private model runs inside torch.func (grad, vmap) or a trace (torch.jit.trace, "
            "torch.onnx.export), where its samples cannot be followed. Run it under torch.no_grad(), or "
            "call cleanup() on a deep copy and pass fastclip.unwrap(copy).",
            doc="untracked-use",
        )


def check_hooks(names: Mapping[nn.Parameter, str], parameters: Collection[nn.Parameter]) -> None:
    """Check that private parameters have no gradient hooks, which would never run.

    Autograd computes no gradient of them, so a mask or a clamp in a hook would be omitted silently.

    Raises:
        UnsupportedLayerError: naming the parameter.
    """
    hooks = hooks_of(parameters)
    if {*map(type, hooks)} <= {partial} and {*map(_FUNCTION, hooks)} <= {*_OWN}:
        return  # the usual case
    for parameter in parameters:
        for hook in gradient_hooks(parameter):
            if getattr(hook, "func", None) not in _OWN and parameter.requires_grad:
                raise UnsupportedLayerError(
                    f"Parameter {names[parameter]!r} has a hook on its gradient (register_hook or "
                    "register_post_accumulate_grad_hook), which would not run. Remove the hook, and "
                    "change the parameter after optimizer.step() instead.",
                    doc="untracked-use",
                )


def check_frozen(frozen: Mapping[nn.Parameter, str]) -> None:
    """Check that parameters that were frozen at make_private still are.

    Like `check_alone` and `check_batch_norm` this uses no Snapshot: a copy of the model raises the error
    too, whatever its state when it was made.
    """
    thawed = [name for parameter, name in frozen.items() if parameter.requires_grad]
    if thawed:
        more = f" and {len(thawed) - 3} more" if len(thawed) > 3 else ""
        raise StepError(
            f"Parameters {thawed[:3]}{more} became trainable after make_private, so their gradients "
            "would not be clipped. Call make_private again after unfreezing, or freeze them between "
            "make_private and the first step.",
            doc="changed-model",
        )


def check_alone(names: Mapping[nn.Parameter, str]) -> None:
    """Check that no other engine has made these parameters private since make_private.

    Opacus' own engine cannot be stopped from doing so, but it leaves marks on the parameters.
    """
    for p, name in names.items():
        own = p.__dict__
        kept = own.get("grad_sample")
        if OPACUS_MARK in own or not (kept is None or kept is NOT_KEPT):
            raise StepError(
                f"Parameter {name!r} was made private by a second engine (Opacus'), so every sample "
                "would be released twice. Call cleanup() on the model that one of the two make_private "
                "calls returned.",
                doc="wrapped-model",
            )


class NonFiniteMonitor:
    """Warns once that a sample's gradient was not finite; on a GPU it never waits to know.

    It is off by default. The warning depends on one sample's data, so it is for debugging and is not
    private.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._warned = False
        self._flag: Tensor | None = None
        self._event: Any = None

    def __reduce__(self) -> Any:
        """A copy has seen nothing."""
        return NonFiniteMonitor, ()

    def check(self, norms: Tensor) -> None:
        """Note the norms [b] of a backward pass."""
        if self._warned or not self.enabled:
            return
        if norms.device.type == "cpu":
            if not bool(torch.isfinite(norms).all()):
                self._warn()
        elif norms.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._check_later(norms)

    def _check_later(self, norms: Tensor) -> None:
        """Copy to pinned memory, which a later pass reads once the device has written it."""
        if self._flag is None:
            self._flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._flag.copy_(torch.isfinite(norms).all(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(norms.device))
        elif self._event.query():
            if not bool(self._flag):
                self._warn()
            self._flag = None

    def _warn(self) -> None:
        self._warned = True
        say(
            "A sample's gradient is not finite (NaN or inf), so it contributes exactly zero. Set "
            "optimizer.warn_of_non_finite = False to omit this warning, which is not private.",
            doc="non-finite-samples",
        )


# -------------------------------------------------------------------------------------------------
# BatchNorm couples the samples of a batch. It raises an error at first, and when it would train again.


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module normalizes over the batch when it trains."""
    return isinstance(module, BatchNormBase)


def check_batch_norm(path: str, module: nn.Module) -> None:
    """Check for a BatchNorm that is trained, or that uses the statistics of the batch."""
    if is_batch_norm(module) and (module.training or trained(module)):
        raise UnsupportedLayerError(
            f"{where(path, module)}: BatchNorm makes each sample's output depend on the other samples "
            "of the batch. Replace it by GroupNorm with engine.get_compatible_module(model)"
            + ("." if trained(module) else ", or freeze its statistics with .eval()."),
            doc="coupled-samples",
        )


def trained(module: nn.Module) -> bool:
    """Whether the module holds trainable parameters itself."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


# -------------------------------------------------------------------------------------------------
# Trained tensors outside the model that meet data in a traced step.


def watch_outside(held: weakref.ref[Any], x: Tensor, line: str) -> None:
    """Raise an error if a pass that trains the model brings a gradient to such a tensor.

    Args:
        held: the step (fastclip.backward.traced_step). x: the tensor. line: the user's line where it met
            data.
    """
    step = held()
    if step is None or not x.requires_grad or is_guarded(x):
        return
    if x.grad_fn is not None:
        below = above_private(deque([x.grad_fn]))
        if not any(hasattr(node, "variable") for node in below):
            return  # computed by private models alone

    def check(gradient: Tensor | None) -> None:
        step = held()
        if gradient is None or step is None:
            return
        step.came.append((x, line))
        if step.opened:
            raise trained_outside(step.tracer.report, x, line)

    with step.tracer.aside():
        step.handles.append(x.register_hook(check))


def trained_outside(report: Report, x: Tensor, line: str) -> ParameterLeakError:
    """The error for a pass that trains such a tensor; the report records it."""
    report.outside.append((f"{list(x.shape)}", line))
    kind = "parameter" if isinstance(x, nn.Parameter) else "tensor"
    return ParameterLeakError(
        f"A {kind} of shape {list(x.shape)} outside the private model is trained at {line}, and its "
        "gradient gets neither clipping nor noise. Make it a parameter of the model before "
        "make_private, or detach it."
    )

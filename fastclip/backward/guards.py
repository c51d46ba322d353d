"""What a backward pass refuses: leaked gradients, second engines, BatchNorm, tensors outside."""

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
    VALUES_IN_LOSSES,
    GradSampleError,
    GraphError,
    ParameterLeakError,
    StepError,
    UnsupportedLayerError,
    say,
)
from fastclip.trace.findings import Report

# -------------------------------------------------------------------------------------------------
# What `p.grad_sample` of a private parameter is after a pass: an error for whoever reads it.
#
# Programs around Opacus read per-sample gradients between backward and step. None are kept here,
# and `None` in their place would say so only by an error about `None`.


_SAYS = (
    "p.grad_sample was read, but no per-sample gradients are kept; read optimizer.per_sample_norms and "
    "p.summed_grad, or make the model private with FastPrivacyEngine and grad_sample_mode='hooks'"
)


def _refuse(*args: Any, **options: Any) -> NoReturn:
    raise GradSampleError(_SAYS)


class NotKept:
    """In the place of per-sample gradients; false, and saved as an empty dict."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<per-sample gradients are not kept>"

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # which torch.load takes, as it does not take None's type

    def __deepcopy__(self, memo: dict[int, Any]) -> NotKept:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **options: Any) -> NoReturn:
        _refuse()

    __len__ = __getitem__ = __iter__ = __neg__ = __abs__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _refuse


NOT_KEPT = NotKept()


def show(parameters: Iterable[nn.Parameter], kept: NotKept | None = NOT_KEPT) -> None:
    """A pass has contributed, or what passes have left is cleared."""
    for p in parameters:
        p.grad_sample = kept  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------


class LeakGuard:
    """Raises when autograd computes a gradient of a private parameter.

    Private layers and uses return none for their parameters, so a gradient can only come from what
    torch shows to no one (custom and scripted functions, a loss), which would be unclipped. A copy is
    born unarmed: hooks belong to the parameters.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._others: set[nn.Parameter] = set()
        """Guarded while they are trainable, though nobody trains them privately."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LeakGuard:
        return LeakGuard()

    def __reduce__(self) -> Any:
        return LeakGuard, ()

    def arm(self, names: Mapping[nn.Parameter, str], grad_state: Any) -> None:
        """Guard these parameters; does nothing if armed.

        Args:
            grad_state: tells which gradients hold no data.
        """
        if not self._handles:
            self._handles = [
                p.register_hook(partial(_met, name, ref(p), ref(grad_state)))
                for p, name in names.items()
                if p.requires_grad
            ]

    def arm_others(self, others: Mapping[nn.Parameter, str], grad_state: Any) -> None:
        """Guard what the private optimizer does not have, as far as it has become trainable.

        Args:
            others: their names. grad_state: tells whether a private backward pass runs; in another
                they may train.
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


def _met(
    name: str, parameter: ref[nn.Parameter], grad_state: ref[Any], gradient: Tensor | None
) -> None:
    owner, p = grad_state(), parameter()
    if gradient is None:
        return
    if owner is None or p is None or not owner.is_penalty(p, gradient):
        raise ParameterLeakError(
            f"parameter {name!r} was used where it could not be followed (a custom autograd function, "
            "a scripted function, a value that the model returns), so its gradient would be unclipped; "
            "use torch's own functions in the model's forward, write the layer's rule with "
            "@fastclip.rules.register_rule, or freeze the parameter; a penalty without data must be in "
            f"the loss from the first step on, in one form; {VALUES_IN_LOSSES}"
        )
    owner.penalties.take(p, grad_state)


def arm(grad_state: Any) -> None:
    """Guard every parameter of a model that is trainable, whoever trains it."""
    grad_state.guard.arm(grad_state.names, grad_state)
    grad_state.guard.arm_others(grad_state.others, grad_state)


def _check_gradient(name: str, grad_state: ref[Any], gradient: Tensor | None) -> None:
    owner = grad_state()
    if gradient is not None and owner is not None and owner.running:
        raise ParameterLeakError(
            f"parameter {name!r} is trainable, but not in the private optimizer, so its gradient would "
            "be neither clipped nor noised; freeze it (requires_grad_(False)), or give it to the "
            "optimizer before make_private"
        )


_OWN = (_met, _check_gradient)
"""Hooks that look whether there is a gradient."""
_FUNCTION = attrgetter("func")


def is_guarded(x: Tensor) -> bool:
    """It is a parameter of a private model, whose gradient has a guard of its own."""
    return any(getattr(hook, "func", None) in _OWN for hook in gradient_hooks(x))


def say_untrained(others: Mapping[nn.Parameter, str]) -> None:
    """Warn of trainable parameters that nobody will train."""
    names = [name for p, name in others.items() if p.requires_grad]
    if names:
        say(untrained(names))


def untrained(names: Sequence[str]) -> str:
    """What is said of trainable parameters that the private optimizer does not have."""
    return (
        f"{len(names)} trainable parameters are not in the private optimizer ({names[0]}, ...): they "
        "are not trained, whatever other optimizer holds them; freeze them (requires_grad_(False)), "
        "which saves their backward pass, or give all to one optimizer"
    )


def check_plain() -> None:
    """Refuse a forward pass inside a transform or a trace, neither of which a pass can begin from.

    Raises:
        GraphError: saying what to give them.
    """
    if transformed() or torch.jit.is_tracing():
        raise GraphError(
            "the private model runs inside torch.func (grad, vjp, jvp, vmap) or a trace "
            "(torch.jit.trace, torch.onnx.export), where its samples cannot be followed: run it under "
            "torch.no_grad(), or give these a copy that is not private (copied = copy.deepcopy(model); "
            "copied.cleanup(); fastclip.unwrap(copied))"
        )


def check_hooks(names: Mapping[nn.Parameter, str], parameters: Collection[nn.Parameter]) -> None:
    """Refuse gradient hooks on private parameters, which would never run.

    Autograd computes no gradient of them: a mask or a clamp set as a hook would be left out silently.

    Raises:
        UnsupportedLayerError: naming the parameter.
    """
    hooks = hooks_of(parameters)
    if {*map(type, hooks)} <= {partial} and {*map(_FUNCTION, hooks)} <= {*_OWN}:
        return  # as nearly always
    for parameter in parameters:
        for hook in gradient_hooks(parameter):
            if getattr(hook, "func", None) not in _OWN and parameter.requires_grad:
                raise UnsupportedLayerError(
                    f"parameter {names[parameter]!r} has a hook on its gradient (register_hook or "
                    "register_post_accumulate_grad_hook), which would not run: its per-sample "
                    "gradients are clipped without one; remove the hook, and do its work on the "
                    "parameter after optimizer.step(), or in the forward pass"
                )


def check_frozen(frozen: Mapping[nn.Parameter, str]) -> None:
    """Refuse parameters that were frozen at make_private and are not any more.

    No Snapshot, nor are `check_alone` and `check_batch_norm`: of a copy of the model it is refused, too,
    whatever it was when it was made.
    """
    thawed = [name for parameter, name in frozen.items() if parameter.requires_grad]
    if thawed:
        more = f" and {len(thawed) - 3} more" if len(thawed) > 3 else ""
        raise StepError(
            f"parameters {thawed[:3]}{more} have become trainable since make_private, which does not "
            "clip them; call make_private again after unfreezing, or, to unfreeze gradually, let all be "
            "trainable at make_private, freeze them before the first step, and unfreeze them later"
        )


def check_alone(names: Mapping[nn.Parameter, str]) -> None:
    """Refuse parameters that another engine has taken hold of since make_private.

    Opacus' own engine cannot be stopped from doing so, but leaves its marks on the parameters.
    """
    for p, name in names.items():
        own = p.__dict__
        kept = own.get("grad_sample")
        if OPACUS_MARK in own or not (kept is None or kept is NOT_KEPT):
            raise StepError(
                f"parameter {name!r} was made private by another engine (Opacus') while this one "
                "still clips it, so that every sample would be released twice; call cleanup() on what "
                "one of the two make_private calls returned before the other trains"
            )


class NonFiniteMonitor:
    """Warns once that a sample's gradient was not finite; on a GPU it never waits to know.

    Only where it is enabled: the warning looks at one sample's data, so it is for debugging and not
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

    def look(self, norms: Tensor) -> None:
        """Note the norms [b] of a backward pass."""
        if self._warned or not self.enabled:
            return
        if norms.device.type == "cpu":
            if not bool(torch.isfinite(norms).all()):
                self._warn()
        elif norms.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._look_later(norms)

    def _look_later(self, norms: Tensor) -> None:
        """A copy to pinned memory, read in a later pass, once the device has written it."""
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
            "a sample's gradient is not finite (NaN or inf); it contributes exactly zero and "
            "training goes on. This warning is given once; it is not private"
        )


# -------------------------------------------------------------------------------------------------
# BatchNorm couples the samples of a batch: refused at first, and whenever it would train again.


WAY_OUT = "FastPrivacyEngine.get_compatible_module(model) replaces it"


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module normalizes over the batch when it trains."""
    return isinstance(module, BatchNormBase)


def check_batch_norm(path: str, module: nn.Module) -> None:
    """Refuse a BatchNorm that is trained, or that uses the statistics of the batch."""
    if is_batch_norm(module) and (module.training or trained(module)):
        raise UnsupportedLayerError(
            f"{path or 'the model'} ({type(module).__name__}): BatchNorm makes each sample's output "
            f"depend on the rest of its batch, so no per-sample gradient exists; {WAY_OUT} by "
            "GroupNorm" + ("" if trained(module) else ", or .eval() freezes its statistics")
        )


def trained(module: nn.Module) -> bool:
    """Whether the module holds trainable parameters itself."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


# -------------------------------------------------------------------------------------------------
# Trained tensors that are none of the model's, as a traced step meets them beside data.


def watch_outside(held: weakref.ref[Any], x: Tensor, line: str) -> None:
    """Let no gradient come to such a tensor in a pass that trains the model, too.

    Args:
        held: the step (fastclip.backward.traced_step). x: the tensor. line: of the user's, where it met
            data.
    """
    step = held()
    if step is None or not x.requires_grad or is_guarded(x):
        return
    if x.grad_fn is not None:
        below = above_private(deque([x.grad_fn]))
        if not any(hasattr(node, "variable") for node in below):
            return  # computed by private models alone

    def came(gradient: Tensor | None) -> None:
        step = held()
        if gradient is None or step is None:
            return
        step.came.append((x, line))
        if step.opened:
            raise trained_outside(step.tracer.report, x, line)

    with step.tracer.aside():
        step.handles.append(x.register_hook(came))


def trained_outside(report: Report, x: Tensor, line: str) -> ParameterLeakError:
    """The error of a pass that trains such a tensor, noted in the report."""
    report.outside.append((f"{list(x.shape)}", line))
    kind = "parameter" if isinstance(x, nn.Parameter) else "tensor"
    return ParameterLeakError(
        f"A {kind} of shape {list(x.shape)} that is not a parameter of the private model is trained at "
        f"{line}, on a gradient that is neither clipped nor noised. Make it a parameter of the model "
        "before make_private, or detach it."
    )

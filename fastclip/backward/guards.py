"""Watches over leaked gradients, second engines and, where asked for, values that are not finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fastclip._opacus import OPACUS_MARK
from fastclip._torch import gradient_hooks, hooks_of, transformed
from fastclip.backward.not_kept import NOT_KEPT
from fastclip.errors import (
    VALUES_IN_LOSSES,
    GraphError,
    ParameterLeakError,
    StepError,
    UnsupportedLayerError,
    say,
)


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

    def arm(self, names: Mapping[nn.Parameter, str], keeper: Any) -> None:
        """Guard these parameters; does nothing if armed.

        Args:
            keeper: tells which gradients hold no data.
        """
        if not self._handles:
            self._handles = [
                p.register_hook(partial(_met, name, ref(p), ref(keeper)))
                for p, name in names.items()
                if p.requires_grad
            ]

    def arm_others(self, others: Mapping[nn.Parameter, str], keeper: Any) -> None:
        """Guard what the private optimizer does not have, as far as it has become trainable.

        Args:
            others: their names. keeper: tells whether a private backward pass runs; in another they may
                train.
        """
        for p, name in others.items():
            if p.requires_grad and p not in self._others:
                self._others.add(p)
                self._handles.append(p.register_hook(partial(_refuse_other, name, ref(keeper))))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._others.clear()


def _met(
    name: str, parameter: ref[nn.Parameter], keeper: ref[Any], gradient: Tensor | None
) -> None:
    owner, p = keeper(), parameter()
    if gradient is None:
        return
    if owner is None or p is None or not owner.is_penalty(p, gradient):
        raise ParameterLeakError(
            f"parameter {name!r} was used where it could not be followed (a custom autograd function, "
            "a scripted function, a value that the model returns), so its gradient would be unclipped; "
            "use torch's own functions in the model's forward, write the layer's rule with "
            "@fastclip.layers.register_rule, or freeze the parameter; a penalty without data must be in "
            f"the loss from the first step on, in one form; {VALUES_IN_LOSSES}"
        )
    owner.penalties.take(p, keeper)


def arm(keeper: Any) -> None:
    """Guard every parameter of a model that is trainable, whoever trains it."""
    keeper.guard.arm(keeper.names, keeper)
    keeper.guard.arm_others(keeper.others, keeper)


def _refuse_other(name: str, keeper: ref[Any], gradient: Tensor | None) -> None:
    owner = keeper()
    if gradient is not None and owner is not None and owner.running:
        raise ParameterLeakError(
            f"parameter {name!r} is trainable, but not in the private optimizer, so its gradient would "
            "be neither clipped nor noised; freeze it (requires_grad_(False)), or give it to the "
            "optimizer before make_private"
        )


_OWN = (_met, _refuse_other)
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

    Only where it is enabled: the warning looks at one row's data, so it is for debugging and not
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

"""The forward of a module without fastclip, and modules whose samples are tracked as they run.

Libraries such as Accelerate and TRL replace `model.forward` on the object. An intercepted module keeps
that function, runs it as its own forward, and gets it back when it is released.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.utils.rnn import PackedSequence

from fastclip.backward.state import GradientState
from fastclip.core.compiler import as_written, disable_dynamo, is_exporting, pass_over
from fastclip.core.torch_names import called_with
from fastclip.errors import BatchSizeError, UnsupportedLayerError, where
from fastclip.rules.chance import leaves_of
from fastclip.rules.derived import is_private
from fastclip.rules.protocol import MARKS, OWN, own_forward
from fastclip.rules.routing import Routing
from fastclip.samples.calls import Forward
from fastclip.samples.inputs import flatten, rebuild, tensors_of

_DEEPEST, _MOST = 8, 4096
"""Depth, and number of objects, up to which a forward is searched."""


def run_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module's own forward, which torch.compile and torch.export trace."""
    own = module.__dict__.get(OWN)
    if own is None:
        return type(module).forward(module, *args, **kwargs)
    return own.forward(*args, **kwargs)


@pass_over
def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's own forward."""
    own = module.__dict__.get(OWN)
    plain = MethodType(type(module).forward, module) if own is None else own.forward
    return plain  # type: ignore[no-any-return]


class Own:
    """The `forward` that was set on a module object. In a copy of the module it runs the copy.

    Args:
        path: of the module in the model of `grad_state`.
    """

    def __init__(self, forward: Any, path: str, grad_state: GradientState) -> None:
        self.forward, self.path, self.grad_state = forward, path, grad_state

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        """Copy the forward for a copied module.

        Raises:
            UnsupportedLayerError: a function, which copies share, runs the original module.
        """
        if _runs(self.forward, self.grad_state.calls.known):
            raise UnsupportedLayerError(
                f"{where(self.path)}: the function that was set as its forward holds the model itself, "
                "so a copy would run this model. Set types.MethodType(function, module) instead.",
                doc="changed-model",
            )
        given = copy.deepcopy(self.forward, memo), self.path, copy.deepcopy(self.grad_state, memo)
        return Own(*given)


def replace(module: nn.Module, forward: MethodType, path: str, grad_state: GradientState) -> None:
    """Set the module's forward, and keep one that was set on the object.

    Raises:
        UnsupportedLayerError: the module has a forward of an earlier fastclip engine.
    """
    held = module.__dict__
    if "forward" in held:
        if not MARKS.isdisjoint(held):
            raise UnsupportedLayerError(
                f"{where(path, module)}: fastclip has replaced its forward already. Pass the original "
                "model.",
                doc="wrapped-model",
            )
        held[OWN] = Own(held["forward"], path, grad_state)
    held["forward"] = forward


def give_back(module: nn.Module) -> None:
    """Restore the module's own forward."""
    held = module.__dict__
    held.pop("forward", None)
    if OWN in held:
        held["forward"] = held.pop(OWN).forward


def check_copied(model: nn.Module) -> None:
    """Raise an error for a copy with a forward that runs the original.

    Raises:
        UnsupportedLayerError: naming the module.
    """
    modules = ((p, m) for p, m in model.named_modules() if not isinstance(m, ScriptModule))
    own = {path: module for path, module in modules if own_forward(module) is not None}
    inside = {*model.modules()} if own else set()
    kinds = {*map(_kind, inside)}
    for path, module in own.items():
        reached = [value for value, _ in _reached(own_forward(module))]
        held = [x for x in reached if isinstance(x, nn.Module)]
        others = {m for m in held if m not in inside and _kind(m) in kinds and _has_weights(m)}
        methods = [x for x in reached if isinstance(x, MethodType)]
        methods = [x for x in methods if getattr(x, "__name__", "") == "forward"]
        bound = {x.__self__ for x in methods if isinstance(x.__self__, nn.Module)}
        if others and (inside.isdisjoint(held) or not others.isdisjoint(bound)):
            raise UnsupportedLayerError(
                f"{where(path, module)}: the function that was set as its forward runs the model that "
                "this one is a copy of. Set forward on the copy, after copy.deepcopy or "
                "get_compatible_module.",
                doc="changed-model",
            )


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *(p.shape for p in module.parameters())


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _runs(forward: Any, parameters: set[nn.Parameter]) -> bool:
    """Whether functions, which copies share, hold modules with any of these parameters."""
    for value, shared in _reached(forward):
        held = value.parameters() if isinstance(value, nn.Module) else (value,)
        known = isinstance(value, (nn.Module, nn.Parameter))
        if shared and known and not parameters.isdisjoint(held):
            return True
    return False


def _reached(forward: Any) -> Iterator[tuple[Any, bool]]:
    """All objects that a forward holds, and whether a function holds them: copies share functions."""
    seen: set[tuple[int, bool]] = set()
    level = [(forward, False)]
    for _ in range(_DEEPEST):
        ahead: list[tuple[Any, bool]] = []
        for value, shared in level:
            if (id(value), shared) in seen or len(seen) == _MOST:
                continue
            seen.add((id(value), shared))
            yield value, shared
            inside = shared or isinstance(value, FunctionType)
            ahead += ((part, inside) for part in _parts(value))
        level = ahead


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a forward; for modules the functions that are set on them."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, nn.Module):
        kinds = FunctionType, MethodType, partial
        return [x for x in vars(value).values() if isinstance(x, kinds)]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (type, ModuleType)):
        return ()
    return getattr(value, "__dict__", {}).values()


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    known = function.__globals__
    yield from (known[name] for name in _names_in(function.__code__) if name in known)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


# -------------------------------------------------------------------------------------------------
# A forward may get other inputs than its module. Samples are found in the inputs of the module.
#
# A class may override `__call__`, and a forward pre-hook may return other inputs.


def has_more(module: nn.Module) -> bool:
    """Whether user code runs before its forward."""
    return _overrides(module) or _has_hooks(module)


def check_given(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Check that a module called by itself passes its inputs to its forward unchanged.

    Raises:
        UnsupportedLayerError: it does not, or this is unknown.
    """
    if not has_more(module) or not torch.is_grad_enabled():
        return
    if not _overrides(module) and _are_same(called_with(module), (args, kwargs)):
        return
    what = (
        "overrides __call__" if _overrides(module) else "changes its inputs in a forward pre-hook"
    )
    raise UnsupportedLayerError(
        f"{where(path, module)} {what}, and fastclip cannot see what that does to samples. Do it in "
        "forward, or call the model that make_private returned with wrap_model=True.",
        doc="wrapped-model",
    )


def _overrides(module: nn.Module) -> bool:
    return not _is_torchs(type(module).__call__)


def _has_hooks(module: nn.Module) -> bool:
    return not all(map(_is_torchs, module._forward_pre_hooks.values()))


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _are_same(one: Any, other: Any) -> bool:
    return [*map(id, tensors_of(one))] == [*map(id, tensors_of(other))]


# -------------------------------------------------------------------------------------------------
# Modules that run around uses of parameters, and may return samples in another order.


def follow(
    path: str, grad_state: GradientState, inner: Callable[..., Any], args: tuple, kwargs: dict
) -> Any:
    """Run a module that is not a private layer, and record where it moves samples."""
    probe = grad_state.calls.probe
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
    forward = grad_state.running_forward()
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
    """Decorator of the forward of an intercepted module; torch.export gets the module's own.

    The exported program is not private: the engine gets no gradient from it.
    """

    @functools.wraps(private, updated=())  # without torch.compile's settings of `private`
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            return run_plain(self, *args, **kwargs)
        return private(self, *args, **kwargs)

    pass_over(either)
    return cast(FunctionType, either)


def shown_as(forward: FunctionType, module: nn.Module) -> MethodType:
    """`forward` bound to the module, with the signature of the module's own for torch.export.

    torch.export names inputs and dynamic shapes by these arguments.
    """
    own = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    own.__dict__.update(forward.__dict__)
    with contextlib.suppress(TypeError, ValueError):  # a forward that is not a Python function
        asked = inspect.signature(vars(module).get("forward") or plain_forward(module))
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        known = [first, *asked.parameters.values()]
        own.__signature__ = asked.replace(parameters=known)  # type: ignore[attr-defined]
    return MethodType(own, module)


@disable_dynamo
def eagerly(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run code that uses parameters itself without compiling it: uses would not be tracked."""
    return as_written(inner)(*args, **kwargs)


def enter(path: str, forward: Forward) -> None:
    """Record that this module runs."""
    forward.inside.append((path, Routing(forward.batch_size or 0)))


def left(path: str, forward: Forward, routing: Routing, out: Any) -> Any:
    """The module's output; if the module moves samples, gradients that enter here are attributed."""
    if forward.layout is None or path not in forward.layout.returns:
        return out
    leaves, structure = flatten(out)
    batch_axes = forward.layout.returns[path]
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, PackedSequence))]
    numbers = [
        i for number, i in enumerate(tensors)
        if number in batch_axes and type(leaves[i]) is Tensor and leaves[i].requires_grad
    ]  # fmt: skip
    batch = forward.batch_size or 0
    if not all(batch_axes[tensors.index(i)].fits(leaves[i], batch) for i in numbers):
        forward.layout.lost([path])
        forward.layout.watch = None  # the next call is probed again
        raise BatchSizeError(
            f"{where(path)} returns other samples than in all calls before, so fastclip did not follow "
            "the samples inside. Call the model on this batch again."
        )
    passed = routing.leave(
        [leaves[i] for i in numbers], [batch_axes[tensors.index(i)] for i in numbers]
    )
    for i, x in zip(numbers, passed, strict=True):
        leaves[i] = x
    return rebuild(leaves, structure)

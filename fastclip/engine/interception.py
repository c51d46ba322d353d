"""Layers whose forward becomes private, and calls that reach them without the model's forward.

A layer keeps its class, its position and its parameters. Only `forward` becomes a bound method of the
module. It is no closure, because a deepcopy must use its own weights. The private function returns the
gradient of the input and none for the parameters, whose contributions go to the gradient state. So
autograd never computes an unclipped weight gradient.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from fastclip.backward import tapped
from fastclip.backward.guards import check_plain
from fastclip.backward.layer_function import Call, PrivateLayer
from fastclip.backward.state import GradientState
from fastclip.core.compiler import disable_dynamo, ends_graph, is_compiled, is_exporting, pass_over
from fastclip.core.system import no_memory
from fastclip.core.torch_names import Native, plain_apply, unwrap_dead
from fastclip.engine.own_forward import (
    check_given,
    eagerly,
    exports_as_it_was,
    follow,
    give_back,
    plain_forward,
    replace,
    run_plain,
    shown_as,
)
from fastclip.errors import GraphError, StepError, UnsupportedLayerError, capitalized, where
from fastclip.rules import LayerRule
from fastclip.rules.chance import leaves_of
from fastclip.rules.derived import Derived, is_private
from fastclip.samples.batch_axis import BatchAxis

ATTRIBUTE = "_fastclip"
_APPLY = plain_apply(PrivateLayer)
_FIRST_AXIS = BatchAxis(0)
_KEYS = count(1)
HOW_TO_REGISTER = "Register a rule for the layer with @fastclip.rules.register_rule, or freeze it."


class ForwardWrapper(Protocol):
    """Code that runs around a module's forward."""

    def run(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        """Call `inner(*args, **kwargs)` with the additions of the wrapper."""


def not_pickled() -> StepError:
    """The error for pickling a private model."""
    return StepError(
        "A private model cannot be pickled. Save fastclip.unwrap(model).state_dict(), or "
        "engine.save_checkpoint(...) to resume the run.",
        doc="wrapped-model",
    )


class LayerHook:
    """The record on an intercepted module: path, rule, forward wrappers and gradient state."""

    def __init__(self, path: str, grad_state: GradientState) -> None:
        self.path = path
        self.grad_state = grad_state
        self.rule: LayerRule | None = None
        self.wrappers: list[ForwardWrapper] = []
        self.bare: Callable[[Any, nn.Module], Tensor | None] | None = None
        """Runs a call as one C++ node, or returns None if it cannot; None if no call can."""
        self.key = next(_KEYS)
        """Key of its calls in traces of torch.compile (`fastclip.backward.tapped`)."""
        self.bypass = False
        """Run the module's own forward (while a rule calls it from inside)."""
        self._found: tuple[list[tuple[str, nn.Parameter | None, bool]], dict[str, nn.Parameter]] = (
            [],
            {},
        )
        """The module's parameters at the last check, and the last result of `parameters`."""
        self.checked: tuple[Any, Any] = None, None
        """The last result whose parameters were checked, and the model's parameters then."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerHook:
        memo[id(self)] = made = LayerHook.__new__(LayerHook)
        made.__dict__.update(
            copy.deepcopy({**self.__dict__, "bare": None, "key": next(_KEYS)}, memo)
        )
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Raise an error: unpickling would not find the forward in the layer's class."""
        raise not_pickled()

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The module's forward."""
        if self.bypass:
            return run_plain(module, *args, **kwargs)
        if self.bare is not None and len(args) == 1 and not kwargs:
            try:
                out = self.bare(args[0], module)
            except RuntimeError as error:  # the standard path names the layer
                if no_memory(error):
                    raise
                out = None
            if out is not None:
                return out
        run = self._followed if self.rule is None else self._private
        if not self.wrappers:
            return run(module, *args, **kwargs)
        inner: Callable = partial(run, module)
        for wrapper in self.wrappers:
            inner = _Bound(wrapper, self, module, inner)
        return inner(*args, **kwargs)

    @cached_property
    def inlined(self) -> Callable[..., Any]:
        """A function that calls its argument, where torch.compile begins to trace.

        torch.compile does not begin in functions of torch's own modules, such as nn.Sequential's. It
        counts graphs per function, so each module has its own.
        """
        code = _run.__code__.replace(co_varnames=_run.__code__.co_varnames)
        return FunctionType(code, globals(), f"run_{self.key}")

    @property
    def only_opens(self) -> bool:
        """Whether it is the model's own forward, and only opens the pass."""
        return self.rule is None and len(self.wrappers) == 1 and hasattr(self.wrappers[0], "enter")

    def _followed(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return follow(self.path, self.grad_state, plain_forward(module), args, kwargs)

    def _private(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(module, args, kwargs)
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # errors of fastclip and of devices name the place
                raise
            located = RuntimeError(capitalized(f"{where(self.path, module)}: {error}"))
            raise located.with_traceback(error.__traceback__) from error.__cause__

    def _run(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        probe = self.grad_state.calls.probe
        if probe is None and torch.is_grad_enabled():
            return apply_rule(self, module, args, kwargs)
        plain = plain_forward(module)
        if probe is None:
            return plain(*args, **kwargs)
        assert self.rule is not None
        computed = any(type(p) is Derived for p in module._parameters.values())
        if (
            self.path in probe.layout.open
            or computed  # torch.func.functional_call with weights computed from parameters
            or any(map(is_private, (*args, *kwargs.values())))
            or not probe.reaches(leaves_of((args, kwargs)))
        ):
            probe.layout.open.add(self.path)
            probe.layout.met.add(self.path)
            return plain(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        probe.observe(self.path, x, self.rule.counts_samples)
        with Native():
            out = plain(*args, **kwargs)
        probe.gives(self.path, out)
        return out

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters that the rule covers, by their name in the module."""
        own, (held, answer) = module._parameters, self._found
        if len(own) == len(held):  # most modules are unchanged since the last step
            for name, parameter, trained in held:
                if name not in own or own[name] is not parameter:
                    break
                if parameter is not None and parameter.requires_grad is not trained:
                    break
            else:
                return answer
        # named_parameters takes three times as long
        found = {name: p for name, p in own.items() if p is not None and p.requires_grad}
        if len({*map(id, found.values())}) < len(found):
            raise UnsupportedLayerError(
                f"{where(self.path, module)}: {' and '.join(found)} became one parameter after "
                "make_private. Tie them before make_private.",
                doc="changed-model",
            )
        held = [(name, p, p is not None and p.requires_grad) for name, p in own.items()]
        self._found = held, found
        return found


def _run(plain: Callable, *args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


class _Bound:
    def __init__(
        self, wrapper: ForwardWrapper, handle: LayerHook, module: nn.Module, inner: Callable
    ) -> None:
        self._call = (wrapper, handle, module, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper, handle, module, inner = self._call
        return wrapper.run(handle, module, inner, args, kwargs)


@exports_as_it_was
def private_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of every intercepted module.

    torch.compile traces it if its call gets output hooks; otherwise its graph ends here.
    """
    handle: LayerHook = getattr(self, ATTRIBUTE)
    bare = handle.grad_state.bare
    if bare.laid and len(args) == 1 and not kwargs:
        out = tapped.call(handle.key, self, args[0])
        if out is not None:
            return out
    if not torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling():
        return run_plain(self, *args, **kwargs)
    return _call(handle, self, args, kwargs)


@disable_dynamo
def _call(handle: LayerHook, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return handle.call(module, args, kwargs)


@exports_as_it_was
@ends_graph
def private_root_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a root that only opens the pass. Its own code may be compiled."""
    handle: LayerHook = getattr(self, ATTRIBUTE)
    wrapper = handle.wrappers[0]
    plain, loss = plain_forward(self), handle.grad_state.model_loss
    per_sample = plain if loss is None else loss.around(plain)
    entered = wrapper.enter(handle, self, per_sample, args, kwargs)  # type: ignore[attr-defined]
    with entered:
        if entered.eager or not is_compiled() or (loss is not None and loss.inline):
            plain = partial(eagerly, per_sample) if entered.eager or is_compiled() else per_sample
        elif entered.may_be_traced():
            plain = partial(handle.inlined, plain)
        else:
            plain = partial(eagerly, per_sample)
        out = plain(*entered.args, **entered.kwargs)
    return entered.opening(out)


def attach(module: nn.Module, handle: LayerHook) -> None:
    """Intercept `module`."""
    forward = private_root_forward if handle.only_opens else private_forward
    replace(module, shown_as(forward, module), handle.path, handle.grad_state)
    module.__dict__[ATTRIBUTE] = handle


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    give_back(module)
    module.__dict__.pop(ATTRIBUTE, None)


def apply_rule(handle: LayerHook, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Run a layer through its rule, recorded for the backward pass; an open layer runs unchanged."""
    rule, grad_state = handle.rule, handle.grad_state
    assert rule is not None
    forward, opens = grad_state.layer_forward(handle.path)
    batch_axis: BatchAxis | None = _FIRST_AXIS
    layout = forward.layout
    placed = forward.sample_order is None and not rule.counts_samples
    if placed:
        if layout is None or not (layout.knows(handle.path) or forward.routings):
            layout = grad_state.calls.layout_with(handle.path, forward)
        moved = handle.path not in layout.batch_axes and forward.routings
        if moved or handle.path in layout.open:
            return run_plain(module, *args, **kwargs)
    try:
        x, extra = rule.prepare(module, args, kwargs)
    except TypeError as error:
        raise _unsupported(handle, module, error) from error
    if extra is not None:
        _check_extra(handle, module, extra)
    if placed:
        assert layout is not None
        samples = forward.batch_size
        batch_axis = (
            None if samples is None else layout.place_of(handle.path, x, samples, forward.lengths)
        )
        if samples is not None and batch_axis is None and handle.path in layout.batch_axes:
            grad_state.calls.look_again(layout, forward, handle.path, x)
            if handle.path in layout.open:
                return run_plain(module, *args, **kwargs)
        axis = rule.axis(module)
        if batch_axis is None or not batch_axis.plain or axis is not None:
            batch_axis = layout.locate(handle.path, x, forward.batch_size, axis, forward.lengths)
    assert batch_axis is not None
    forward.reached.add(handle.path)
    parameters = handle.parameters(module)
    _check_parameters(handle, module, parameters)
    check_plain()
    call = Call(handle, module, forward, batch_axis, extra, parameters)
    try:
        out = _APPLY(call, unwrap_dead(x), *parameters.values())
    except TypeError as error:
        raise _unsupported(handle, module, error) from error
    if rule.counts_samples and forward.batch_size == len(x):
        forward.batch_size = out.shape[0]  # the model's first input was the flat ids of the bags
    if opens:
        grad_state.begins_with(forward, out)
    return out


def _check_extra(handle: LayerHook, module: nn.Module, extra: Any) -> None:
    """Raise an error for a second input that needs a gradient: rules return that of one input."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in leaves_of(extra)):
        raise UnsupportedLayerError(
            f"{where(handle.path, module)}: the layer's rule returns the gradient of one input, but "
            "another input needs a gradient too. Let `prepare` join both in one tensor (torch.cat).",
            doc="layer-rule",
        )


def _check_parameters(
    handle: LayerHook, module: nn.Module, parameters: dict[str, nn.Parameter]
) -> None:
    """Raise an error for parameters unknown to the gradient state, and for computed weights."""
    assert handle.rule is not None
    known, (checked, against) = handle.grad_state.calls.known, handle.checked
    if checked is not parameters or against is not known:
        replaced = [name for name, p in parameters.items() if p not in known]
        if replaced:
            raise UnsupportedLayerError(
                f"{where(handle.path, module)}: parameters {replaced} were replaced after make_private, "
                "so they would not be trained. Call make_private again.",
                doc="changed-model",
            )
        handle.checked = parameters, known
    own, kind = module._parameters, type(module)
    for name in handle.rule.parameter_names:
        if name in own and name not in module.__dict__ and not hasattr(kind, name):
            continue  # no other attribute has this name
        value = getattr(module, name, None)
        trained = isinstance(value, Tensor) and value.requires_grad
        if trained and own.get(name) is not value:
            raise UnsupportedLayerError(
                f"{where(handle.path, module)}: {name} is computed from other tensors, which would get "
                "no gradient. Prune or reparametrize the layer before make_private, or register a rule "
                "for it with @fastclip.rules.register_rule.",
                doc="changed-model",
            )


def _unsupported(handle: LayerHook, module: nn.Module, error: TypeError) -> UnsupportedLayerError:
    if not type(handle.rule).__module__.startswith("fastclip."):  # it is the user's own
        return UnsupportedLayerError(
            f"{where(handle.path, module)}: the layer's rule failed: {str(error).rstrip('.')}. Correct "
            "the rule's `forward`, or its `prepare` if the layer has several inputs.",
            doc="layer-rule",
        )
    return UnsupportedLayerError(
        f"{where(handle.path, module)} is not supported: {str(error).rstrip('.')}. {HOW_TO_REGISTER}"
    )


# -------------------------------------------------------------------------------------------------
# Calls by which a training loop reaches private layers without the model's own forward.
#
# Code that uses private layers runs on a few samples before it trains (fastclip.samples.learning). The
# model's forward does so when it begins. Another method of the model, or a part called by itself, does
# so when it first reaches a private layer, because most methods compute nothing.


_PART = "_fastclip_part"
_LIGHTNING = ("lightning.", "pytorch_lightning.")
_LOGS = ("log", "log_dict")
"""Lightning's methods that store numbers elsewhere. A dry run on a few samples skips them."""
_MOST = 64
_signatures: dict[FunctionType, inspect.Signature] = {}
"""Cached signatures of at most `_MOST` functions. torch.compile warns of functools.lru_cache."""


class Method:
    """A bound method of a module other than `forward`, whose calls are tracked while they run.

    Args:
        path: of the module in the model.
    """

    def __init__(
        self, model: nn.Module, name: str, grad_state: GradientState, path: str = ""
    ) -> None:
        self.model, self.name, self.grad_state = model, name, grad_state
        self.path, self.called = path, f"{path}.{name}".lstrip(".")
        functools.update_wrapper(self, getattr(type(model), name))

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the bound method. Some models inspect their own in every forward pass."""
        return _signature(getattr(type(self.model), self.name))

    @property
    def _plain(self) -> MethodType:
        return MethodType(getattr(type(self.model), self.name), self.model)

    @pass_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or self.grad_state.bare.traced(self.path):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        return self._call(*args, **kwargs)

    @ends_graph
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain
        lightnings = str(plain.__func__.__module__).startswith(_LIGHTNING)
        if lightnings and self.name == "all_gather":
            self._check_gathering()
        if self.grad_state.calls.probe and lightnings:
            return None if self.name in _LOGS else plain(*args, **kwargs)
        if self.grad_state.depth:
            return plain(*args, **kwargs)
        run: Any = (
            plain
            if self.grad_state.model_loss is None
            else self.grad_state.model_loss.around(plain)
        )
        with self.grad_state.calls.inside(self.called, self.model, run, args, kwargs) as returned:
            return returned(run(*args, **kwargs))

    def _check_gathering(self) -> None:
        """Raise an error if samples of one rank enter another's loss, where clipping is separate."""
        if self.grad_state.clipping.ranks is not None and self.grad_state.calls.runs(
            "training_step"
        ):
            raise GraphError(
                "self.all_gather in training_step passes samples of one rank to the loss of others, "
                "which are clipped separately. Log numbers with sync_dist=True, and compute each "
                "sample's loss from that sample alone.",
                doc="several-processes",
            )


def _signature(function: FunctionType) -> inspect.Signature:
    """The signature of a function as a bound method."""
    found = _signatures.get(function)
    if found is None:
        if len(_signatures) >= _MOST:
            _signatures.clear()
        _signatures[function] = found = inspect.signature(MethodType(function, object()))
    return found


def attach_methods(path: str, module: nn.Module, grad_state: GradientState) -> None:
    """Track calls of the methods of the model, or of a part of it, in the gradient state."""
    for name in _methods(module):
        module.__dict__[name] = Method(module, name, grad_state, path)


def attach_part(path: str, module: nn.Module, grad_state: GradientState) -> None:
    """Track calls of a module that holds private layers in the gradient state."""
    attach_methods(path, module, grad_state)
    replace(module, shown_as(_part_forward, module), path, grad_state)
    module.__dict__[_PART] = (path, grad_state)


def detach_entries(module: nn.Module) -> None:
    """Undo `attach_methods` and `attach_part`."""
    for name in [n for n, value in vars(module).items() if isinstance(value, Method)]:
        del module.__dict__[name]
    if module.__dict__.pop(_PART, None) is not None:
        give_back(module)


@exports_as_it_was
def _part_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    path, grad_state = getattr(self, _PART)
    if grad_state.bare.traced(path):
        return run_plain(self, *args, **kwargs)
    return _called_part(path, grad_state, self, args, kwargs)


@ends_graph
def _called_part(
    path: str, grad_state: GradientState, self: nn.Module, args: tuple, kwargs: dict
) -> Any:
    plain = plain_forward(self)
    if grad_state.depth or grad_state.calls.probe or grad_state.recomputes:
        return follow(path, grad_state, plain, args, kwargs)
    if not grad_state.paused:
        check_given(path, self, args, kwargs)
    run = plain if grad_state.model_loss is None else grad_state.model_loss.around(plain)
    with grad_state.calls.inside(f"{path}()", self, run, args, kwargs) as returned:
        return returned(run(*args, **kwargs))


def _methods(model: nn.Module) -> Iterator[str]:
    """Names of methods that torch's own modules do not have."""
    for name in dir(type(model)):
        if name.startswith("__") or name in vars(model) or hasattr(nn.Module, name):
            continue
        base = next((b for b in type(model).__mro__ if name in vars(b)), object)
        torchs = base.__module__.startswith("torch.")
        if not torchs and isinstance(vars(base).get(name), FunctionType):  # not static, of no class
            yield name

"""Swaps the forward of trainable layers for private autograd functions, and back.

A layer keeps its class, its place and its parameters; only `forward` becomes a bound method of the
module (not a closure: a deepcopy must use its own weights). The private function returns the
input's gradient and no gradient for the parameters, whose contributions go to the book-keeper:
autograd never computes an unclipped weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastclip import ops
from fastclip.bookkeeping import BookKeeper, Forward
from fastclip.errors import UnsupportedLayerError
from fastclip.layers import LayerRule, Record
from fastclip.layers.fallback import HOW_TO_REGISTER, FallbackRule
from fastclip.loader import unmark
from fastclip.planner import Choice

ATTRIBUTE = "_fastclip"


class Scope(Protocol):
    """Something done around a module's forward: opening the root, expanding raw parameters."""

    def run(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        """Call `inner(*args, **kwargs)` with whatever the scope adds."""


class Handle:
    """What an intercepted module carries: its path, its rule, its scopes, its book-keeper."""

    def __init__(self, path: str, keeper: BookKeeper) -> None:
        self.path = path
        self.keeper = keeper
        self.rule: LayerRule | None = None
        self.scopes: list[Scope] = []
        self.bypass = False
        """Run the module as it was (while a rule calls it from inside)."""

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The module's forward."""
        if self.bypass:
            return self._plain(module)(*args, **kwargs)
        inner: Callable = self._plain(module) if self.rule is None else self._private(module)
        for scope in self.scopes:
            inner = _Bound(scope, self, module, inner)
        return inner(*args, **kwargs)

    @staticmethod
    def _plain(module: nn.Module) -> Callable:
        return MethodType(type(module).forward, module)

    def _private(self, module: nn.Module) -> Callable:
        rule = self.rule
        assert rule is not None

        def forward(*args: Any, **kwargs: Any) -> Any:
            layout = self.keeper.layout
            if layout.probe and not rule.counts_rows:
                args, kwargs = self._observed(args, kwargs)
            elif torch.is_grad_enabled() and not layout.probe:
                return apply_rule(self, module, args, kwargs)
            return self._plain(module)(*args, **kwargs)

        return forward

    def _observed(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self.keeper.layout.observe(self.path, args[0]), *args[1:]), kwargs
        names = list(kwargs)
        first = {name: self.keeper.layout.observe(self.path, kwargs[name]) for name in names[:1]}
        return args, {**kwargs, **first}

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """The module runs as it was inside."""
        self.bypass = True
        try:
            yield
        finally:
            self.bypass = False

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters that the rule answers for, by their name in the module."""
        recurse = isinstance(self.rule, FallbackRule)
        return {n: p for n, p in module.named_parameters(recurse=recurse) if p.requires_grad}


class _Bound:
    def __init__(self, scope: Scope, handle: Handle, module: nn.Module, inner: Callable) -> None:
        self._call = (scope, handle, module, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope, handle, module, inner = self._call
        return scope.run(handle, module, inner, args, kwargs)


def private_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of every intercepted module."""
    handle: Handle = getattr(self, ATTRIBUTE)
    return handle.call(self, args, kwargs)


def attach(module: nn.Module, handle: Handle) -> None:
    """Intercept `module`."""
    if "forward" in module.__dict__:
        owner = "fastclip" if ATTRIBUTE in module.__dict__ else "another library"
        raise UnsupportedLayerError(
            f"{handle.path or 'the model'} ({type(module).__name__}) has had its forward replaced "
            f"by {owner} already; pass the original model"
        )
    module.__dict__[ATTRIBUTE] = handle
    module.__dict__["forward"] = MethodType(private_forward, module)


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    module.__dict__.pop("forward", None)
    module.__dict__.pop(ATTRIBUTE, None)


def apply_rule(handle: Handle, module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    """Run a layer through its rule, recorded for the backward pass."""
    rule, keeper = handle.rule, handle.keeper
    assert rule is not None
    forward, opens = keeper.layer_forward()
    try:
        x, extra = rule.prepare(module, args, kwargs)
    except TypeError as error:
        raise _unsupported(handle, module, error) from error
    if forward.row_order is not None or rule.counts_rows:
        axis = 0
    else:
        fixed = rule.axis(module)
        axis, x = keeper.layout.locate(handle.path, x, forward.batch_size, fixed)
    if opens:
        x, forward.made_up = unmark(x)
    parameters = handle.parameters(module)
    _check_parameters(handle, module)
    call = Call(handle, module, forward, axis, extra, tuple(parameters))
    try:
        out = PrivateLayer.apply(call, x, *parameters.values())
    except TypeError as error:
        raise _unsupported(handle, module, error) from error
    if rule.counts_rows and forward.batch_size == len(x):
        forward.batch_size = out.shape[0]  # the model's first input was the flat ids of the bags
    if opens and forward.recording and out.requires_grad:
        out.register_hook(lambda gradient: keeper.open_pass(forward))
    return out


def _check_parameters(handle: Handle, module: nn.Module) -> None:
    """A rule reads `module.weight`: a tensor computed elsewhere would lose its gradient."""
    assert handle.rule is not None
    if isinstance(handle.rule, FallbackRule):
        return
    for name in handle.rule.parameter_names:
        value = getattr(module, name, None)
        trained = isinstance(value, Tensor) and value.requires_grad
        if trained and module._parameters.get(name) is not value:
            raise UnsupportedLayerError(
                f"{handle.path}.{name} ({type(module).__name__}) is computed from other tensors, not "
                f"a parameter, so these would get no gradient; {HOW_TO_REGISTER}"
            )


def _unsupported(handle: Handle, module: nn.Module, error: TypeError) -> UnsupportedLayerError:
    return UnsupportedLayerError(
        f"{handle.path} ({type(module).__name__}) cannot be trained privately: {error}; "
        f"{HOW_TO_REGISTER}"
    )


class Call:
    """What a layer's call leaves for its backward, apart from tensors that autograd watches."""

    def __init__(
        self, handle: Handle, module: nn.Module, forward: Forward, axis: int, extra: Any,
        names: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.handle, self.module, self.forward = handle, module, forward
        self.axis, self.extra, self.names = axis, extra, names
        self.row_order = forward.row_order


class PrivateLayer(Function):
    """A layer whose backward returns the input's gradient only."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *parameters: Tensor) -> Tensor:
        rule = call.handle.rule
        assert rule is not None
        with call.handle.bypassed():
            out, saved = rule.forward(call.module, x, call.extra)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.dtype = x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        nothing = (None,) * (2 + len(call.names))
        if g is None:
            return nothing
        wanted = wanted_parameters(ctx, call, first_edge=1)
        backward = LayerBackward(call, ctx.saved_tensors, g, ctx.needs_input_grad[1], wanted)
        rule = call.handle.rule
        assert rule is not None
        with torch.autocast(g.device.type, enabled=False):
            if wanted:
                backward.admit()
            with call.handle.bypassed():
                grad_input = rule.backward(backward)
        if grad_input is not None:
            grad_input = grad_input.to(ctx.dtype)
        return (None, grad_input, *nothing[2:])


def wanted_parameters(ctx: Any, call: Call, first_edge: int) -> dict[str, nn.Parameter]:
    """The parameters whose contribution this backward pass wants, by name.

    `needs_input_grad` does not shrink under autograd.grad; whether the engine will run the
    parameter's own node tells.
    """
    if not call.forward.recording:
        return {}
    keeper = call.handle.keeper
    parameters = call.handle.parameters(call.module)
    edges = dict(zip(call.names, ctx.next_functions[first_edge:], strict=True))
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter in keeper.names and name in edges and _will_run(edges[name][0])
    }


def _will_run(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch.autograd.grad: it asks for tensors, not for p.grad


class LayerBackward:
    """What a rule's backward may see and do.

    Attributes:
        g: gradient of the layer's output. saved: what its forward saved. extra: the rest of the
            call. module: the layer, with its current parameters. path: its path in the model.
        needs_input_grad: whether the input's gradient must be returned.
    """

    def __init__(
        self, call: Call, saved: tuple[Tensor | None, ...], g: Tensor, needs_input_grad: bool,
        wanted: dict[str, nn.Parameter],
    ) -> None:  # fmt: skip
        self._call, self._wanted = call, wanted
        self.saved: tuple[Any, ...] = saved
        self.g, self.needs_input_grad = g, needs_input_grad
        self.module: Any = call.module
        self.extra = call.extra
        self.path = call.handle.path

    def wants(self, name: str) -> bool:
        """Whether the parameter of this name takes part in the backward pass."""
        return name in self._wanted

    def samples(self, x: Tensor) -> Tensor:
        """`x` with one row a sample, in the order of the batch, along axis 0."""
        order = self._call.row_order
        if order is None:
            return x.movedim(self._call.axis, 0) if self._call.axis else x
        batch = self._call.forward.batch_size or len(order)
        rows = x.new_zeros(batch, *x.shape[1:])
        return rows.index_copy_(0, order[: x.shape[0]], x)

    def admit(self) -> None:
        """Check that this contribution may enter the running pass."""
        order, axis = self._call.row_order, self._call.axis
        forward = self._call.forward
        rows = self.g.shape[axis] if order is None else (forward.batch_size or len(order))
        self._call.handle.keeper.admit(self.path, forward, rows)

    def record(self, name: str, record: Record) -> None:
        """Add a contribution to the parameter of this name."""
        handle = self._call.handle
        assert handle.rule is not None
        handle.keeper.plan_log.seen(self.path, handle.rule.name, tuple(self.g.shape), record.nbytes)
        handle.keeper.record(self._wanted[name], record)

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> Choice:
        """The planner's choice for a [b, t, d] and g [b, t, p]."""
        b, t, d = a.shape
        choice = self._planner.linear(b, t, d, g.shape[2], a.element_size(), self._may_keep(name))
        return self._noted(tuple(a.shape), choice)

    def plan_conv(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, name: str = "weight"
    ) -> Choice:
        """The planner's choice for a convolution over x [b, c, *space]."""
        choice = self._planner.conv(
            x.shape[0], torch.Size(x.shape[2:]).numel(), torch.Size(g.shape[2:]).numel(), geometry,
            x.element_size(), self._may_keep(name),
        )  # fmt: skip
        return self._noted(tuple(x.shape), choice)

    @property
    def _planner(self) -> Any:
        return self._call.handle.keeper.planner

    def _may_keep(self, name: str) -> bool:
        return not self._call.handle.keeper.shared(self._wanted[name])

    def _noted(self, shape: tuple[int, ...], choice: Choice) -> Choice:
        handle = self._call.handle
        assert handle.rule is not None
        handle.keeper.plan_log.note(self.path, handle.rule.name, shape, choice)
        return choice

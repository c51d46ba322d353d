"""What happens around a module's forward: the root opens the pass; raw parameters are expanded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence

from fastclip import ops
from fastclip.bookkeeping import BookKeeper
from fastclip.calls import FORWARD, Entered, Forward
from fastclip.double_backward import differentiable_once
from fastclip.errors import FastclipError, GraphError, UnsupportedLayerError
from fastclip.inputs import batch_sizes_of, tensors_of
from fastclip.interception import ATTRIBUTE, Handle
from fastclip.layers import KeptRecord
from fastclip.private_layer import Call, PrivateLayer, wanted_parameters


class RootScope:
    """The model's own forward: finds the batch size, and opens the pass where gradients come in."""

    def run(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        entered = self.enter(handle, module, inner, args, kwargs)
        try:
            out = inner(*entered.args, **entered.kwargs)
        finally:
            entered.leave()
        return entered.opening(out)

    @_disable_dynamo
    def enter(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> RootCall:
        """Everything before the model's forward; on its first training call, `inner` is probed."""
        keeper = handle.keeper
        if keeper.calls.probe:
            return RootCall(args, kwargs)
        outermost = not keeper.depth and torch.is_grad_enabled()
        if outermost and torch._C._current_graph_task_id() != -1:
            if not keeper.running:
                raise GraphError(
                    "the whole private model is recomputed inside a backward pass of its own "
                    "(checkpoint(model, ..., use_reentrant=True)); use use_reentrant=False, or "
                    "checkpoint parts of the model"
                )
            outermost = False  # a recomputation: what it adds belongs to the running pass
        layout = keeper.calls.layout_of(FORWARD)
        called = Entered(FORWARD, module, inner, args, kwargs)
        if outermost:
            keeper.check_unchanged()
            if layout.due(module, args, kwargs):
                keeper.calls.learn(layout, called)
            keeper.guard.arm(keeper.names)
        batch = layout.batch_size(args, kwargs)
        inside = keeper.root_forward(batch, layout)
        return RootCall(args, kwargs, keeper, inside, called if outermost else None)


class RootCall:
    """One call of the model's own forward; without a book-keeper it is only passed on.

    Its methods stay outside the code that torch.compile makes of the model.
    """

    def __init__(
        self, args: tuple, kwargs: dict, keeper: BookKeeper | None = None,
        inside: AbstractContextManager[Forward] | None = None, called: Entered | None = None,
    ) -> None:  # fmt: skip
        self.args, self.kwargs = args, kwargs
        self._keeper, self._called = keeper, called
        self._inside = inside or nullcontext(Forward(None))
        self._forward = self._inside.__enter__()
        if keeper is not None and called is not None:
            called.forward = self._forward
            keeper.calls.begin(called)

    @_disable_dynamo
    def leave(self) -> None:
        """The model's forward has returned, or failed."""
        self._inside.__exit__(None, None, None)
        if self._keeper is not None and self._called is not None:
            self._keeper.calls.end()

    @_disable_dynamo
    def opening(self, out: Any) -> Any:
        """The model's output, whose gradient opens the backward pass."""
        if self._keeper is not None and self._called is not None and self._forward.recording:
            hook = partial(self._keeper.open_pass, self._forward)
            for tensor in tensors_of(out):
                if tensor.grad_fn is not None:
                    tensor.register_hook(hook)
            self._keeper.calls.returned(self._called.name, out)
        return out


class PartScope:
    """A part of the model with parameters of its own: a script may call it by itself."""

    def run(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        keeper = handle.keeper
        if keeper.depth:
            return inner(*args, **kwargs)
        with keeper.calls.inside(f"{handle.path}()", module, inner, args, kwargs) as returned:
            return returned(inner(*args, **kwargs))


class RawParameterScope:
    """Parameters of shape [1, ...] that a module uses itself (class tokens, position tables).

    For the duration of the module's forward each is replaced by its expansion to [b, ...], one row
    a sample, so that a sample's own gradient exists.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def run(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        keeper, probe = handle.keeper, handle.keeper.calls.probe
        if probe:
            probe.broadcasts = True
            probe.layout.met.add(handle.path)
        if not torch.is_grad_enabled() and not (probe and probe.expand):
            return inner(*args, **kwargs)
        if probe and not probe.expand:
            return inner(*args, **kwargs)
        forward = keeper.forward if probe else keeper.layer_forward(handle.path)[0]
        if not probe:
            keeper.calls.layout_with(handle.path, forward)
        table: dict[str, Any] = module._parameters
        # a probe may run inside this very call, when the table holds expansions
        outer = handle.originals
        originals = outer or {name: table[name] for name in self.names}
        before = {name: table[name] for name in self.names}
        batch = probe.rows if probe else forward.batch_size
        batch = batch or next(iter(batch_sizes_of(args, kwargs, 0)), None)
        try:
            handle.originals = originals
            for name, parameter in originals.items():
                if parameter is None or not parameter.requires_grad or batch is None:
                    continue
                if probe:
                    rows = parameter.detach().expand(batch, *parameter.shape[1:])
                    if probe.differentiable:
                        rows = rows.clone().requires_grad_()
                        probe.source(f"{handle.path}.{name}".lstrip("."), 0, rows)
                        rows = rows.clone()  # which the model may change in place
                    table[name] = probe.expanded(rows)  # type: ignore[assignment]
                else:
                    call = Call(handle, module, forward, 0, batch, (name,))
                    table[name] = _ExpandParameter.apply(call, parameter)
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if batch == 1 or isinstance(error, (FastclipError, torch.OutOfMemoryError)):
                raise
            raise UnsupportedLayerError(
                f"{handle.path or 'the model'} ({type(module).__name__}) failed with its "
                f"parameters {list(self.names)} expanded to one row a sample ({error}); use them "
                "by broadcasting or .expand(batch, ...), not .repeat(batch, ...), or register a rule"
            ) from error
        finally:
            handle.originals = outer
            table.update(before)


class _ExpandParameter(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return parameter.expand(call.extra, *parameter.shape[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, None]:
        call: Call = ctx.call
        if g is not None:
            keeper = call.handle.keeper
            for name, parameter in wanted_parameters(ctx, call, first_edge=0).items():
                path = f"{call.handle.path}.{name}".lstrip(".")
                keeper.admit(path, call.forward, g.shape[0])
                record = KeptRecord(ops.widen(g)[:, None])
                keeper.plan_log.seen(path, "expanded parameter", tuple(g.shape), record.nbytes)
                keeper.record(parameter, record)
        return None, None


class RecurrentScope:
    """Opacus' recurrent layers: the rows of a PackedSequence are samples sorted by length."""

    def run(
        self, handle: Handle, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        x = args[0] if args else kwargs.get("input")
        keeper = handle.keeper
        if not isinstance(x, PackedSequence):
            return inner(*args, **kwargs)
        if keeper.calls.probe:  # its rows are sorted by length, and `row_order` says how
            outside, keeper.calls.probe.trusted = keeper.calls.probe.trusted, True
            try:
                return inner(*args, **kwargs)
            finally:
                keeper.calls.probe.trusted = outside
        forward, _ = keeper.layer_forward()
        rows = int(x.batch_sizes[0])
        order = x.sorted_indices
        if order is None:
            order = torch.arange(rows, device=x.data.device)
        if forward.batch_size is None:
            forward.batch_size = rows
        forward.row_order = order
        try:
            return inner(*args, **kwargs)
        finally:
            forward.row_order = None


class RelativeBias:
    """T5's relative position bias: ids [q, k] without samples, [1, h, q, k] out.

    The table is looked up once for every sample, so the bias becomes [b, h, q, k] and adds to the
    scores as before.
    """

    method = "compute_bias"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether `module` computes its bias the way T5's attention does."""
        table = getattr(module, "relative_attention_bias", None)
        return isinstance(table, nn.Embedding) and hasattr(type(module), cls.method)

    @classmethod
    def attach(cls, module: nn.Module) -> None:
        """Replace the module's `compute_bias`."""
        module.__dict__[cls.method] = MethodType(_private_bias, module)

    @classmethod
    def detach(cls, module: nn.Module) -> None:
        """Undo `attach`."""
        module.__dict__.pop(cls.method, None)


@_disable_dynamo
def _private_bias(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    plain = MethodType(type(self).compute_bias, self)  # type: ignore[attr-defined]
    table = self.relative_attention_bias
    handle: Handle | None = table.__dict__.get(ATTRIBUTE)  # type: ignore[union-attr]
    if handle is None:
        return plain(*args, **kwargs)
    keeper = handle.keeper
    if not torch.is_grad_enabled() or keeper.calls.probe:
        with handle.bypassed():
            out = plain(*args, **kwargs)
        if keeper.calls.probe or not (keeper.depth and keeper.forward.trains):
            return out
        # Inside a reentrant checkpoint: the recomputation will return one bias a sample.
        return out.expand(keeper.forward.batch_size or 1, *out.shape[1:])
    forward, _ = keeper.layer_forward()
    seen: list[Tensor] = []
    hook = table.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))  # type: ignore
    try:
        with torch.no_grad():
            reference = plain(*args, **kwargs)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].dim() != 2 or forward.batch_size is None:
        raise UnsupportedLayerError(f"{handle.path}: compute_bias does not look up ids [q, k] once")
    ids = seen[0].expand(forward.batch_size, *seen[0].shape)
    parameters = handle.parameters(table)  # type: ignore[arg-type]
    call = Call(handle, table, forward, 0, None, tuple(parameters))  # type: ignore[arg-type]
    bias = PrivateLayer.apply(call, ids, *parameters.values()).permute(0, 3, 1, 2)
    if bias.shape[1:] != reference.shape[1:]:
        raise UnsupportedLayerError(
            f"{handle.path}: compute_bias returned {list(reference.shape)}, expected "
            f"[1, {', '.join(map(str, bias.shape[1:]))}]; register a rule for this attention"
        )
    return bias

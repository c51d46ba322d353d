"""The private autograd function, and the interface of a rule's backward."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastclip.backward.python_nodes import uncast
from fastclip.backward.state import SeenLayer
from fastclip.backward.traced_step import Seen
from fastclip.core.autograd import differentiable_once, private_function, save, saved, taking_part
from fastclip.errors import GraphError, where
from fastclip.ops.units import UnitSamples
from fastclip.rules import Record
from fastclip.rules.contribution import Contribution, FoldedRecord, LastCast
from fastclip.rules.protocol import check_customized
from fastclip.samples.batch_axis import BatchAxis
from fastclip.samples.calls import Forward


class Call:
    """What a layer's call keeps for its backward, except tensors that autograd tracks."""

    def __init__(
        self, handle: SeenLayer, module: nn.Module, forward: Forward, batch_axis: BatchAxis, extra: Any,
        parameters: dict[str, nn.Parameter],
    ) -> None:  # fmt: skip
        self.handle, self.module, self.forward = handle, module, forward
        self.batch_axis, self.extra, self.parameters = batch_axis, extra, parameters
        self.sample_order = forward.sample_order
        self.paused = handle.grad_state.paused
        self.seen: Seen | None = None
        """What the trace knows about the output."""

    def samples_of(self, x: Tensor) -> Tensor | None:
        """Sample attribution of every entry of the input or output; None if unknown."""
        order, batch_axis, batch = self.sample_order, self.batch_axis, self.forward.batch_size
        if order is not None:
            return order[: x.shape[0]].cpu().view([-1] + [1] * (x.dim() - 1))
        if batch is None:
            batch = x.shape[batch_axis.axis] if batch_axis.plain else None
        if batch is None or not batch_axis.fits(x, batch):
            return None
        found = batch_axis.sample_of_entry(x.shape[batch_axis.axis], batch, torch.device("cpu"))
        return found.view([-1 if d == batch_axis.axis else 1 for d in range(x.dim())])


@private_function
class PrivateLayer(Function):
    """A layer with a backward that returns the input's gradient only."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *parameters: Tensor) -> Tensor:
        rule = call.handle.rule
        assert rule is not None
        check_customized(call.module)
        operand = x
        if rule.multiplies:
            call.forward.cast = call.forward.cast or LastCast()
            operand = call.forward.cast.of(x)
        call.handle.bypass = True
        try:
            returned = rule.forward(call.module, operand, call.extra)
        finally:
            call.handle.bypass = False
        out, operands = (
            returned if type(returned) is tuple and len(returned) == 2 else (None, returned)
        )
        if out is None or type(operands) is not tuple or not _are_tensors(operands):
            raise TypeError(
                f"{type(rule).__name__}.forward must return the output and a tuple of tensors to save, "
                f"got {_kinds(operands)}."
            )
        ctx.set_materialize_grads(False)
        save(ctx, *operands)
        ctx.call = call
        ctx.dtype = x.dtype
        if not call.paused:
            call.seen = call.handle.grad_state.trace.seen(out, x)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        nothing = (None,) * (2 + len(call.parameters))
        if g is None:
            return nothing
        grad_state = call.handle.grad_state
        operands = saved(ctx)  # which may run a checkpoint again
        trace = grad_state.trace
        if grad_state.paused or not trace.observing:
            return (None, PrivateLayer._input_gradient(ctx, call, operands, g), *nothing[2:])
        trace.arrived(call.handle.path, call.seen, g, call.samples_of)
        with trace.aside():
            grad_input = PrivateLayer._input_gradient(ctx, call, operands, g)
        trace.passed_on(grad_input, g, call.seen, call.samples_of)
        return (None, grad_input, *nothing[2:])

    @staticmethod
    def _input_gradient(ctx: Any, call: Call, operands: Any, g: Tensor) -> Tensor | None:
        wanted = _wanted(ctx, call)
        backward = LayerBackward(call, operands, g, ctx.needs_input_grad[1], wanted)
        with uncast(g):
            grad_input = backward.run()
        if grad_input is not None and grad_input.dtype != ctx.dtype:
            grad_input = grad_input.to(ctx.dtype)
        return grad_input


_USUAL = frozenset({Tensor, nn.Parameter, type(None)})


def _are_tensors(saved: tuple) -> bool:
    """Whether all are tensors or None."""
    if _USUAL.issuperset(map(type, saved)):
        return True
    return all(x is None or isinstance(x, Tensor) for x in saved)


def _kinds(saved: Any) -> str:
    kinds = [type(x).__name__ for x in saved] if isinstance(saved, (tuple, list)) else []
    return f"a {type(saved).__name__}" + f" of {', '.join(kinds)}" * bool(kinds)


def _wanted(ctx: Any, call: Call) -> dict[str, nn.Parameter]:
    """The parameters that this backward pass needs contributions to, by name."""
    grad_state, parameters = call.handle.grad_state, call.parameters
    if call.paused or grad_state.paused:
        return {}
    wanted = taking_part(ctx, parameters.values(), grad_state.names)
    found = dict(compress(parameters.items(), wanted))
    grad_state.check_hooks(found.values())
    return found


class LayerBackward(Contribution):
    """The interface of a rule's backward.

    Attributes:
        g: gradient of the layer's output. saved: what its forward saved. extra: the rest of the
            call. module: the layer, with its current parameters. path: its path in the model.
        needs_input_grad: whether the input's gradient must be returned.
    """

    def __init__(
        self, call: Call, saved: tuple[Tensor | None, ...], g: Tensor, needs_input_grad: bool,
        wanted: dict[str, nn.Parameter],
    ) -> None:  # fmt: skip
        handle = call.handle
        grad_state, rule = handle.grad_state, handle.rule
        assert rule is not None
        super().__init__(
            handle.path,
            rule.name,
            g,
            wanted,
            grad_state.planner,
            grad_state.plan_log,
            grad_state.last_input,
        )
        self._call, self._grad_state, self._wanted = call, grad_state, wanted
        self.saved: tuple[Any, ...] = saved
        self.needs_input_grad = needs_input_grad
        self.module: Any = call.module
        self.extra, self.path = call.extra, handle.path

    def run(self) -> Tensor | None:
        """The rule's backward: records contributions, returns the input's gradient if it is wanted."""
        handle = self._call.handle
        rule = handle.rule
        assert rule is not None
        if self._wanted:
            self.admit()
        handle.bypass = True
        try:
            grad_input = rule.backward(self)
        finally:
            handle.bypass = False
        self.check_complete()
        return grad_input

    def samples(self, x: Tensor) -> Tensor:
        """`x` with one entry per sample along axis 0, in the order of the batch."""
        order, batch_axis = self._call.sample_order, self._call.batch_axis
        if order is None:
            return (
                x
                if batch_axis.plain and not batch_axis.axis
                else batch_axis.samples(x, self._batch(x))
            )
        batch = self._call.forward.batch_size or len(order)
        samples = x.new_zeros(batch, *x.shape[1:])
        return samples.index_copy_(0, order[: x.shape[0]], x)

    def admit(self) -> None:
        """Check that this contribution may enter the running pass."""
        order, forward = self._call.sample_order, self._call.forward
        samples = self._batch(self.g) if order is None else (forward.batch_size or len(order))
        self._grad_state.admit(self.path, forward, samples)

    def _batch(self, x: Tensor) -> int:
        batch_axis, batch = self._call.batch_axis, self._call.forward.batch_size
        if batch_axis.plain:
            return x.shape[batch_axis.axis]
        if batch is None:
            raise GraphError(
                f"{where(self.path, self._call.module)} gets several entries per sample, and no input "
                "of this call shows the number of samples. Call it through the model or one of its "
                "methods, with an input that has one entry per sample.",
                doc="batch-axis",
            )
        if not batch_axis.fits(x, batch):
            raise GraphError(
                f"{where(self.path)}: a tensor of shape {list(x.shape)} cannot hold {batch} samples. "
                "Pass the layer all samples of the batch.",
                doc="batch-axis",
            )
        return batch

    def _take(self, name: str, record: Record) -> None:
        rule, batch_axis = self._call.handle.rule, self._call.batch_axis
        assert rule is not None
        if not batch_axis.plain and rule.axis(self.module) is not None:
            record = FoldedRecord(record, batch_axis, self._batch(self.g))
        self._grad_state.record(self._wanted[name], record)

    def _units(self) -> UnitSamples | None:
        return self._grad_state.units

    def _named(self) -> str:
        return f"the rule {self._rule} of {where(self.path, self.module)}"

    def _may_keep(self, name: str) -> bool:
        return not self._grad_state.shared(self._wanted[name])

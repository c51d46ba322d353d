"""torch's recurrent layers: two standard products per layer and direction, around the fused kernel.

F.linear computes the input's share of the gates. The kernel runs over it, with an identity instead of
that product. Its backward returns the gradient G of the gates themselves. Sample i's gradient of W_hh is
that of a product with the previous states: the sum over its steps of G_t h_{t-1}^T. For a GRU's n gate,
r_t G_t replaces G_t. The rows of a packed sequence are moved to their positions in the padded batch,
where the model's other layers have their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from fastclip import ops
from fastclip.core.autograd import save, saved
from fastclip.rules.contraction import RoutedRecord
from fastclip.rules.derived import composite, detached, is_private
from fastclip.rules.linear import linear_record
from fastclip.rules.records import KeptRecord
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


# -------------------------------------------------------------------------------------------------
# torch's recurrent cells, and LSTMs with a projection: step by step, with separate products.


def _lstm_cell(
    x: Tensor, states: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = states
    return lstm_step(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The states after a step of an LSTM with these gates."""
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (r, z, n), (of_r, of_z, of_n) = (
        share.chunk(3, -1) for share in (F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh))
    )
    z, n = (z + of_z).sigmoid(), (n + (r + of_r).sigmoid() * of_n).tanh()
    return n + z * (h - n)


def _cell(
    activation: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return activation(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))


def projected(
    gates: Sequence[Tensor], alive: Sequence[Tensor | None], h: Tensor, c: Tensor,
    w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """An LSTM whose states are projected, h_t = W_hr (o * tanh(c_t)).

    Args:
        gates: the input's share at every step, [b, 4 * hidden]. h: [b, p]. c: [b, hidden].
        alive: whether each sequence has this step, [b, 1]; None if all have.

    Returns:
        The states h after every step; the last h and c of every sequence.
    """
    out = []
    for step, goes_on in zip(gates, alive, strict=True):
        full, cell = lstm_step(step + F.linear(h, w_hh, b_hh), c)
        state = F.linear(full, w_hr)
        out.append(state)
        h = state if goes_on is None else torch.where(goes_on, state, h)
        c = cell if goes_on is None else torch.where(goes_on, cell, c)
    return out, h, c


composite(torch.lstm_cell, _lstm_cell)
composite(torch.gru_cell, _gru_cell)
composite(torch.rnn_tanh_cell, partial(_cell, torch.tanh))
composite(torch.rnn_relu_cell, partial(_cell, torch.relu))


# -------------------------------------------------------------------------------------------------


sorted_by: ContextVar[Tensor | None] = ContextVar("sorted_by", default=None)
"""Inside a layer over a packed sequence: the row of the padded batch of every sorted one."""


class _Memory:
    """What a run of the kernel keeps for the backward pass of the gates, in their layout.

    Args:
        reset: weight and bias of the states in a GRU's r gate; None for other layers.
    """

    def __init__(self, reset: tuple[Tensor, Tensor | None] | None) -> None:
        self.reset = reset
        self.gates: Tensor | None = None
        """The input's share of them."""
        self.before: Tensor | None = None
        """The states that each step starts from."""
        self.constant = False
        """The gates do not depend on the batch."""

    def take(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the other factor of W_hh and that product's gradient, from the gates' gradient."""
        gates, before = self.gates, self.before
        assert gates is not None
        assert before is not None
        self.gates = self.before = None
        if self.reset is not None:
            weight, bias = self.reset
            bias = None if bias is None else ops.widen(bias)
            size = before.shape[-1]
            share = F.linear(ops.widen(before), ops.widen(weight), bias)
            reset = (ops.widen(gates[..., :size]) + share).sigmoid()
            g = ops.widen(g)
            g = torch.cat([g[..., : 2 * size], g[..., 2 * size :] * reset], -1)
        return before.to(g.dtype), g


class _Even:
    """A batch of sequences of one length, [t, b, d]."""

    def inward(self, x: Tensor, reverse: bool) -> Tensor:
        """Returns `x` in the order of its steps."""
        return x.flip(0) if reverse else x

    outward = inward

    def run(self, kernel: Callable, gates: Tensor, states: Any, weights: list[Tensor]) -> Any:
        """Runs one layer and direction of torch's own kernel."""
        return kernel(gates, states, weights, len(weights) > 2, 1, 0.0, True, False, False)

    def before(self, start: Tensor, out: Tensor) -> Tensor:
        """Returns the states before each step: `start` [1, b, d], then `out` without the last."""
        return torch.cat([start, out[:-1]])

    def project(self, gates: Tensor, states: Sequence[Tensor], *weights: Any) -> Any:
        """One layer and direction of an LSTM with a projection."""
        h, c = (s[0] for s in states)
        out, h, c = projected(gates.unbind(0), [None] * len(gates), h, c, *weights)
        return torch.stack(out), h[None], c[None]


class _Packed:
    """The rows [n, d] of a PackedSequence, step by step, with sequences sorted by length.

    Args:
        rows: n. sizes: of the batch at every step, on the CPU. order: see `sorted_by`.
    """

    def __init__(self, rows: Tensor, sizes: Tensor, order: Tensor | None) -> None:
        n, device = len(rows), rows.device
        self.sizes, self.batch, self.steps = sizes, int(sizes[0]), len(sizes)
        count = sizes.to(device, non_blocking=True)
        numbers = torch.arange(max(n, self.steps, self.batch), dtype=torch.int64, device=device)
        step = numbers[: self.steps].repeat_interleave(count, output_size=n)
        first = count.cumsum(0) - count
        batch_axis = numbers[:n] - first[step]  # among the sorted ones
        lengths = (count > numbers[: self.batch, None]).sum(1)  # of the sorted sequences
        self.order = numbers[: self.batch] if order is None else order.to(device)
        self.slot = self.order[batch_axis] * self.steps + step
        """Of each row in the padded batch."""
        self.turned = first[lengths[batch_axis] - 1 - step] + batch_axis
        """The row of the same sequence that is as far from its end as this one from its start."""

    def inward(self, x: Tensor, reverse: bool) -> Tensor:
        return self.padded(self.outward(x, reverse))

    def outward(self, x: Tensor, reverse: bool) -> Tensor:
        return x[self.turned] if reverse else x

    def padded(self, x: Tensor) -> Tensor:
        """Returns rows [n, d] as [b, t, d], with zeros after each sequence's end."""
        zeros = x.new_zeros(self.batch * self.steps, x.shape[1])
        return zeros.index_copy(0, self.slot, x).view(self.batch, self.steps, -1)

    def run(self, kernel: Callable, gates: Tensor, states: Any, weights: list[Tensor]) -> Any:
        rows, biases = gates.flatten(0, 1)[self.slot], len(weights) > 2
        return kernel(rows, self.sizes, states, weights, biases, 1, 0.0, True, False)

    def before(self, start: Tensor, out: Tensor) -> Tensor:
        return torch.cat([self._unsorted(start)[:, None], self.padded(out)[:, :-1]], 1)

    def project(self, gates: Tensor, states: Sequence[Tensor], *weights: Any) -> Any:
        h, c = map(self._unsorted, states)
        own = gates.flatten(0, 1)[self.slot, :1]  # each row says that its sequence has its step
        alive = (self.padded(torch.ones_like(own)) > 0).unbind(1)
        out, h, c = projected(gates.unbind(1), alive, h, c, *weights)
        rows = torch.stack(out, 1).flatten(0, 1)[self.slot]
        return rows, h[self.order][None], c[self.order][None]

    def _unsorted(self, x: Tensor) -> Tensor:
        """Puts [1, b, ...], sorted by length, into the order of the padded batch."""
        return torch.empty_like(x[0]).index_copy(0, self.order, x[0])


Rows = _Even | _Packed


class _Remember(Function):
    """The identity on the kernel's outputs; its backward comes before that of the gates."""

    @staticmethod
    def forward(
        ctx: Any, memory: _Memory, rows: Rows, gates: Tensor, start: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        save(ctx, gates, start, outputs[0])
        ctx.memory, ctx.rows = memory, rows
        return tuple(x.clone() for x in outputs)  # which the kernel may have saved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        memory: _Memory = ctx.memory
        memory.gates, start, out = saved(ctx)
        memory.before = ctx.rows.before(start, out)
        return None, None, None, None, *gradients


def hidden_gates(gates: Tensor, weight: Tensor, bias: Tensor | None, memory: _Memory) -> Tensor:
    """Returns the gates unchanged: the states' share W_hh h_{t-1} + b_hh will be added to them."""
    if has_torch_function((weight, bias)):
        return handle_torch_function(hidden_gates, (weight, bias), gates, weight, bias, memory)
    leaves = (weight, bias) if torch.is_grad_enabled() else ()  # like derived values
    memory.constant = any(x is not None and x.requires_grad for x in leaves)
    return gates


@register_use("hidden_gates")
class HiddenUse(UseRule):
    """W_hh and b_hh of a recurrent layer, from the gradient of its gates."""

    name = "recurrent"
    routed = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return dict(zip(("gates", "weight", "bias", "memory"), args, strict=True))

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        return batch_axis is None or batch_axis.axis < 2

    def records(self, use: UseBackward) -> None:
        before, g = use.operands["memory"].take(use.g)
        (_record_routed if use.batch_axis is None else _record_placed)(use, before, g)


def _record_placed(use: UseBackward, before: Tensor, g: Tensor) -> None:
    a, g = use.samples(before), use.samples(g)
    a, g = (x.reshape(len(x), x.shape[1:-1].numel(), x.shape[-1]) for x in (a, g))
    if use.wants("bias"):
        use.record("bias", KeptRecord(ops.wide_sum(g, 1)))
    if use.wants("weight"):
        use.record("weight", linear_record(use, a, g))


def _record_routed(use: UseBackward, before: Tensor, g: Tensor) -> None:
    owner = use.sample_of_row()
    g = g.flatten(0, 1)
    if use.wants("bias"):
        use.record("bias", KeptRecord(ops.sum_by_sample(ops.widen(g), owner, use.batch)))
    if use.wants("weight"):
        record = RoutedRecord(before.flatten(0, 1), g, owner, batch=use.batch)
        use.record("weight", record)


def _layers(kernel: Callable, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Runs the kernel layer by layer."""
    packed = isinstance(args[3], Sequence)
    rest = args[2:] if packed else args[1:]
    states, weights, biases, layers, dropout, training, bidirectional, *batch_first = rest
    x, states = args[0], (states,) if isinstance(states, Tensor) else tuple(states)
    if kwargs or any(map(is_private, (x, *states))):
        return NotImplemented
    first = bool(batch_first and batch_first[0])
    x = x.transpose(0, 1) if first else x
    rows: Rows = _Packed(x, args[1], sorted_by.get()) if packed else _Even()
    each = len(weights) // (layers * (2 if bidirectional else 1))
    finals: list[list[Tensor]] = [[] for _ in states]
    number = 0
    for layer in range(layers):
        outputs = []
        for reverse in (False, True) if bidirectional else (False,):
            own, weights = weights[:each], weights[each:]
            w_ih, w_hh, *own = own
            b_ih, b_hh, *own = own if biases else (None, None, *own)
            gates = F.linear(rows.inward(x, reverse), w_ih, b_ih)
            if is_private(gates):  # the input does not depend on the batch
                return NotImplemented
            start = tuple(s[number : number + 1] for s in states)
            if own:
                found = rows.project(gates, start, w_hh, b_hh, *own)
            else:
                found = _recurrence(kernel, rows, gates, start, w_hh, b_hh)
            if found is NotImplemented:
                return NotImplemented
            out, *ended = found
            outputs.append(rows.outward(out, reverse))
            for held, end in zip(finals, ended, strict=True):
                held.append(end)
            number += 1
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if first else x, *map(torch.cat, finals)


def _recurrence(
    kernel: Callable, rows: Rows, gates: Tensor, start: Sequence[Tensor], w_hh: Tensor,
    b_hh: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Runs the kernel over the gates of one layer and direction, and returns outputs and last states."""
    followed = is_private(w_hh) or is_private(b_hh)
    memory = _Memory(_reset(w_hh, b_hh) if kernel is torch.gru else None)
    if followed:
        gates = hidden_gates(gates, w_hh, b_hh, memory)
        if memory.constant:
            return NotImplemented
    states = tuple(start) if kernel is torch.lstm else start[0]
    found = rows.run(kernel, gates, states, _instead(w_hh, b_hh))
    return _Remember.apply(memory, rows, gates, start[0], *found) if followed else found


def _instead(w_hh: Tensor, b_hh: Tensor | None) -> list[Tensor]:
    """Returns the kernel's weights for an input that is the share of the gates."""
    identity = torch.eye(len(w_hh), dtype=w_hh.dtype, device=w_hh.device)
    if b_hh is None:
        return [identity, detached(w_hh)]
    zeros = torch.zeros(len(w_hh), dtype=w_hh.dtype, device=w_hh.device)
    return [identity, detached(w_hh), zeros, detached(b_hh)]


def _reset(w_hh: Tensor, b_hh: Tensor | None) -> tuple[Tensor, Tensor | None]:
    size = w_hh.shape[1]
    return detached(w_hh)[:size].detach(), None if b_hh is None else detached(b_hh)[:size].detach()


for _kernel in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    composite(_kernel, partial(_layers, _kernel))

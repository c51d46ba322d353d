"""Linear maps: nn.Linear, transformers' Conv1D, Opacus' SequenceBias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor, nn

from fastclip import ops
from fastclip.core.torch_names import Invented
from fastclip.ops.planner import NormMethod
from fastclip.rules.contribution import autocast_operand
from fastclip.rules.protocol import LayerCall, LayerRule, Plans, register_rule
from fastclip.rules.records import (
    BiasRecord,
    InstantiatedRecord,
    KeptRecord,
    LinearRecord,
    Record,
    kept_record,
)


@register_rule(nn.Linear)
class LinearRule(LayerRule):
    """y = x W^T + b, for inputs of any rank."""

    name = "linear"
    transposed = False
    multiplies = True

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        own = module.weight
        weight = autocast_operand(own)
        out = _not_a_view(F.linear(x, weight, module.bias))
        # The weight in the type in which it was multiplied, as torch's own layer saves it. It is cast
        # once per step.
        return out, (x if own.requires_grad else None, weight if x.requires_grad else None)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, weight = call.saved
        g = call.g.contiguous()
        if call.wants("weight") or call.wants("bias"):
            rows, record = by_position(call.samples(g)), None  # [b, t, p]
            if call.wants("weight"):
                assert x is not None
                a = by_position(call.samples(x))  # [b, t, d]
                record = linear_record(call, a, rows, transposed=self.transposed)
            if call.wants("bias"):
                call.record("bias", _of_bias(call, record, rows))
            if record is not None:
                call.record("weight", record)
        if not call.needs_input_grad:
            return None
        weight = weight if weight.dtype == g.dtype else weight.to(g.dtype)
        return g @ (weight.t() if self.transposed else weight)


@register_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """y = x W + b with W [d, p]: transformers' Conv1D."""

    transposed = True

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        own = module.weight
        weight = autocast_operand(own)
        out = _not_a_view(F.linear(x, weight.t(), module.bias))
        return out, (x if own.requires_grad else None, weight if x.requires_grad else None)


def _of_bias(call: Plans, record: Record | None, rows: Tensor) -> Record:
    """Returns the record of sum_t g [b, p] for g [b, t, p], joined with the weight's if possible."""
    if record is not None and record.together and call.is_alone("weight"):
        return BiasRecord(record.together)
    return KeptRecord(ops.wide_sum(rows, 1))


def linear_record(
    call: Plans, a: Tensor, g: Tensor, name: str = "weight", *, transposed: bool = False
) -> Record:
    """Returns the planner's record for a [b, t, d] and g [b, t, p] of this parameter, [p, d]."""
    return record_of(call.plan_linear(a, g, name), call, a, g, transposed=transposed)


def record_of(
    choice: NormMethod, call: Plans, a: Tensor, g: Tensor, *, transposed: bool = False
) -> Record:
    """Returns the record of a [b, t, d] and g [b, t, p] for the planner's choice."""
    keep = choice.keep
    if keep and not choice.of_units:
        pair = (g, a) if transposed else (a, g)
        if a.element_size() == 2 and not ops.computes_reference(a):
            # Products of 16-bit operands on tensor cores, and their norm in the same pass.
            return InstantiatedRecord(*ops.instantiated_norm(*pair, keep=True))
        return kept_record(*ops.kept_gradients(*pair, call.last_input))
    return LinearRecord(a, g, ghost=choice.ghost, transposed=transposed, keep=keep)


def _not_a_view(out: Tensor) -> Tensor:
    # With a bias, F.linear returns a view of its own result. Autograd would not let a following
    # layer change it in place. torch.compile loses the gradients of views of `out.data`.
    if isinstance(out, Invented):
        return out.reshape(out.shape)
    return out.data if out._is_view() else out


def by_position(x: Tensor) -> Tensor:
    """Returns x [b, ..., n] as [b, t, n]."""
    if x.dim() == 3:
        return x
    return x.reshape(x.shape[0], torch.Size(x.shape[1:-1]).numel(), x.shape[-1])


# -------------------------------------------------------------------------------------------------
# Opacus' SequenceBias: the bias is the last position of the output (key or value of attention).


@register_rule(SequenceBias)
class SequenceBiasRule(LayerRule):
    """[t, b, d] -> [t + 1, b, d], or [b, t, d] -> [b, t + 1, d] if the module is batch-first."""

    name = "sequence_bias"

    def axis(self, module: Any) -> int:
        return 0 if module.batch_first else 1

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        bias = module.bias
        shape = (x.shape[0], 1, x.shape[2]) if module.batch_first else (1, *x.shape[1:])
        return torch.cat([x, bias.expand(shape)], dim=1 - self.axis(module)), ()

    def backward(self, call: LayerCall) -> Tensor | None:
        time = 1 - self.axis(call.module)
        length = call.g.shape[time]
        if call.wants("bias"):
            call.record("bias", KeptRecord(ops.widen(call.g.select(time, length - 1)).clone()))
        return call.g.narrow(time, 0, length - 1) if call.needs_input_grad else None

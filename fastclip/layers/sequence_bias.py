"""Opacus' SequenceBias: the bias is the last position of the output (key or value of attention)."""

from __future__ import annotations

from typing import Any

import torch
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor

from fastclip import ops
from fastclip.layers.records import KeptRecord
from fastclip.layers.rule import LayerCall, LayerRule, register_rule


@register_rule(SequenceBias)
class SequenceBiasRule(LayerRule):
    """[t, b, d] -> [t + 1, b, d], or [b, t, d] -> [b, t + 1, d] where the module is batch-first."""

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

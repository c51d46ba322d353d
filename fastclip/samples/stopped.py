"""Gradients that are not finite stop at the output of a model that would spread them over other rows.

Products with weights of exactly 0 (a block-diagonal mask, a one-hot dispatch) keep rows apart as long as
all gradients are finite: 0 * NaN is NaN. The loss of one row may be NaN for its own label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.samples.inputs import flatten


def stop_gradients(spreading: Mapping[int, int], output: Any) -> None:
    """Rows whose gradient comes in NaN, infinite or too large to be squared get zeros in its place.

    Args:
        spreading: the axis of the rows in these outputs, by number; -1: entries are taken by themselves.
    """
    if not spreading:
        return
    leaves = [x for x in flatten(output)[0] if isinstance(x, (Tensor, PackedSequence))]
    for number, axis in spreading.items():
        if number >= len(leaves):
            continue
        leaf = leaves[number]
        x, axis = (leaf.data, -1) if isinstance(leaf, PackedSequence) else (leaf, axis)
        if x.requires_grad and x.dim() > axis:
            x.register_hook(partial(_stopped, axis))


def _stopped(axis: int, gradient: Tensor) -> Tensor:
    largest = torch.finfo(gradient.dtype).max
    # a norm that is beyond the largest number contributes nothing anyway
    known = gradient.abs() <= (largest if gradient.dtype == torch.float16 else largest**0.5)
    others = [d for d in range(gradient.dim()) if d != axis]
    if axis >= 0 and others:
        known = torch.all(known, others, keepdim=True)
    return torch.where(known, gradient, torch.zeros_like(gradient))

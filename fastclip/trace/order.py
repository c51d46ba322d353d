"""Whether what an operation does to a sample depends on the sample's number in the batch.

A constant that has other values alongside one sample than alongside another says which number it has:
masks of ones pass, `arange(b)` does not. Data that went through another library come back so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.operation import Kind
from fastclip.trace.shadow import MOVED, ORDER, RANDOM, TRAINED, Shadow


def ordered(
    tracer: Any, kind: Kind, found: list[Shadow], tensors: Sequence[Tensor],
    shadows: Sequence[Shadow], outs: Sequence[Tensor],
) -> list[Shadow]:  # fmt: skip
    """What an operation returns, flagged if constants among its operands change from sample to sample.

    Args:
        found: as its rule says. tensors, shadows: its operands. outs: what it returned.
    """
    own = found[0].sample if found else None
    if own is None or found[0].flags & ORDER:
        return found
    moved = bool(found[0].flags & MOVED)
    if kind.aligned == "together":
        random = all(s.held or s.flags & RANDOM for s in shadows)
        changes = not random and not moved and is_uneven(outs[0], own)
    else:
        axes = [axis - own.dim() for axis, n in enumerate(own.shape) if n > 1]
        changes = False
        backward = kind.aligned == "gradient"
        for x, shadow in zip(tensors, shadows, strict=True):
            if shadow.held or shadow.flags & RANDOM or x.is_meta:
                continue
            if backward and (x is not tensors[0] or x.shape != outs[0].shape):
                continue
            alongside = any(-a <= x.dim() and x.shape[a] > 1 and x.stride(a) for a in axes)
            if kind.aligned == "stacked":
                changes = changes or _is_stacked(x, own)
            elif alongside:
                changes = changes or changes_alongside(x, own, shadow, moved)
    return [flagged(tracer, f) for f in found] if changes else found


def flagged(tracer: Any, shadow: Shadow) -> Shadow:
    """The same, in which the number of a sample matters."""
    return tracer.made(
        shadow.sample, shadow.flags | ORDER,
        degree=shadow.degree, part=shadow.part, factor=shadow.factor,
    )  # fmt: skip


def changes_alongside(x: Tensor, own: Tensor, shadow: Shadow, moved: bool = False) -> bool:
    """Whether a constant has other values alongside one sample than alongside another.

    Args:
        own: the attribution of what it meets. shadow: the constant's. moved: samples lie where data put
            them.
    """
    if shadow.flags & RANDOM or x.numel() < 2 or x.is_meta:
        return False
    try:
        torch.broadcast_shapes(x.shape, own.shape)
    except RuntimeError:
        return False
    if shadow.flags & TRAINED and x.is_leaf and x.requires_grad:  # a trained entry for each number
        x = torch.arange(x.numel(), device="cpu").view(x.shape)
    return at.differs(x, own, moved)


def _is_stacked(x: Tensor, own: Tensor) -> bool:
    stacked = x.dim() > 2 and own.dim() == x.dim() and x.shape[0] > 1 < own.shape[0]
    if not stacked or not x.stride(0):
        return False
    return at.differs(x.flatten(-2)[..., None, :], own.amax((-1, -2), keepdim=True))


def is_uneven(x: Tensor, sample: Tensor) -> bool:
    """Whether entries of no sample, among those of samples, change from sample to sample."""
    none = sample == at.NONE
    if x.is_meta or not x.numel() or x.is_complex() or not bool(none.any()) or bool(none.all()):
        return False
    low = sample.masked_fill(none, at.SEVERAL)
    values = x.detach().double().expand(x.shape)
    for axis, n in enumerate(sample.shape):
        if n < 2 or not bool(
            (sample.amax(axis) != low.amin(axis)).logical_and(~none.all(axis)).any()
        ):
            continue  # one sample alone lies along this axis
        here = none.expand(x.shape)
        high = values.masked_fill(~here, -torch.inf).amax(axis)
        least = values.masked_fill(~here, torch.inf).amin(axis)
        if bool(((high > least) & here.any(axis)).any()):
            return True
    return False

"""Norms to scales and counts in one launch; noisy counts to thresholds in another.

For sample b of group k, n_b = sqrt(sum_l norm_sq[l, b]) and scale_b = w_k s(n_b; C_k), less the
strategy's rounding margin. Each sample adds 1 to a count of the policy. Arithmetic is float64 (a few
thousand numbers). Norms are compared with thresholds in float32, as in the reference. Counts are whole
or half numbers, whose atomic sums are exact: the order of programs does not matter. A program takes
BLOCK_B samples and goes through the tensors BLOCK_L at a time, and the loads of a block run
concurrently. The sums of a sample are added in fixed order.

Index letters: b sample, l parameter tensor, k group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.clipping.codes import PolicyCode, ScaleCode, clip_numbers, step_numbers
from fastclip.clipping.policy import LARGEST
from fastclip.ops.triton.runtime import cdiv, launched, next_power_of_2, runs_on

_HARD = tl.constexpr(ScaleCode.HARD.value)
_TANH = tl.constexpr(ScaleCode.TANH.value)
_AUTOMATIC = tl.constexpr(ScaleCode.AUTOMATIC.value)
_GLOBAL = tl.constexpr(ScaleCode.GLOBAL.value)
_GLOBAL_ADAPT = tl.constexpr(ScaleCode.GLOBAL_ADAPT.value)
_AUTO_V = tl.constexpr(ScaleCode.AUTO_V.value)
_QUANTILE = tl.constexpr(PolicyCode.QUANTILE.value)
_GROUP = tl.constexpr(PolicyCode.GROUP.value)
_REWEIGHTED = tl.constexpr(PolicyCode.REWEIGHTED.value)
_LARGEST = tl.constexpr(LARGEST)
_MOST_GROUPS = 1024
_MOST_LAYERS = 16384
_SAMPLES = 32
"""Samples per program: 128 bytes of a row of norms."""
_TENSORS = 64
"""Tensors per block."""
_THRESHOLDS = 1024
"""Thresholds per block when their squares are added."""


@triton.jit
def _tanh(x):
    """tanh of x >= 0, relative error below 1e-12: 1 - exp(-2x) alone loses its digits near 0."""
    square = x * x
    near = x * (1 - square / 3 + 2 * square * square / 15)
    tail = tl.exp(-2 * x)
    return tl.where(x < 0.02, near, (1 - tail) / (1 + tail))


@triton.jit
def _scale(n, c, KIND: tl.constexpr, PARAMETER: tl.constexpr):
    """s(n; C) for float64 norms and thresholds; the global functions without their factor C."""
    if KIND == _HARD:
        value = c / tl.maximum(n, c)
    elif KIND == _TANH:
        value = _tanh(c / (n + tl.full((1,), PARAMETER, tl.float64)))
    elif KIND == _AUTOMATIC:
        value = c / (n + tl.full((1,), PARAMETER, tl.float64))
    elif KIND == _AUTO_V:
        length = tl.sqrt(n * n + tl.full((1,), PARAMETER, tl.float64))
        value = tl.where(n > 0, c / length, 0.0)
    elif KIND == _GLOBAL:
        value = tl.where(n <= c, 1 / c, 0.0)
    else:
        value = 1 / tl.maximum(n, c)
    return value


@launched(do_not_specialize=["stride_l", "L", "B"])
def _clip_kernel(
    norm_sq, threshold, origin, bound, weights, groups, layers, scales, norms, counts,
    stride_l, stride_b, L, B, K, ALL,
    KIND: tl.constexpr, PARAMETER: tl.constexpr, POLICY: tl.constexpr, TAU: tl.constexpr,
    BELOW: tl.constexpr, CENTERED: tl.constexpr, PER_LAYER: tl.constexpr, GROUPED: tl.constexpr,
    PER_GROUP: tl.constexpr, NORMALIZED: tl.constexpr, BOUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr, SUBSET: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr,
    ROOM_WITHIN: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_ALL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = b < B
    local = tl.arange(0, BLOCK_L).to(tl.int64)
    norm_sq += b[None, :] * stride_b
    total = tl.zeros((BLOCK_L, BLOCK_B), tl.float64)
    for start in range(0, L, BLOCK_L):
        layer = (start + local)[:, None]
        here = (layer < L) & inside[None, :]
        total += tl.load(norm_sq + layer * stride_l, mask=here, other=0.0).to(tl.float64)
    total = tl.sum(total, 0)
    n32 = tl.sqrt(total.to(tl.float32).to(tl.float64)).to(tl.float32)
    tl.store(norms + b, n32, mask=inside)
    finite = (n32 == n32) & (n32 < float("inf"))

    # S of the scale function with its weights, if scales are divided by it
    factor = tl.full((BLOCK_B,), ROOM, tl.float64)
    k = tl.arange(0, BLOCK_K)
    if NORMALIZED:
        if PER_LAYER:
            squares = tl.zeros((BLOCK_ALL,), tl.float64)
            for start in range(0, ALL, BLOCK_ALL):
                every = start + tl.arange(0, BLOCK_ALL)
                c_all = tl.load(threshold + every, mask=every < ALL, other=0.0)
                squares += c_all * c_all
            factor /= tl.sqrt(tl.sum(squares, 0))
        else:
            largest = tl.full((BLOCK_K,), 1.0, tl.float64)
            if KIND != _GLOBAL and KIND != _GLOBAL_ADAPT:  # whose sensitivity is 1
                if PER_GROUP:
                    largest = tl.load(threshold + k, mask=k < K, other=0.0)
                else:
                    largest = tl.load(threshold + k * 0)
            if WEIGHTED:
                largest *= tl.load(weights + k, mask=k < K, other=0.0)
            factor /= tl.max(largest, 0)
    elif BOUNDED:
        factor *= tl.load(bound)

    alive = finite & inside
    member = tl.zeros((BLOCK_B,), tl.int64)
    if GROUPED:
        group = tl.load(groups + b, mask=inside, other=-1)
        alive = alive & (group >= 0)
        member = tl.maximum(group, 0)
    c = tl.load(threshold + member) if PER_GROUP else tl.load(threshold + member * 0)
    if WEIGHTED:
        factor *= tl.load(weights + member)

    if PER_LAYER:
        for start in range(0, L, BLOCK_L):
            layer = (start + local)[:, None]
            here = (layer < L) & inside[None, :]
            place = tl.load(layers + layer, mask=layer < L, other=0) if SUBSET else layer
            own = tl.load(norm_sq + layer * stride_l, mask=here, other=0.0)
            own = tl.sqrt(own.to(tl.float64))
            c_own = tl.load(threshold + place, mask=layer < L, other=1.0)
            c_own *= tl.full((1, 1), ROOM_WITHIN, tl.float64)
            value = _scale(own, c_own, KIND, PARAMETER) * factor[None, :]
            value = tl.minimum(tl.where(alive[None, :] & (own == own), value, 0.0), _LARGEST)
            tl.store(scales + layer * B + b[None, :], value.to(tl.float32), mask=here)
    else:
        n = n32.to(tl.float64)
        limit = c * tl.full((1,), ROOM_WITHIN, tl.float64)
        value = tl.where(alive, _scale(n, limit, KIND, PARAMETER) * factor, 0.0)
        value = tl.minimum(value, _LARGEST)
        tl.store(scales + b, value.to(tl.float32), mask=inside)

    if COUNT:
        if POLICY == _QUANTILE:
            limit = (c * tl.full((1,), TAU, tl.float64)).to(tl.float32)
            within = n32 <= limit  # False for NaN, which is beyond every threshold
            first = within if BELOW else within == 0
        elif POLICY == _GROUP:
            first = (n32 <= tl.load(origin).to(tl.float32)) == 0
        else:
            first = inside
        if GROUPED:
            belongs = inside & (tl.load(groups + b, mask=inside, other=-1) >= 0)
            if POLICY == _REWEIGHTED:
                tl.atomic_add(counts + member, belongs.to(tl.float64), mask=belongs)
            else:
                cell = member + tl.where(first, 0, K)
                tl.atomic_add(counts + cell, belongs.to(tl.float64), mask=belongs)
        else:
            ones = tl.where(first & inside, 1.0, 0.0).to(tl.float64)
            if CENTERED:
                ones = tl.where(inside, ones - 0.5, 0.0)
            tl.atomic_add(counts, tl.sum(ones, 0))


def clip_scale(
    norm_sq: Tensor, strategy: Any, state: Any, groups: Tensor | None = None,
    layers: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fastclip.ops.clip_scale for every strategy built of fastclip.clipping's own parts."""
    policy, numbers = strategy.threshold, clip_numbers(strategy)
    num_groups = policy.num_groups or 1
    total_layers = state.threshold.numel() if policy.per_layer else 1
    if (
        numbers is None or not runs_on(norm_sq)
        or num_groups > _MOST_GROUPS or total_layers > _MOST_LAYERS
        or norm_sq.dtype != torch.float32
    ):  # fmt: skip
        return NotImplemented
    length, b = norm_sq.shape
    norms = norm_sq.new_empty(b)
    scales = norm_sq.new_empty((length, b) if policy.per_layer else (b,))
    if not b:
        return scales, norms
    grouped = groups is not None and policy.num_groups is not None
    nothing = norms  # a pointer that is never read
    _clip_kernel[(cdiv(b, _SAMPLES),)](
        norm_sq, state.threshold, state.origin,
        state.bound if state.bound is not None else nothing,
        state.weights if state.weights is not None else nothing,
        groups if grouped else nothing, layers if layers is not None else nothing,
        scales, norms, counts if counts is not None else nothing,
        norm_sq.stride(0), norm_sq.stride(1), length, b, num_groups, total_layers,
        KIND=numbers.scale.value, PARAMETER=numbers.parameter, POLICY=numbers.policy.value,
        TAU=numbers.tau, BELOW=numbers.below, CENTERED=numbers.centred,
        PER_LAYER=policy.per_layer, GROUPED=grouped,
        PER_GROUP=grouped and state.threshold.dim() == 1, NORMALIZED=strategy.scale.normalized,
        BOUNDED=state.bound is not None, WEIGHTED=state.weights is not None and grouped,
        SUBSET=layers is not None, COUNT=counts is not None,
        ROOM=numbers.room, ROOM_WITHIN=numbers.within,
        BLOCK_L=min(_TENSORS, next_power_of_2(length)), BLOCK_B=_SAMPLES,
        BLOCK_K=next_power_of_2(num_groups), BLOCK_ALL=min(_THRESHOLDS, next_power_of_2(total_layers)),
    )  # fmt: skip
    return scales, norms


@launched
def _step_kernel(
    counts, noise, threshold, origin, noisy, moved, K,
    POLICY: tl.constexpr, GROUPED: tl.constexpr, NOISE: tl.constexpr,
    BATCH: tl.constexpr, RATE: tl.constexpr, TARGET: tl.constexpr, SHIFT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, LARGEST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    first = tl.load(counts + k, mask=inside, other=0.0)
    if NOISE:
        first += tl.load(noise + k, mask=inside, other=0.0)
    tl.store(noisy + k, first, mask=inside)
    batch = tl.full((1,), BATCH, tl.float64)
    if GROUPED and POLICY != _REWEIGHTED:
        second = tl.load(counts + K + k, mask=inside, other=0.0)
        if NOISE:
            second += tl.load(noise + K + k, mask=inside, other=0.0)
        tl.store(noisy + K + k, second, mask=inside)
        high = tl.where(inside, tl.maximum(first, 0.0), 0.0)
        size = tl.maximum(high + tl.maximum(second, 0.0), 1.0)
    if POLICY == _QUANTILE:
        fraction = high / size if GROUPED else first / batch + tl.full((1,), SHIFT, tl.float64)
        distance = fraction - tl.full((1,), TARGET, tl.float64)
        value = tl.load(threshold + k, mask=inside, other=1.0)
        value *= tl.exp(tl.full((1,), RATE, tl.float64) * distance)
    elif POLICY == _GROUP:
        share = tl.maximum(tl.sum(high, 0) / batch, 1 / batch)
        ratio = tl.minimum(high / size / share, tl.full((1,), LARGEST, tl.float64))
        value = tl.load(origin) * (1 + ratio)
    else:
        value = tl.minimum(batch / K / tl.maximum(first, 1.0), tl.full((1,), LARGEST, tl.float64))
    if POLICY != _REWEIGHTED:
        value = tl.maximum(value, tl.full((1,), LOWER, tl.float64))
        value = tl.minimum(value, tl.full((1,), UPPER, tl.float64))
    tl.store(moved + k, value, mask=inside)


def threshold_step(
    counts: Tensor, noise: Tensor | None, policy: Any, state: Any, batch_size: float, step: int
) -> tuple[Tensor, Any]:
    """fastclip.ops.threshold_step for the policies of fastclip.clipping that count."""
    numbers, groups = step_numbers(policy), policy.num_groups or 1
    if (
        numbers is None
        or groups > _MOST_GROUPS
        or not runs_on(counts.new_empty(0, dtype=torch.float32))
    ):
        return NotImplemented
    noisy = torch.empty_like(counts)
    name = "weights" if numbers.policy == PolicyCode.REWEIGHTED else "threshold"
    moved = torch.empty_like(getattr(state, name))
    _step_kernel[(1,)](
        counts, counts if noise is None else noise, state.threshold, state.origin, noisy, moved,
        groups,
        POLICY=numbers.policy.value, GROUPED=policy.num_groups is not None, NOISE=noise is not None,
        BATCH=float(batch_size), RATE=numbers.rate, TARGET=numbers.target, SHIFT=numbers.shift,
        LOWER=numbers.lower, UPPER=numbers.upper, LARGEST=numbers.largest,
        BLOCK_K=next_power_of_2(groups),
    )  # fmt: skip
    return noisy, replace(state, **{name: moved})

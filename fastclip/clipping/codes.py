"""Codes and numbers by which kernels identify fastclip's own strategies.

Triton (ops/triton/clip_scale.py) and CUDA (ops/cuda.py) share this table. csrc/cuda/clip_scale.cuh
repeats the codes and the limit, and tests/clipping/test_codes.py compares them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from fastclip.clipping.groups import Group, Reweighted
from fastclip.clipping.policy import LARGEST, SMALLEST
from fastclip.clipping.scales import Automatic, Global, GlobalAdapt, Hard, Tanh, hidden_square
from fastclip.clipping.thresholds import Constant, PerLayer, Quantile, StagedThreshold
from fastclip.core.numerics import margin


class ScaleCode(IntEnum):
    """Scale functions."""

    HARD = 0
    TANH = 1
    AUTOMATIC = 2
    GLOBAL = 3
    GLOBAL_ADAPT = 4
    AUTO_V = 5
    """AUTOMATIC with gamma = 0."""


class PolicyCode(IntEnum):
    """What policies count, and how noisy counts move their thresholds."""

    UNCOUNTED = 0
    QUANTILE = 1
    GROUP = 2
    REWEIGHTED = 3


SCALES: dict[type, ScaleCode] = {
    Hard: ScaleCode.HARD,
    Tanh: ScaleCode.TANH,
    Automatic: ScaleCode.AUTOMATIC,
    Global: ScaleCode.GLOBAL,
    GlobalAdapt: ScaleCode.GLOBAL_ADAPT,
}
POLICIES: dict[type, PolicyCode] = {
    Constant: PolicyCode.UNCOUNTED,
    PerLayer: PolicyCode.UNCOUNTED,
    StagedThreshold: PolicyCode.UNCOUNTED,
    Quantile: PolicyCode.QUANTILE,
    Group: PolicyCode.GROUP,
    Reweighted: PolicyCode.REWEIGHTED,
}


class ClipNumbers(NamedTuple):
    """Numbers that clip_scale uses in addition to tensors."""

    scale: ScaleCode
    policy: PolicyCode
    parameter: float
    """eps or gamma of the scale function, or `hidden_square` for AUTO_V."""
    tau: float
    """A quantile's counts compare norms with tau C."""
    below: bool
    """A quantile counts norms up to tau C, not beyond."""
    centred: bool
    """A sample counts +1/2 or -1/2, not 1 or 0."""
    room: float
    """Factor of the scales for the rounding margin: 1 - margin, or 1."""
    within: float
    """Factor of the thresholds for the rounding margin. One of the two factors is 1."""


def clip_numbers(strategy: Any) -> ClipNumbers | None:
    """Return codes and numbers of a strategy for float32 norms, or None if a part is user-defined."""
    scale, policy = strategy.scale, strategy.threshold
    kind, way = SCALES.get(type(scale)), POLICIES.get(type(policy))
    if kind is None or way is None:
        return None
    room = 1 - margin(torch.float32)
    parameter = float(getattr(scale, "eps", getattr(scale, "gamma", 0.0)))
    if kind == ScaleCode.AUTOMATIC and not parameter:
        kind, parameter = ScaleCode.AUTO_V, hidden_square(torch.float32)
    return ClipNumbers(
        kind,
        way,
        parameter=parameter,
        tau=float(getattr(policy, "tau", 1.0)),
        below=getattr(policy, "count_as", "") == "below",
        centred=getattr(policy, "centred", False),
        room=1.0 if strategy.room_within else room,
        within=room if strategy.room_within else 1.0,
    )


class StepNumbers(NamedTuple):
    """Numbers that threshold_step uses in addition to tensors and the batch size."""

    policy: PolicyCode
    rate: float
    """A quantile's learning rate, negative if norms are counted "below"."""
    target: float
    shift: float
    """Added to a quantile's fraction: 1/2 if samples count +1/2 or -1/2."""
    lower: float
    upper: float
    largest: float
    """Largest ratio, or weight, of a group."""


def step_numbers(policy: Any) -> StepNumbers | None:
    """Return codes and numbers of a policy, or None if it counts nothing or is user-defined."""
    way = POLICIES.get(type(policy))
    if not way:
        return None
    largest = float(getattr(policy, "max_ratio", getattr(policy, "max_weight", 0.0)))
    if way != PolicyCode.QUANTILE:
        return StepNumbers(way, 0.0, 0.0, 0.0, SMALLEST, LARGEST, largest)
    return StepNumbers(
        way,
        rate=-policy.learning_rate if policy.count_as == "below" else policy.learning_rate,
        target=policy.target,
        shift=0.5 if policy.centred else 0.0,
        lower=policy.lower or SMALLEST,
        upper=policy.upper or LARGEST,
        largest=largest,
    )

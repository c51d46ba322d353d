"""What kernels are told of fastclip's own strategies: codes of their parts, and the numbers of each.

The one table for Triton (ops/triton/clip_scale.py) and CUDA (ops/cuda.py). csrc/cuda/clip_scale.cuh has
the same codes and the same limit in its own words, which tests/clipping/test_codes.py compares.
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
    """What clip_scale computes with, beside tensors."""

    scale: ScaleCode
    policy: PolicyCode
    parameter: float
    """eps or gamma of the scale function; of AUTO_V, `hidden_square`."""
    tau: float
    """A quantile's counts compare norms with tau C."""
    below: bool
    """A quantile counts norms within it, not beyond."""
    centred: bool
    """A sample counts +1/2 or -1/2, not 1 or 0."""
    room: float
    """What scales are multiplied by to leave room for rounding: 1 - margin."""
    within: float
    """What thresholds are multiplied by in its place; one of the two is 1."""


def clip_numbers(strategy: Any) -> ClipNumbers | None:
    """Codes and numbers of a strategy for float32 norms; None where a part is a user's own."""
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
    """What threshold_step computes with, beside tensors and the batch size."""

    policy: PolicyCode
    rate: float
    """A quantile's learning rate, negative where counts within it raise the fraction."""
    target: float
    shift: float
    """Added to a quantile's fraction: 1/2 where samples count +1/2 or -1/2."""
    lower: float
    upper: float
    largest: float
    """Largest ratio, or weight, of a group."""


def step_numbers(policy: Any) -> StepNumbers | None:
    """Codes and numbers of a policy; None where it counts nothing, or is a user's own."""
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

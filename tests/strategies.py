"""One strategy of every kind, for tests that hold for all of them."""

from __future__ import annotations

from fastclip import clipping
from fastclip.clipping import (
    Automatic,
    Clipping,
    Constant,
    Global,
    GlobalAdapt,
    Group,
    Hard,
    PerLayer,
    Quantile,
    Reweighted,
    StagedThreshold,
    Tanh,
)

STEPS = 12

SCALES = [
    scale
    for normalized in (False, True)
    for scale in (
        Hard(normalized),
        Tanh(normalized=normalized),
        Automatic(normalized=normalized),
        Automatic(0.0, normalized),
        Global(2.0, normalized),
        GlobalAdapt(2.0, normalized),
    )
]
POLICIES = [
    Constant(),
    PerLayer(),
    StagedThreshold(STEPS),
    Quantile("below", centred=True),
    Quantile("above", tau=2.5, lower=0.5),
    Quantile("above", lower=0.5, num_groups=3),
    Group(3),
    Group(3, thresholds="previous_step"),
    Reweighted(3),
    Reweighted(3, thresholds="previous_step"),
]


def sensible(scale: object, policy: object) -> bool:
    """Whether the combination is one that Clipping accepts."""
    try:
        Clipping(scale, policy)
    except ValueError:
        return False
    return True


COMBINATIONS = [Clipping(s, p) for s in SCALES for p in POLICIES if sensible(s, p)]

PRESETS = {
    "dp_sgd": clipping.dp_sgd(),
    "normalized_dp_sgd": clipping.normalized_dp_sgd(),
    "automatic": clipping.automatic(),
    "automatic_v": clipping.automatic(0.0),
    "fixed_soft": clipping.fixed_soft(),
    "adaptive": clipping.adaptive(),
    "soft_ada_clip": clipping.soft_ada_clip(),
    "unbounded_adaptive": clipping.unbounded_adaptive(),
    "bounded_adaptive": clipping.bounded_adaptive(0.5),
    "global_adapt": clipping.global_adapt(2.0),
    "dpsgd_f": clipping.dpsgd_f(3),
    "dpsgd_f_previous": clipping.dpsgd_f(3, thresholds="previous_step"),
    "naive_reweighting": clipping.naive_reweighting(3),
    "naive_previous": clipping.naive_reweighting(3, thresholds="previous_step"),
    "sad_dpsgd": clipping.sad_dpsgd(STEPS),
    "auto_s": clipping.auto_s(STEPS, stages=4),
    "auto_l": clipping.auto_l(STEPS, stages=4),
}


def label(strategy: Clipping) -> str:
    """A short name for a test's id."""
    scale, policy = strategy.scale, strategy.threshold
    parts = [type(scale).__name__, type(policy).__name__]
    parts += ["normalized"] * scale.normalized + ["same_step"] * policy.same_step
    parts += ["groups"] * (policy.num_groups is not None)
    parts += ["gamma_0"] * (getattr(scale, "gamma", None) == 0)
    return "-".join(parts)

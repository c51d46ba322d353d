"""Clipping strategies: scale function x threshold policy x noise schedule, and the papers' presets."""

from fastclip.clipping.groups import Group, Reweighted
from fastclip.clipping.policy import ThresholdPolicy, Thresholds
from fastclip.clipping.presets import (
    adaptive,
    auto_l,
    auto_s,
    automatic,
    bounded_adaptive,
    dp_sgd,
    dpsgd_f,
    fixed_soft,
    global_adapt,
    naive_reweighting,
    normalized_dp_sgd,
    per_layer,
    sad_dpsgd,
    soft_ada_clip,
    unbounded_adaptive,
)
from fastclip.clipping.resolve import resolve
from fastclip.clipping.scales import Automatic, Global, GlobalAdapt, Hard, ScaleFunction, Tanh
from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    NoiseSchedule,
    StagedNoise,
    StepNoise,
    TimeNoise,
)
from fastclip.clipping.strategy import Clipping
from fastclip.clipping.thresholds import Constant, PerLayer, Quantile, StagedThreshold

__all__ = [
    "Automatic",
    "Clipping",
    "Constant",
    "ConstantNoise",
    "ExponentialNoise",
    "Global",
    "GlobalAdapt",
    "Group",
    "Hard",
    "LinearNoise",
    "NoiseSchedule",
    "PerLayer",
    "Quantile",
    "Reweighted",
    "ScaleFunction",
    "StagedNoise",
    "StagedThreshold",
    "StepNoise",
    "Tanh",
    "ThresholdPolicy",
    "Thresholds",
    "TimeNoise",
    "adaptive",
    "auto_l",
    "auto_s",
    "automatic",
    "bounded_adaptive",
    "dp_sgd",
    "dpsgd_f",
    "fixed_soft",
    "global_adapt",
    "naive_reweighting",
    "normalized_dp_sgd",
    "per_layer",
    "resolve",
    "sad_dpsgd",
    "soft_ada_clip",
    "unbounded_adaptive",
]

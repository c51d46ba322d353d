"""Clipping strategies: scale function x threshold policy."""

from fastclip.clipping.presets import dp_sgd, per_layer, resolve
from fastclip.clipping.scales import Hard, ScaleFunction
from fastclip.clipping.strategy import Clipping
from fastclip.clipping.thresholds import Constant, PerLayer, ThresholdPolicy

__all__ = [
    "Clipping",
    "Constant",
    "Hard",
    "PerLayer",
    "ScaleFunction",
    "ThresholdPolicy",
    "dp_sgd",
    "per_layer",
    "resolve",
]

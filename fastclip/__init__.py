"""fastclip: exact per-sample gradient clipping in one backward pass, for DP training in PyTorch."""

from fastclip import clipping, errors
from fastclip.engine import FastPrivacyEngine
from fastclip.layers import register_rule
from fastclip.optimizer import FastDPOptimizer
from fastclip.planner import Costs, Planner

__version__ = "0.1.0"
__all__ = [
    "Costs",
    "FastDPOptimizer",
    "FastPrivacyEngine",
    "Planner",
    "clipping",
    "errors",
    "register_rule",
]

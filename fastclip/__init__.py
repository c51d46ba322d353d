"""fastclip: exact per-sample gradient clipping in one backward pass, for DP training in PyTorch."""

from fastclip import clipping, errors, losses
from fastclip.engine import FastPrivacyEngine
from fastclip.layers import register_rule
from fastclip.model.unwrapping import bare_state_dict, unwrap
from fastclip.optim.grad_scaler import GradScaler
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.planner import Costs, Planner

__version__ = "0.1.0"
__all__ = [
    "Costs",
    "FastDPOptimizer",
    "FastPrivacyEngine",
    "GradScaler",
    "Planner",
    "bare_state_dict",
    "clipping",
    "errors",
    "losses",
    "register_rule",
    "unwrap",
]

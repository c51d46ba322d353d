"""fastclip: exact per-sample gradient clipping in one backward pass, for DP training in PyTorch."""

from fastclip import clipping, errors
from fastclip.engine import FastPrivacyEngine
from fastclip.layers import register_rule
from fastclip.optimizer import FastDPOptimizer

__version__ = "0.1.0"
__all__ = ["FastDPOptimizer", "FastPrivacyEngine", "clipping", "errors", "register_rule"]

"""opacus.optimizers."""

from fastclip.engine.by_hand import DistributedDPOptimizer, DPOptimizer
from fastclip.opacus.rest import rest_of

__all__ = ["DPOptimizer", "DistributedDPOptimizer"]

__getattr__ = rest_of("opacus.optimizers")

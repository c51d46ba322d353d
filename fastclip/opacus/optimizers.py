"""opacus.optimizers."""

from fastclip.opacus.rest import rest_of
from fastclip.optim.by_hand import DistributedDPOptimizer, DPOptimizer

__all__ = ["DPOptimizer", "DistributedDPOptimizer"]

__getattr__ = rest_of("opacus.optimizers")
